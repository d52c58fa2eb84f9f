"""`kvcellar plan` and `kvcellar doctor`: what they say of a real volume, and that they leave it as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcellar.contract import EngineId, HugePages
from kvcellar.demo.sidecar import free_port
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.promises import needed_bytes
from kvcellar.region.states import RegionRequest
from tests.integration.conftest import MakeSidecar
from tests.support.sidecars import KVCELLAR
from tests.support.volumes import used_bytes

pytestmark = pytest.mark.integration

MIB = 2**20


def run(volume: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command beside no sidecar, unless `KVCELLAR_HTTP_PORT` says where one is."""
    port = {"KVCELLAR_HTTP_PORT": str(free_port())}
    return subprocess.run(
        [KVCELLAR, *arguments],
        env={"PATH": os.environ["PATH"], "KVCELLAR_ROOT": str(volume), **port, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def planned(volume: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and body of a plan."""
    ended = run(volume, "plan", "--json", *arguments)
    return ended.returncode, json.loads(ended.stdout)


def examined(volume: Path, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status of the doctor, and its findings by the name of the check."""
    ended = run(volume, "doctor", "--json", **variables)
    body = json.loads(ended.stdout)
    assert body["healthy"] == (ended.returncode == 0)
    return ended.returncode, {finding["check"]: finding for finding in body["findings"]}


def test_a_plan_fits_or_does_not_and_makes_nothing(volume: Path) -> None:
    before = used_bytes(volume)
    status, body = planned(volume, "--capacity", "64Mi", "--engine-id", "eng")
    assert (status, body["fits"], body["askedBytes"]) == (0, True, needed_bytes(64 * MIB))
    assert {"name", "limitBytes", "usageBytes", "binding"} == set(body["limits"][0])
    status, body = planned(volume, "--capacity", "512Mi", "--engine-id", "eng")
    assert (status, body["fits"], body["bindingLimit"]) == (3, False, "tmpfs")
    assert body["freeBytes"] == 256 * MIB - before
    assert (list(volume.iterdir()), used_bytes(volume)) == ([], before)


def test_a_refused_plan_shows_the_table_and_one_sentence(volume: Path) -> None:
    ended = run(volume, "plan", KVCELLAR_CAPACITY="512Mi", KVCELLAR_ENGINE_ID="eng")
    assert ended.returncode == 3
    assert "binds     tmpfs" in ended.stdout
    assert "fits      no" in ended.stdout
    assert ended.stderr.startswith("kvcellar: region eng needs ")
    assert ended.stderr.count("\n") == 1


def test_settings_or_a_volume_that_cannot_be_used_are_status_2(
    volume: Path, tmp_path: Path
) -> None:
    assert run(volume, "plan").returncode == 2
    assert run(volume, "plan", "--capacity", "1Ki").returncode == 2
    assert run(volume, "plan", "--capacity", "1Gi", "--engines", "0").returncode == 2
    assert run(tmp_path / "nowhere", "plan", "--capacity", "1Gi").returncode == 2
    assert run(Path("/proc"), "plan", "--capacity", "1Gi").returncode == 2


def test_what_other_regions_were_promised_counts(volume: Path) -> None:
    directory = RegionDirectory.create(volume / "kvcellar")
    request = RegionRequest(EngineId("other"), 128 * MIB, huge_pages=HugePages.NEVER)
    region = OwnedRegion.acquire(directory, request, list)
    try:
        assert planned(volume, "--capacity", "192Mi", "--engine-id", "eng")[0] == 3
        assert planned(volume, "--capacity", "64Mi", "--engine-id", "eng")[0] == 0
        # The other one's own plan does not count its own promise.
        status, body = planned(volume, "--capacity", "128Mi", "--engine-id", "other")
        assert (status, body["askedBytes"] <= needed_bytes(128 * MIB)) == (0, True)
    finally:
        region.close()
        directory.close()


def test_a_region_that_is_there_asks_for_what_it_lacks(volume: Path) -> None:
    directory = RegionDirectory.create(volume / "kvcellar")
    request = RegionRequest(EngineId("eng"), 160 * MIB, huge_pages=HugePages.NEVER)
    region = OwnedRegion.acquire(directory, request, list)
    region.reserve(lambda: False)
    region.close()
    directory.close()
    status, body = planned(volume, "--capacity", "160Mi", "--engine-id", "eng")
    assert (status, body["askedBytes"] < 2 * MIB) == (0, True)
    # One of another size would take the place of the old one.
    status, body = planned(volume, "--capacity", "200Mi", "--engine-id", "eng")
    assert (status, body["askedBytes"] < 48 * MIB) == (0, True)
    assert planned(volume, "--capacity", "160Mi", "--engine-id", "other")[0] == 3


def test_the_doctor_finds_a_sound_volume_sound_and_leaves_it_as_it_was(volume: Path) -> None:
    before = used_bytes(volume)
    status, found = examined(volume)
    assert status == 0
    for check in ("volume", "directory", "locks", "leases", "library", "vllm", "desired"):
        assert found[check]["verdict"] == "ok", found[check]
    assert found["sidecar"]["verdict"] == "warning"
    assert all(finding["remedy"] or finding["verdict"] == "ok" for finding in found.values())
    assert (list(volume.iterdir()), used_bytes(volume)) == ([], before)


def test_the_doctor_sees_a_sidecar_that_is_ready(volume: Path, make_sidecar: MakeSidecar) -> None:
    sidecar = make_sidecar().start()
    sidecar.until_state("Ready")
    ended = sidecar.run("doctor")
    assert ended.returncode == 0, ended.stdout
    assert "lives, and every region is reserved" in ended.stdout
    assert "plan: 1 of 1 regions are there, and stay" in ended.stdout
    assert not [name for name in sidecar.files if not name.startswith("eng.")]


@pytest.mark.parametrize(
    ("variables", "check"),
    [
        ({"KVCELLAR_ROOT": "/proc"}, "volume"),
        ({"KVCELLAR_NONSENSE": "1"}, "settings"),
        ({"KVCELLAR_CAPACITY": "512Mi", "KVCELLAR_ENGINE_ID": "eng"}, "plan"),
        ({"KVCELLAR_DESIRED_FILE": "/proc"}, "desired"),
    ],
)
def test_the_doctor_names_a_problem_and_its_remedy(
    volume: Path, variables: dict[str, str], check: str
) -> None:
    status, found = examined(volume, **variables)
    assert (status, found[check]["verdict"]) == (6, "problem")
    assert found[check]["remedy"]


def test_a_directory_that_others_share_is_a_problem(volume: Path) -> None:
    (volume / "kvcellar").mkdir()
    (volume / "kvcellar").chmod(0o1777)
    status, found = examined(volume)
    assert (status, found["directory"]["verdict"]) == (6, "problem")
    assert "shared" in found["directory"]["found"]


def test_a_library_of_another_version_is_told(volume: Path, tmp_path: Path) -> None:
    package = tmp_path / "library" / "kvcellar"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "9.9.9"\nraise SystemExit(9)\n')
    # -I: the doctor reads PYTHONPATH and must not import from it.
    program = "import sys; from kvcellar.cli import main; sys.exit(main(['doctor', '--json']))"
    ended = subprocess.run(
        [sys.executable, "-I", "-c", program],
        env={"KVCELLAR_ROOT": str(volume), "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    (library,) = [f for f in json.loads(ended.stdout)["findings"] if f["check"] == "library"]
    assert (library["verdict"], "kvcellar 9.9.9" in library["found"]) == ("warning", True)
