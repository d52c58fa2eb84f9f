"""Every import contract breaks when its rule is broken, so a green lint means something.

All bad imports are planted in one copy of the two packages, together with the modules
that they need and that do not exist yet. The checker runs once over that copy, and each
case looks for its import in the report of its contract.
"""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"kvcellar": "sidecar", "kvcellar_operator": "operator"}

# contract, the module that gets the line, the line
BAD_IMPORTS = [
    ("layers", "kvcellar.errors", "import kvcellar.contract"),
    ("layers", "kvcellar.region.file", "import kvcellar.index.chunks"),
    ("layers", "kvcellar.daemon.service", "import kvcellar.cli"),
    ("layers", "kvcellar.daemon.service", "import kvcellar.demo.models"),
    ("programs", "kvcellar.daemon.service", "import kvcellar.worker.pin"),
    ("programs", "kvcellar_operator.sizing", "import kvcellar.daemon.config"),
    ("meaning", "kvcellar.daemon.service", "import kvcellar.index.journal"),
    ("command-line", "kvcellar.cli", "import kvcellar.vllm"),
    ("command-line", "kvcellar.cli", "import kvcellar.worker.attach"),
    ("region", "kvcellar.region.geometry", "import kvcellar.region.file"),
    ("index", "kvcellar.index.policy", "import kvcellar.index.journal"),
    ("worker", "kvcellar.worker.plan", "import kvcellar.worker.copier"),
    ("vllm", "kvcellar.vllm.manager", "import kvcellar.vllm.spec"),
    ("daemon", "kvcellar.daemon.config", "import kvcellar.daemon.app"),
    ("operator", "kvcellar_operator.inject", "import kvcellar_operator.cluster"),
    ("operator-uses", "kvcellar_operator.observe", "import kvcellar.region.file"),
    ("operator-used", "kvcellar.cli", "import kvcellar_operator.cluster"),
    ("operator-used", "kvcellar.contract", "import kvcellar_operator.sizing"),
    ("vllm-only", "kvcellar.worker.offload", "import vllm.config"),
    ("vllm-only", "kvcellar.demo.models", "import vllm"),
    ("torch-only", "kvcellar.index.chunks", "import torch"),
    ("daemon-light", "kvcellar.daemon.service", "import numpy as np"),
    ("http-only", "kvcellar.region.survey", "import pydantic"),
    ("cluster-only", "kvcellar.daemon.app", "from kubernetes import client"),
    ("pure", "kvcellar.worker.plan", "import mmap"),
    ("pure", "kvcellar_operator.sizing", "import kopf"),
]


def contract_titles() -> dict[str, str]:
    """The title of each contract by its identifier, in the order of the configuration."""
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    prefix = "importlinter:contract:"
    return {
        section.removeprefix(prefix): config[section]["name"]
        for section in config.sections()
        if section.startswith(prefix)
    }


def module_file(tree: Path, module: str) -> Path:
    """The file of a module of ours, made with its package if it is not there yet."""
    package, *rest = module.split(".")
    folder = tree / FOLDERS[package] / package
    for name in rest[:-1]:
        folder /= name
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    as_package = folder / rest[-1] / "__init__.py"
    path = as_package if as_package.exists() else folder / f"{rest[-1]}.py"
    path.touch()
    return path


def plant(tree: Path, module: str, line: str) -> None:
    """Put one import line at the end of a module; write the imported module if it is ours."""
    imported = line.split()[1]
    if imported.partition(".")[0] in FOLDERS:
        module_file(tree, imported)
    with module_file(tree, module).open("a") as file:
        file.write(f"\n{line}\n")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the checker says of each broken contract, by the contract's title."""
    tree = tmp_path_factory.mktemp("tree")
    for package, folder in FOLDERS.items():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder / package, tree / folder / package, ignore=ignored)
    shutil.copy(ROOT / ".importlinter", tree)
    for _, module, line in BAD_IMPORTS:
        plant(tree, module, line)

    path = os.pathsep.join(str(tree / folder) for folder in FOLDERS.values())
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "\nBroken contracts\n" in result.stdout, result.stdout + result.stderr
    _, _, broken = result.stdout.partition("\nBroken contracts\n")
    title_above_rule = re.compile(r"^(.+)\n-+\n", re.MULTILINE)
    _, *parts = title_above_rule.split(broken)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_contract_has_a_bad_import_here() -> None:
    assert {contract for contract, _, _ in BAD_IMPORTS} == set(contract_titles())


@pytest.mark.parametrize(("contract", "module", "line"), BAD_IMPORTS)
def test_a_bad_import_breaks_its_contract(
    reports: dict[str, str], contract: str, module: str, line: str
) -> None:
    title = contract_titles()[contract]
    root = line.split()[1].partition(".")[0]
    imported = line.split()[1] if root in FOLDERS else root

    assert f"{module} -> {imported} (" in reports.get(title, f"{title}: kept")
