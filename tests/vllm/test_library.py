"""The library as `kvcellar install-library` lays it down, in the interpreter of a real engine."""

import os
import subprocess
import sys
from pathlib import Path

from tests.vllm.conftest import engine_path

CODE = """
import kvcellar, kvcellar.vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
assert issubclass(kvcellar.vllm.KVCellarConnector, KVConnectorBase_V1)
print(kvcellar.__file__, kvcellar.vllm.KVCellarOffloadingSpec.__module__)
"""


def test_an_engine_imports_the_installed_library_before_any_other(tmp_path: Path) -> None:
    library = tmp_path / "library"
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [sys.executable, "-m", "kvcellar.cli", "install-library", library],
        env={**own, "PYTHONPATH": engine_path()},
        check=True,
    )
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=tmp_path,
        env={**own, "PYTHONPATH": str(library / "current"), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, module = done.stdout.splitlines()[-1].split()
    assert Path(file) == library / "current" / "kvcellar" / "__init__.py"
    assert module == "kvcellar.vllm.spec"
