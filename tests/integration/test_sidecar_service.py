"""The sidecar's service in process, on a real tmpfs: what goes wrong with a region, and what becomes of it."""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvcellar.contract import EngineId, PlanBody, RegionState
from kvcellar.daemon import plans
from kvcellar.daemon.config import Settings
from kvcellar.daemon.service import Service, region_requests
from kvcellar.daemon.status import RegionView
from kvcellar.errors import ConfigurationError, DoesNotFit, NotReady, RegionHeld, RegionMismatch
from kvcellar.region import file, locks
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.frame import META_BYTES, OWNER_AT, SESSION_AT, Section
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.promises import LimitReader
from tests.integration.conftest import MakeVolume
from tests.support.sidecars import attach, until
from tests.support.volumes import used_bytes

pytestmark = pytest.mark.integration

MIB = 2**20
FAILED, READY, RELEASED = RegionState.FAILED, RegionState.READY, RegionState.RELEASED


class Running:
    """A started service, and what a test asks of it."""

    def __init__(self, *, any_filesystem: bool = False) -> None:
        settings = Settings.load()
        self.directory = settings.region_directory
        self.service = Service(settings, region_requests(settings), any_filesystem=any_filesystem)
        self._ended = threading.Event()
        self.service.start(self._ended.set)

    def view(self, engine_id: str = "eng") -> RegionView:
        views = {view.engine_id: view for view in self.service.status().regions}
        return views[EngineId(engine_id)]

    def until_state(self, state: RegionState, engine_id: str = "eng") -> RegionView:
        def look() -> RegionView | None:
            view = self.view(engine_id)
            return view if view.state is state else None

        found = until(look, f"{engine_id} is {state}, not {self.view(engine_id)}")
        assert found is not None
        return found

    def fatal(self) -> BaseException:
        """Why it has to end; it is stopped as its process would stop it."""
        assert self._ended.wait(20)
        self.service.stop(10)
        assert self.service.fatal is not None
        return self.service.fatal

    def stop(self) -> None:
        self.service.stop(10)

    def files(self) -> list[str]:
        return sorted(os.listdir(self.directory)) if self.directory.exists() else []


MakeService = Callable[..., Running]


@pytest.fixture
def make_service(volume: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeService]:
    """Starts services on the test's own volume of 256 MiB, or on another."""
    made: list[Running] = []

    def make(*, any_filesystem: bool = False, **variables: str) -> Running:
        defaults = {"KVCELLAR_ROOT": str(volume), "KVCELLAR_ENGINE_ID": "eng"}
        defaults |= {"KVCELLAR_CAPACITY": "8Mi", "KVCELLAR_ON_FAILURE": "degrade"}
        for name, value in {**defaults, **variables}.items():
            monkeypatch.setenv(name, value)
        made.append(Running(any_filesystem=any_filesystem))
        return made[-1]

    yield make
    for running in made:
        running.stop()


def data_file(directory: Path) -> Path:
    (found,) = directory.glob("eng.*.data")
    return found


def damage(directory: Path, *sections: Section) -> None:
    """Write rubbish over both copies of sections of the page."""
    fd = os.open(directory / "eng.meta", os.O_WRONLY)
    for section in sections:
        os.pwrite(fd, b"\xff" * (section.end - section.offset), section.offset)
    os.close(fd)


# --- what does not fit --------------------------------------------------------------------------------


def test_under_degrade_a_region_that_does_not_fit_goes_on_when_the_limit_changes(
    make_service: MakeService, volume: Path
) -> None:
    running = make_service(KVCELLAR_CAPACITY="300Mi")
    view = running.until_state(FAILED)
    assert "size of the tmpfs" in view.reason
    status = running.service.status()
    assert status.not_started() == ""
    assert "size of the tmpfs" in status.not_ready()
    plan = status.plan()
    assert plan is not None
    assert (plan.fits, plan.bindingLimit) == (False, "tmpfs")
    assert plan.askedBytes >= 300 * MIB > plan.freeBytes
    assert [limit.name for limit in plan.limits if limit.binding] == ["tmpfs"]
    with pytest.raises(NotReady, match=r"region eng failed: .*size of the tmpfs"):
        attach(running.directory)  # at once: the page says so
    assert used_bytes(volume) == META_BYTES

    subprocess.run(["mount", "-o", "remount,size=400m", volume], check=True)
    assert running.until_state(READY).reserved_bytes == 300 * MIB
    accepted = running.service.status().plan()
    assert accepted is not None
    assert accepted.fits
    assert len(running.files()) == 3
    attach(running.directory).close()


@pytest.mark.parametrize("on_failure", ["fail", "degrade"])
def test_of_two_that_do_not_fit_together_exactly_one_wins(
    make_service: MakeService, volume: Path, on_failure: str
) -> None:
    pair = {
        name: make_service(
            KVCELLAR_ENGINE_ID=name, KVCELLAR_CAPACITY="160Mi", KVCELLAR_ON_FAILURE=on_failure
        )
        for name in ("one", "two")
    }

    def decided() -> list[RegionState]:
        states = [running.view(name).state for name, running in pair.items()]
        return states if FAILED in states and READY in states else []

    states = until(decided, "a winner and a loser")
    loser = list(pair.values())[states.index(FAILED)]
    if on_failure == "fail":
        assert isinstance(loser.fatal(), DoesNotFit)
    loser.stop()
    assert used_bytes(volume) == 160 * MIB + META_BYTES
    assert len(loser.files()) == 3


def test_memory_that_vanishes_while_reserving_is_given_back(
    make_service: MakeService, make_volume: MakeVolume
) -> None:
    small = make_volume(1024 * MIB)
    running = make_service(
        KVCELLAR_ROOT=str(small), KVCELLAR_CAPACITY="900Mi", KVCELLAR_HUGE_PAGES="never",
        KVCELLAR_ON_FAILURE="fail",
    )  # fmt: skip
    until(lambda: running.view().reserved_bytes, "some of it is reserved")
    with (small / "greedy").open("wb") as greedy:
        os.posix_fallocate(greedy.fileno(), 0, 200 * MIB)
    assert isinstance(running.fatal(), DoesNotFit)
    assert running.files() == []
    assert used_bytes(small) == 200 * MIB


def test_under_fail_a_sibling_that_was_made_goes_as_well(
    make_service: MakeService, volume: Path
) -> None:
    running = make_service(
        KVCELLAR_ENGINES="2", KVCELLAR_CAPACITY="160Mi", KVCELLAR_ON_FAILURE="fail"
    )
    assert isinstance(running.fatal(), DoesNotFit)
    assert running.files() == []
    assert used_bytes(volume) == 0


# --- directories that cannot be used -------------------------------------------------------------------


def symlink(volume: Path, _disk: Path) -> Path:
    (volume / "elsewhere").mkdir()
    (volume / "kvcellar").symlink_to(volume / "elsewhere")
    return volume


def disk(_volume: Path, disk: Path) -> Path:
    return disk


def missing(volume: Path, _disk: Path) -> Path:
    return volume / "nowhere"


def other_uid(volume: Path, _disk: Path) -> Path:
    (volume / "kvcellar").mkdir()
    os.chown(volume / "kvcellar", 12345, -1)
    return volume


def read_only(volume: Path, _disk: Path) -> Path:
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    return volume


BAD_DIRECTORIES = [
    (symlink, "is a link or no directory"),
    (disk, "is not on tmpfs"),
    (missing, "does not exist"),
    (other_uid, "belongs to uid 12345"),
    (read_only, "Read-only file system"),
]


@pytest.mark.parametrize(("spoil", "said"), BAD_DIRECTORIES)
def test_a_directory_that_cannot_be_used_fails_the_region_or_ends_the_sidecar(
    make_service: MakeService,
    volume: Path,
    tmp_path: Path,
    spoil: Callable[[Path, Path], Path],
    said: str,
) -> None:
    root = spoil(volume, tmp_path)
    degraded = make_service(KVCELLAR_ROOT=str(root))
    assert said in degraded.until_state(FAILED).reason
    assert degraded.service.status().not_started() == ""
    degraded.stop()
    fatal = make_service(KVCELLAR_ROOT=str(root), KVCELLAR_ON_FAILURE="fail").fatal()
    assert isinstance(fatal, ConfigurationError)
    assert said in str(fatal)
    assert used_bytes(volume) == 0


def test_a_directory_that_is_put_right_is_used(make_service: MakeService, volume: Path) -> None:
    symlink(volume, volume)
    running = make_service()
    running.until_state(FAILED)
    (volume / "kvcellar").unlink()
    running.until_state(READY)


def test_a_directory_on_a_disk_is_used_with_a_warning_if_asked(
    make_service: MakeService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_service(any_filesystem=True, KVCELLAR_ROOT=str(tmp_path)).until_state(READY)
    assert any("is not on tmpfs" in message for message in caplog.messages)


# --- another owner ------------------------------------------------------------------------------------


def test_a_region_that_another_owns_is_observed_and_taken_over(make_service: MakeService) -> None:
    first = make_service()
    before = first.until_state(READY)
    refused = make_service(KVCELLAR_ON_FAILURE="fail")
    second = make_service()
    assert isinstance(refused.fatal(), RegionHeld)
    observed = second.until_state(READY)
    assert "owned by another living process" in observed.reason
    assert observed.reserved_bytes == 8 * MIB
    assert second.service.status().not_ready() == ""

    first.stop()
    until(lambda: second.view().reason == "", "it was taken over")
    after = second.until_state(READY)
    assert before.owner is not None
    assert after.owner is not None
    assert after.owner.nonce == before.owner.nonce


def test_another_capacity_is_made_anew_unless_an_engine_holds_the_old_one(
    make_service: MakeService, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = make_service()
    running.until_state(READY)
    engine = attach(running.directory)
    running.stop()
    held = make_service(KVCELLAR_CAPACITY="16Mi")
    assert held.until_state(READY).capacity_bytes == 8 * MIB
    assert "region keeps its old capacity: an engine holds it" in caplog.messages
    engine.close()
    held.stop()
    assert make_service(KVCELLAR_CAPACITY="16Mi").until_state(READY).reserved_bytes == 16 * MIB
    assert used_bytes(volume) == 16 * MIB + META_BYTES


# --- damage -------------------------------------------------------------------------------------------


def cut(directory: Path) -> None:
    os.truncate(data_file(directory), MIB)


def punch(directory: Path) -> None:
    """Take every page out and keep the size, as FALLOC_FL_PUNCH_HOLE does."""
    os.truncate(data_file(directory), 0)
    os.truncate(data_file(directory), 8 * MIB)


def remove(directory: Path) -> None:
    data_file(directory).unlink()


def replace(directory: Path) -> None:
    path = data_file(directory)
    path.unlink()
    path.write_bytes(b"\0" * 8 * MIB)


def index_file(directory: Path) -> Path:
    (path,) = directory.glob("*.index")
    return path


def remove_index(directory: Path) -> None:
    index_file(directory).unlink()


def put_a_folder_at_the_index(directory: Path) -> None:
    path = index_file(directory)
    path.unlink()
    path.mkdir()


def remove_page(directory: Path) -> None:
    (directory / "eng.meta").unlink()


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory)


def rename_directory(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def put_a_link_at_the_directory(directory: Path) -> None:
    """Engines that follow the path would go elsewhere; the sidecar's descriptor shows the old one."""
    rename_directory(directory)
    directory.symlink_to(directory.with_name("elsewhere"))


def put_a_link_at_the_page(directory: Path) -> None:
    page = directory / "eng.meta"
    page.rename(directory / "kept")
    page.symlink_to("kept")


def put_a_folder_at_the_page(directory: Path) -> None:
    page = directory / "eng.meta"
    page.unlink()
    page.mkdir()


def put_a_pipe_at_the_data(directory: Path) -> None:
    path = data_file(directory)
    path.unlink()
    os.mkfifo(path)


def spoil_session(directory: Path) -> None:
    damage(directory, SESSION_AT)


DAMAGES = [
    (cut, "another process of this pod cut"),
    (punch, "(0 of them reserved)"),
    (remove, "was removed or replaced"),
    (replace, "was removed or replaced"),
    (remove_page, "was removed or replaced"),
    (remove_index, "was removed or replaced"),
    (put_a_folder_at_the_index, "was removed or replaced"),
    (remove_directory, "was removed or replaced"),
    (rename_directory, "was removed or replaced"),
    (put_a_pipe_at_the_data, "was removed or replaced"),
    (spoil_session, "damaged"),
]


@pytest.mark.parametrize(("harm", "said"), DAMAGES)
def test_a_damaged_region_fails_and_is_made_anew_once_nobody_holds_it(
    make_service: MakeService,
    volume: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    said: str,
) -> None:
    running = make_service()
    before = running.until_state(READY)
    engine = attach(running.directory)
    harm(running.directory)
    failed = running.until_state(FAILED)
    assert said in failed.reason
    engine.close()
    after = running.until_state(READY)
    assert before.owner is not None
    assert after.owner is not None
    assert after.owner.nonce != before.owner.nonce
    until(lambda: used_bytes(volume) <= 8 * MIB + META_BYTES + 8192, "one region is left")


@pytest.mark.parametrize("harm", [cut, punch, spoil_session, remove, remove_page, remove_index])
def test_an_engine_that_starts_as_the_last_holder_of_a_damaged_region_goes_gets_a_sound_one(
    make_service: MakeService, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    running = make_service()
    before = running.until_state(READY)
    engine = attach(running.directory)
    harm(running.directory)
    # The third pause is of 4 s: longer than the next start takes to come.
    until(lambda: caplog.messages.count("region failed") == 3, "it was tried again in vain")
    engine.close()

    with closing(attach(running.directory, session="e" * 32)):
        after = running.until_state(READY)

    assert before.owner is not None
    assert after.owner is not None
    assert after.owner.nonce != before.owner.nonce


@pytest.mark.parametrize("suffix", ["meta", "data", "index"])
def test_a_file_with_a_second_name_which_no_engine_would_open_is_damage_too(
    make_service: MakeService, suffix: str
) -> None:
    running = make_service()
    before = running.until_state(READY)
    (path,) = running.directory.glob(f"*.{suffix}")
    engine = attach(running.directory)
    os.link(path, running.directory / "second")
    assert path.name in running.until_state(FAILED).reason

    engine.close()
    after = running.until_state(READY)

    assert before.owner is not None
    assert after.owner is not None
    assert after.owner.nonce != before.owner.nonce
    attach(running.directory).close()


@pytest.mark.parametrize(
    ("harm", "mend"),
    [
        (put_a_link_at_the_directory, Path.unlink),
        (put_a_link_at_the_page, lambda directory: (directory / "eng.meta").unlink()),
        (put_a_folder_at_the_page, lambda directory: (directory / "eng.meta").rmdir()),
    ],
)
def test_what_takes_a_name_of_ours_is_left_alone_and_the_region_waits_for_the_name(
    make_service: MakeService,
    volume: Path,
    harm: Callable[[Path], None],
    mend: Callable[[Path], object],
) -> None:
    running = make_service()
    running.until_state(READY)
    harm(running.directory)
    running.until_state(FAILED)
    first = running.view().reason
    until(lambda: running.view().reason != first, "it says why it cannot be made anew")
    assert running.view().state is FAILED
    assert used_bytes(volume) <= META_BYTES, "the next one has room as soon as the name is free"

    mend(running.directory)

    assert running.until_state(READY).reason == ""


def give_a_second_name(directory: Path) -> None:
    os.link(data_file(directory), directory / "second")


@pytest.mark.parametrize(
    "harm", [remove, remove_page, remove_index, rename_directory, give_a_second_name]
)
@pytest.mark.parametrize(
    ("step", "state"), [("reserve_step", "Reserving"), ("settle_step", "Reserved")]
)
def test_damage_is_told_while_the_region_is_still_being_reserved_or_settled(
    make_service: MakeService,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path], None],
    step: str,
    state: str,
) -> None:
    real, may_hurry, done = getattr(file, step), threading.Event(), []

    def slowly(fd: int, offset_bytes: int, *more: int) -> None:
        may_hurry.wait(0.2)  # a large region takes minutes
        real(fd, offset_bytes, *more)
        done.append(offset_bytes)

    monkeypatch.setattr(file, "STEP_BYTES", 2 * MIB)
    monkeypatch.setattr(file, step, slowly)
    running = make_service(KVCELLAR_CAPACITY="64Mi", KVCELLAR_HUGE_PAGES="never")
    before = running.until_state(RegionState(state))
    until(lambda: done, "a step")
    harm(running.directory)
    failed = running.until_state(FAILED)
    assert "another process" in failed.reason
    assert len(done) < 16, "half of it was not done yet"

    may_hurry.set()
    after = running.until_state(READY)

    assert before.owner is not None
    assert after.owner is not None
    assert after.owner.nonce != before.owner.nonce
    attach(running.directory).close()


def test_a_page_that_was_cut_on_a_full_volume_is_damage_until_it_can_be_made_anew(
    make_service: MakeService, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = make_service()
    running.until_state(READY)
    engine = attach(running.directory)
    os.truncate(running.directory / "eng.meta", 0)
    full = volume / "full"
    with full.open("wb") as filling:
        stat = os.statvfs(volume)
        os.posix_fallocate(filling.fileno(), 0, stat.f_bfree * stat.f_frsize)
    assert "the metadata page is cut" in running.until_state(FAILED).reason
    states: set[RegionState] = set()

    def tried_again() -> bool:
        states.add(running.view().state)
        return caplog.messages.count("region failed") >= 3

    until(tried_again, "it was tried again in vain")
    assert states == {FAILED}
    full.unlink()
    engine.close()
    running.until_state(READY)
    attach(running.directory).close()


def test_a_region_whose_settling_fails_under_an_engine_is_made_anew_afterwards(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle_step, plan_again = file.settle_step, plans.plan_again
    attached, failed, tried_again = threading.Event(), threading.Event(), threading.Event()

    def fail_once(fd: int, offset_bytes: int, length_bytes: int, threads: int = 1) -> None:
        assert attached.wait(20)
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        settle_step(fd, offset_bytes, length_bytes, threads)

    def plan_and_tell(
        region: OwnedRegion, directory: RegionDirectory, read_limits: LimitReader
    ) -> PlanBody:
        plan = plan_again(region, directory, read_limits)
        tried_again.set()
        return plan

    monkeypatch.setattr(file, "settle_step", fail_once)
    monkeypatch.setattr(plans, "plan_again", plan_and_tell)
    running = make_service()
    running.until_state(RegionState.RESERVED)
    engine = attach(running.directory)
    attached.set()
    running.until_state(FAILED)
    assert tried_again.wait(20)  # while the engine holds it
    engine.close()
    running.until_state(READY)


def test_under_fail_damage_ends_the_sidecar(make_service: MakeService) -> None:
    running = make_service(KVCELLAR_ON_FAILURE="fail")
    running.until_state(READY)
    cut(running.directory)
    fatal = running.fatal()
    assert isinstance(fatal, RegionMismatch)
    assert "has 1048576 bytes" in str(fatal)
    assert "was made with 8388608" in str(fatal)


def test_the_owner_s_own_section_is_repaired_from_memory(
    make_service: MakeService, caplog: pytest.LogCaptureFixture
) -> None:
    running = make_service()
    running.until_state(READY)
    damage(running.directory, OWNER_AT)
    until(lambda: "region repaired" in caplog.messages, "the repair")
    attach(running.directory).close()
    assert running.view().state is READY


@pytest.mark.parametrize("mode", [0o000, 0o700, 0o2700])
def test_the_mode_of_the_directory_is_set_again_so_that_engines_can_open_it(
    make_service: MakeService, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    running = make_service()
    running.until_state(READY)
    running.directory.chmod(mode)
    until(lambda: "region repaired" in caplog.messages, "the repair")
    assert running.directory.stat().st_mode & 0o7777 == 0o2750
    assert running.view().state is READY


@pytest.mark.parametrize("ending", [".meta", ".data", ".index"])
@pytest.mark.parametrize("mode", [0o000, 0o600])
def test_the_mode_of_each_file_is_set_again_so_that_engines_can_open_it(
    make_service: MakeService, caplog: pytest.LogCaptureFixture, ending: str, mode: int
) -> None:
    running = make_service()
    running.until_state(READY)
    (file,) = running.directory.glob(f"*{ending}")
    file.chmod(mode)
    until(lambda: "region repaired" in caplog.messages, "the repair")
    assert file.stat().st_mode & 0o7777 == 0o660
    assert running.view().state is READY


def test_a_page_that_was_cut_is_written_anew_with_every_page_of_it(
    make_service: MakeService, caplog: pytest.LogCaptureFixture
) -> None:
    running = make_service()
    running.until_state(READY)
    page = running.directory / "eng.meta"
    os.truncate(page, 0)
    until(lambda: "region repaired" in caplog.messages, "the repair")
    assert page.stat().st_blocks * 512 == META_BYTES
    attach(running.directory).close()


def test_a_page_that_nobody_can_read_is_left_alone(make_service: MakeService) -> None:
    running = make_service()
    running.until_state(READY)
    running.stop()
    damage(running.directory, OWNER_AT, SESSION_AT)
    files = running.files()
    degraded = make_service()
    assert "damaged" in degraded.until_state(FAILED).reason
    degraded.stop()
    assert isinstance(make_service(KVCELLAR_ON_FAILURE="fail").fatal(), RegionMismatch)
    assert running.files() == files


# --- retention and orphans ----------------------------------------------------------------------------


def test_a_region_goes_when_its_retention_is_over_but_not_while_it_is_held(
    make_service: MakeService, volume: Path
) -> None:
    running = make_service(KVCELLAR_RETENTION="now")
    running.until_state(READY)
    engine = attach(running.directory)
    until(lambda: running.view().participants, "a participant")
    assert running.view().state is READY
    engine.close()
    assert running.until_state(RELEASED).reserved_bytes == 0
    assert used_bytes(volume) == META_BYTES  # the page that tells engines so
    status = running.service.status()
    assert status.is_alive
    assert status.not_ready() == "region eng is Released"


def test_orphans_are_removed_unless_somebody_holds_them(
    make_service: MakeService, volume: Path
) -> None:
    directory = volume / "kvcellar"
    directory.mkdir(mode=0o700)
    loose = directory / "eng.0123456789abcdef.data"
    held = directory / "old.0123456789abcdef.data"
    foreign = directory / "notes.txt"
    for path in (loose, held, foreign):
        path.write_bytes(b"x" * 8192)
    fd = os.open(held, os.O_RDWR)
    assert locks.try_lock(fd, locks.SLOT_BASE)

    running = make_service()
    running.until_state(READY)
    status = running.service.status()
    actions = {orphan.name: orphan.action for orphan in status.orphans}
    assert actions == {loose.name: "reclaimed", held.name: "kept"}
    assert (status.reclaimed_files, status.reclaimed_bytes, status.foreign_bytes) == (1, 8192, 8192)

    os.close(fd)
    until(lambda: not held.exists(), "it is removed once it is free")
    assert foreign.exists()


def test_a_region_of_another_engine_that_nobody_owns_is_reported_and_left(
    make_service: MakeService,
) -> None:
    other = make_service(KVCELLAR_ENGINE_ID="other")
    other.until_state(READY, "other")
    other.stop()
    running = make_service(KVCELLAR_ENGINE_ID="eng")
    running.until_state(READY)
    (orphan,) = running.service.status().orphans
    assert (orphan.name, orphan.action, orphan.bytes) == ("other.meta", "kept", 8 * MIB)
    assert len(running.files()) == 6
