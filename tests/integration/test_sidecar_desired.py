"""What is desired at run time, from the kubelet's file to the region: a real sidecar, real holders."""

import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvcellar.contract import MAX_DESIRED_BYTES, DesiredRegion, DesiredState, desired_text
from kvcellar.errors import NotReady
from kvcellar.region.frame import META_BYTES
from tests.integration.conftest import Fork, MakeSidecar, MakeVolume
from tests.support.children import Child
from tests.support.downward import DownwardVolume
from tests.support.sidecars import Sidecar, attach, until
from tests.support.volumes import used_bytes

pytestmark = pytest.mark.integration

MIB = 2**20
UID = "7b0c9a52-0000-4000-8000-00000000000a"
UNUSED = 'kvcellar_region_desired_unused{engine_id="eng"}'


def wish(
    generation: int, contents: str | None = None, retention: str | None = None, uid: str = UID
) -> str:
    """The annotation that desires something of `eng`."""
    region = DesiredRegion(generation, contents, retention)
    return desired_text(DesiredState(uid, {"eng": region}))


@pytest.fixture
def desired(tmp_path: Path) -> DownwardVolume:
    """The file that the sidecars of a test read; nothing is desired at first."""
    return DownwardVolume(tmp_path / "info")


@pytest.fixture
def sidecar(make_sidecar: MakeSidecar, desired: DownwardVolume) -> Sidecar:
    """A sidecar that is Ready and reads the file."""
    made = make_sidecar(**variables(desired)).start()
    made.until_state("Ready")
    return made


def variables(desired: DownwardVolume) -> dict[str, str]:
    return {"KVCELLAR_DESIRED_FILE": str(desired.file), "KVCELLAR_POD_UID": UID}


def until_region(sidecar: Sidecar, what: str, holds: Callable[[dict[str, Any]], bool]) -> None:
    def look() -> bool:
        region = sidecar.region()
        return bool(region) and holds(region)

    until(look, f"{what}: {sidecar.log.read_text()}", 10.0)


def until_seen(sidecar: Sidecar, generation: int) -> dict[str, Any]:
    until_region(
        sidecar, f"generation {generation}", lambda r: r["observedGeneration"] == generation
    )
    return sidecar.region()


def until_reason(sidecar: Sidecar, said: str) -> None:
    until_region(sidecar, said, lambda region: said in region["reason"])


def hold(fork: Fork, sidecar: Sidecar) -> Child:
    """A process of an engine that is attached until it is killed."""

    def program(connection: Connection) -> None:
        participant = attach(sidecar.directory)
        connection.send("attached")
        connection.recv()
        participant.close()

    child = fork(program)
    assert child.hear() == "attached"
    return child


def is_all_freed(sidecar: Sidecar, volume: Path) -> bool:
    """Whether a released region has left nothing but the page that tells engines so."""
    names = [name.rpartition(".")[2] for name in sidecar.files]
    return (used_bytes(volume), names) == (META_BYTES, ["data", "index", "meta"])


# --- what is applied ----------------------------------------------------------------------------------


def test_what_is_desired_is_applied_and_taken_back_when_nothing_is(
    make_sidecar: MakeSidecar, desired: DownwardVolume
) -> None:
    sidecar = make_sidecar(**variables(desired), KVCELLAR_RETENTION="15m").start()
    before = sidecar.until_state("Ready")
    assert (before["contents"], before["retention"]) == ("discard", "15m")
    assert before["observedGeneration"] == 0

    desired.write(wish(2, contents="keep", retention="1h"))
    now = until_seen(sidecar, 2)
    assert (now["contents"], now["retention"], now["reason"]) == ("keep", "1h", "")
    desired.write(wish(3, contents="keep"))
    now = until_seen(sidecar, 3)
    assert (now["contents"], now["retention"]) == ("keep", "15m")

    desired.write("")
    now = until_seen(sidecar, 0)
    assert (now["contents"], now["retention"]) == ("discard", "15m")
    # A new object in the place of a removed one counts from 1 again.
    desired.write(wish(1, retention="keep"))
    assert until_seen(sidecar, 1)["retention"] == "keep"

    assert [line["generation"] for line in sidecar.events("desired state applied")] == [2, 3, 1]
    assert len(sidecar.events("desired state withdrawn")) == 1
    assert len(sidecar.events("contents are not kept yet: each engine start discards them")) == 2
    assert sidecar.metrics()[UNUSED] == 0


def test_a_file_that_is_removed_means_that_nothing_is_desired(
    sidecar: Sidecar, desired: DownwardVolume
) -> None:
    desired.write(wish(2, retention="1h"))
    until_seen(sidecar, 2)
    desired.file.unlink()
    assert until_seen(sidecar, 0)["retention"] == "keep"


def test_what_is_desired_before_the_start_holds_from_the_start(
    make_sidecar: MakeSidecar, desired: DownwardVolume, volume: Path
) -> None:
    desired.write(wish(7, retention="now"))
    sidecar = make_sidecar(**variables(desired)).start()
    region = sidecar.until_state("Released")
    assert region["observedGeneration"] == 7
    assert is_all_freed(sidecar, volume)
    assert sidecar.events("region made") == []
    assert sidecar.get("/startupz")[0] == 200
    assert sidecar.get("/livez")[0] == 200


# --- retention: now -----------------------------------------------------------------------------------


def test_now_frees_an_unheld_region_and_keep_makes_it_again(
    sidecar: Sidecar, desired: DownwardVolume, volume: Path
) -> None:
    desired.write(wish(2, retention="now"))
    region = sidecar.until_state("Released")
    assert (region["reservedBytes"], region["settledBytes"], region["observedGeneration"]) == (
        0, 0, 2,
    )  # fmt: skip
    assert is_all_freed(sidecar, volume)
    assert sidecar.get("/livez")[0] == 200
    assert sidecar.get("/readyz")[0] == 503
    # Another change that still says now leaves it as it is.
    desired.write(wish(3, contents="keep", retention="now"))
    until_seen(sidecar, 3)
    assert sidecar.region()["state"] == "Released"

    desired.write(wish(4, retention="keep"))
    region = sidecar.until_state("Ready")
    assert region["reservedBytes"] == 32 * MIB
    assert len(sidecar.events("region released")) == 1
    assert len(sidecar.events("region made")) == 2
    attach(sidecar.directory).close()


def test_a_released_region_comes_back_when_nothing_is_desired_any_more(
    sidecar: Sidecar, desired: DownwardVolume
) -> None:
    desired.write(wish(2, retention="now"))
    sidecar.until_state("Released")
    desired.write("")
    assert sidecar.until_state("Ready")["observedGeneration"] == 0


def test_an_engine_that_starts_while_its_region_is_released_is_told_at_once_and_finds_the_next_one(
    sidecar: Sidecar, desired: DownwardVolume, volume: Path
) -> None:
    desired.write(wish(2, retention="now"))
    sidecar.until_state("Released")
    began = time.monotonic()
    told = "^region eng failed: it was freed under the retention now: ask for another retention, or restart"
    with pytest.raises(NotReady, match=told):
        attach(sidecar.directory)
    assert time.monotonic() - began < 1
    assert sidecar.region()["orphans"] == []
    assert sidecar.run("clean").stdout == "nothing to remove\n"
    assert is_all_freed(sidecar, volume)

    desired.write(wish(3, retention="keep"))
    sidecar.until_state("Ready")
    attach(sidecar.directory).close()
    desired.write(wish(4, retention="now"))
    sidecar.until_state("Released")
    sidecar.end()
    assert (used_bytes(volume), sidecar.files) == (0, [])


def test_the_notice_of_a_sidecar_that_was_killed_makes_way_for_a_region(
    sidecar: Sidecar, desired: DownwardVolume
) -> None:
    desired.write(wish(2, retention="now"))
    sidecar.until_state("Released")
    sidecar.end(signal.SIGKILL)
    desired.write("")
    assert sidecar.start().until_state("Ready")["reservedBytes"] == 32 * MIB
    assert len(sidecar.files) == 3


def remove_the_page(directory: Path) -> None:
    (directory / "eng.meta").unlink()


def write_over_the_page(directory: Path) -> None:
    (directory / "eng.meta").write_bytes(b"x" * META_BYTES)


@pytest.mark.parametrize("harm", [shutil.rmtree, remove_the_page, write_over_the_page])
def test_a_notice_that_was_removed_or_damaged_is_put_up_again(
    sidecar: Sidecar, desired: DownwardVolume, volume: Path, harm: Callable[[Path], object]
) -> None:
    desired.write(wish(2, retention="now"))
    sidecar.until_state("Released")
    until(lambda: sidecar.owner(), "a notice")
    harm(sidecar.directory)
    until(sidecar.directory.exists, "the directory")
    with pytest.raises(NotReady, match="freed under the retention now"):
        attach(sidecar.directory)
    assert sidecar.region()["state"] == "Released"
    assert is_all_freed(sidecar, volume)


def test_now_waits_for_the_last_holder_however_it_ends(
    sidecar: Sidecar, desired: DownwardVolume, fork: Fork, volume: Path
) -> None:
    engine = hold(fork, sidecar)
    desired.write(wish(2, retention="now"))
    region = until_seen(sidecar, 2)
    assert (region["state"], len(region["participants"])) == ("Ready", 1)
    engine.kill()
    region = sidecar.until_state("Released")
    assert region["participants"] == []
    assert is_all_freed(sidecar, volume)


def test_now_that_is_taken_back_in_time_frees_nothing(
    sidecar: Sidecar, desired: DownwardVolume, fork: Fork
) -> None:
    engine = hold(fork, sidecar)
    desired.write(wish(2, retention="now"))
    until_seen(sidecar, 2)
    desired.write(wish(3, retention="keep"))
    until_seen(sidecar, 3)
    engine.kill()
    until_region(sidecar, "nobody attached", lambda region: region["participants"] == [])
    assert sidecar.region()["state"] == "Ready"
    assert sidecar.events("region released") == []


def test_now_ends_the_reserving_of_a_large_region_and_keep_goes_on_with_a_new_one(
    make_sidecar: MakeSidecar, make_volume: MakeVolume, desired: DownwardVolume
) -> None:
    large = make_volume(1024 * MIB)
    sidecar = make_sidecar(
        on=large, **variables(desired), KVCELLAR_CAPACITY="896Mi", KVCELLAR_HUGE_PAGES="never"
    ).start()
    sidecar.until_state("Reserving")
    desired.write(wish(2, retention="now"))
    sidecar.until_state("Released")
    assert is_all_freed(sidecar, large)
    desired.write(wish(3))
    assert sidecar.until_state("Ready")["reservedBytes"] == 896 * MIB


def test_now_ends_the_retries_of_a_region_that_does_not_fit(
    make_sidecar: MakeSidecar, desired: DownwardVolume
) -> None:
    sidecar = make_sidecar(**variables(desired), KVCELLAR_CAPACITY="1Gi").start()
    sidecar.until_state("Failed")
    desired.write(wish(2, retention="now"))
    region = sidecar.until_state("Released")
    assert region["reason"] == ""
    with pytest.raises(NotReady, match="freed under the retention now"):
        attach(sidecar.directory)
    desired.write(wish(3, retention="keep"))
    assert "size of the tmpfs" in sidecar.until_state("Failed")["reason"]


def test_a_region_of_an_earlier_sidecar_is_freed_by_the_next_one(
    sidecar: Sidecar, desired: DownwardVolume, volume: Path
) -> None:
    sidecar.end()
    desired.write(wish(2, retention="now"))
    sidecar.start()
    sidecar.until_state("Released")
    assert is_all_freed(sidecar, volume)


def test_a_held_region_of_an_earlier_sidecar_is_adopted_and_freed_after_its_holder(
    sidecar: Sidecar, desired: DownwardVolume, fork: Fork, volume: Path
) -> None:
    engine = hold(fork, sidecar)
    sidecar.end()
    desired.write(wish(2, retention="now"))
    sidecar.start()
    region = sidecar.until_state("Ready")
    assert (region["observedGeneration"], len(region["participants"])) == (2, 1)
    engine.kill()
    sidecar.until_state("Released")
    assert is_all_freed(sidecar, volume)


def test_what_is_desired_of_one_engine_leaves_the_others(
    make_sidecar: MakeSidecar, desired: DownwardVolume
) -> None:
    sidecar = make_sidecar(**variables(desired), KVCELLAR_ENGINES="2").start()
    for engine_id in ("eng_dp0", "eng_dp1"):
        sidecar.until_state("Ready", engine_id=engine_id)
    regions = {"eng_dp1": DesiredRegion(2, retention="now"), "other": DesiredRegion(9)}
    desired.write(desired_text(DesiredState(UID, regions)))
    sidecar.until_state("Released", engine_id="eng_dp1")
    assert sidecar.region("eng_dp0")["state"] == "Ready"
    assert sidecar.region("eng_dp0")["observedGeneration"] == 0
    files = {sidecar.data_file(engine_id) for engine_id in ("eng_dp0", "eng_dp1")}
    assert [path.stat().st_blocks * 512 for path in sorted(files)] == [32 * MIB, 0]


# --- what cannot be used ------------------------------------------------------------------------------

GARBAGE = [
    (b"\xff\xfe{}", "it is not JSON in UTF-8"),
    (b"[" * 100_000, "it is not JSON in UTF-8"),
    (b"x" * MIB, f"it has more than {MAX_DESIRED_BYTES} bytes"),
    (b'{"podUID":"' + UID.encode() + b'","regions":[]}', "its regions is a list"),
    (wish(9, retention="now", uid="another").encode(), f"of pod another, and this is pod {UID}"),
    (wish(9, retention="soon").encode(), "retention of its region eng is soon"),
    (wish(1, retention="now").encode(), "its generation 1 is below 8, which is in force"),
]


def test_what_cannot_be_used_is_inert_and_said_once(
    sidecar: Sidecar, desired: DownwardVolume
) -> None:
    desired.write(wish(2, retention="1h"))
    until_seen(sidecar, 2)
    for generation, (garbage, said) in enumerate(GARBAGE, start=2):
        desired.write(garbage)
        until_reason(sidecar, said)
        region = sidecar.region()
        assert (region["state"], region["observedGeneration"]) == ("Ready", generation)
        assert region["retention"] == "1h"
        assert sidecar.metrics()[UNUSED] == 1
        assert sidecar.get("/readyz")[0] == 200
        desired.write(wish(generation + 1, retention="1h"))
        assert until_seen(sidecar, generation + 1)["reason"] == ""
        assert sidecar.metrics()[UNUSED] == 0
    lines = sidecar.events("desired state not used")
    assert {line["level"] for line in lines} == {"WARNING"}
    for line, (_, said) in zip(lines, GARBAGE, strict=True):
        assert said in line["reason"]


def test_a_pipe_in_its_place_holds_nothing_up(sidecar: Sidecar, desired: DownwardVolume) -> None:
    desired.write(wish(2, retention="1h"))
    until_seen(sidecar, 2)
    desired.make_pipe()
    until_reason(sidecar, "it is no regular file")
    assert sidecar.region()["observedGeneration"] == 2
    desired.write(wish(3, retention="now"))
    sidecar.until_state("Released")
    assert sidecar.end()[0] == 0


def test_without_a_pod_uid_nothing_is_used(
    make_sidecar: MakeSidecar, desired: DownwardVolume
) -> None:
    desired.write(wish(2, retention="now"))
    sidecar = make_sidecar(KVCELLAR_DESIRED_FILE=str(desired.file)).start()
    sidecar.until_state("Ready")
    assert "KVCELLAR_POD_UID is not set" in sidecar.region()["reason"]
