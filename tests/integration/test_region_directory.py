"""The directory of regions: what it must be, what is planted in it, and what is found there."""

import logging
import os
import re
import stat
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvcellar.contract import EngineId, HugePages, Owner
from kvcellar.errors import (
    ConfigurationError,
    MetadataDamaged,
    NotReady,
    RegionHeld,
    RegionMismatch,
)
from kvcellar.region import locks
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.names import data_name, index_name, meta_name
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.region.survey import (
    LooseKind,
    reclaim_dead_engines,
    reclaim_loose,
    reclaim_unheld,
    survey,
)
from tests.integration.conftest import Fork, MakeVolume
from tests.support.volumes import unmount

pytestmark = pytest.mark.integration

MIB = 2**20
ID = EngineId("engine")
NOBODY = 65534

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="taking another uid needs root, as mounting does"
)


def request(kind: Owner = Owner.SIDECAR, engine_id: EngineId = ID) -> RegionRequest:
    return RegionRequest(engine_id, 4 * MIB, huge_pages=HugePages.NEVER, kind=kind)


def make(
    directory: RegionDirectory, kind: Owner = Owner.SIDECAR, engine_id: EngineId = ID
) -> OwnedRegion:
    region = OwnedRegion.acquire(directory, request(kind, engine_id), list)
    region.reserve(lambda: False)
    region.settle(lambda: False)
    return region


def as_nobody(
    fork: Fork, volume: Path, program: Callable[[], object], groups: tuple[int, ...] = ()
) -> object:
    """What `program` returns in `volume`, as another uid without capabilities; its error is raised."""

    def run(connection: Connection) -> None:
        os.chdir(volume)  # the folders above are root's own
        os.setgroups(list(groups))
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        connection.send(program())

    return fork(run).hear()


def create() -> object:
    RegionDirectory.create(Path("kvcellar")).close()
    return "made"


# --- the directory itself


@pytest.mark.parametrize(("owner", "mode"), [(Owner.SIDECAR, 0o2750), (Owner.ENGINE, 0o2770)])
@pytest.mark.parametrize("umask", [0, 0o22, 0o777])
def test_its_mode_is_set_whatever_the_umask(
    volume: Path, owner: Owner, mode: int, umask: int
) -> None:
    before = os.umask(umask)
    try:
        RegionDirectory.create(volume / "kvcellar", owner=owner).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((volume / "kvcellar").stat().st_mode) == mode


def test_a_directory_that_is_there_is_taken_and_its_mode_put_right(volume: Path) -> None:
    (volume / "kvcellar").mkdir(mode=0o700)
    (volume / "kvcellar" / "note").touch()
    directory = RegionDirectory.create(volume / "kvcellar")
    assert directory.names() == ["note"]
    assert stat.S_IMODE((volume / "kvcellar").stat().st_mode) == 0o2750


def test_the_files_are_for_the_group_whatever_the_umask(volume: Path) -> None:
    volume.chmod(0o3777)
    os.chown(volume, -1, 2000)
    before = os.umask(0o777)
    try:
        directory = RegionDirectory.create(volume / "kvcellar")
        make(directory)
    finally:
        os.umask(before)
    assert (volume / "kvcellar").stat().st_gid == 2000
    assert len(directory.names()) == 3
    for name in directory.names():
        status = (volume / "kvcellar" / name).stat()
        assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, 2000)


def test_a_link_is_not_followed(volume: Path) -> None:
    (volume / "elsewhere").mkdir()
    (volume / "kvcellar").symlink_to("elsewhere")
    for enter in (RegionDirectory.create, RegionDirectory.open):
        with pytest.raises(ConfigurationError, match="link or no directory"):
            enter(volume / "kvcellar")
    assert os.listdir(volume / "elsewhere") == []


def test_a_dangling_link_and_a_file_are_refused(volume: Path) -> None:
    (volume / "dangling").symlink_to("nowhere")
    (volume / "file").touch()
    for name in ("dangling", "file"):
        with pytest.raises(ConfigurationError, match="link or no directory"):
            RegionDirectory.create(volume / name)
    assert sorted(os.listdir(volume)) == ["dangling", "file"]


def test_a_directory_that_all_share_is_refused_and_left_as_it_is(volume: Path) -> None:
    with pytest.raises(ConfigurationError, match="shared with others"):
        RegionDirectory.create(volume)
    assert stat.S_IMODE(volume.stat().st_mode) == 0o1777
    assert os.listdir(volume) == []


def test_a_directory_that_was_removed_and_made_anew_is_another_one(volume: Path) -> None:
    directory = RegionDirectory.create(volume / "kvcellar")
    assert directory.is_there()
    (volume / "kvcellar").rmdir()
    assert not directory.is_there()
    (volume / "kvcellar").mkdir()
    assert not directory.is_there()


def test_a_missing_volume_is_a_setting_that_is_wrong(volume: Path) -> None:
    with pytest.raises(ConfigurationError, match="KVCELLAR_ROOT"):
        RegionDirectory.create(volume / "not-mounted" / "kvcellar")
    with pytest.raises(FileNotFoundError):
        RegionDirectory.open(volume / "not-mounted" / "kvcellar")


@pytest.mark.parametrize("path", ["/", "..", "/dev/shm/.."])
def test_a_path_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match="KVCELLAR_DIR"):
        RegionDirectory.create(Path(path))


def test_a_disk_is_refused_and_nothing_left_unless_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigurationError, match="not on tmpfs"):
        RegionDirectory.create(tmp_path / "kvcellar")
    assert not (tmp_path / "kvcellar").exists()
    with caplog.at_level(logging.WARNING):
        directory = RegionDirectory.create(tmp_path / "kvcellar", any_filesystem=True)
    assert "not on tmpfs" in caplog.text
    region = make(directory)
    assert region.reserved_bytes() >= 4 * MIB
    assert region.release()
    assert directory.names() == []


@needs_root
def test_a_volume_that_may_not_be_written_is_refused(volume: Path, fork: Fork) -> None:
    volume.chmod(0o755)
    with pytest.raises(ConfigurationError, match="cannot be made"):
        as_nobody(fork, volume, create)


@needs_root
def test_a_directory_of_another_uid_is_refused(volume: Path, fork: Fork) -> None:
    RegionDirectory.create(volume / "kvcellar", owner=Owner.ENGINE).close()
    (volume / "kvcellar").chmod(0o2777)
    with pytest.raises(
        ConfigurationError, match="belongs to uid 0, this process runs as uid 65534"
    ):
        as_nobody(fork, volume, create)


@needs_root
def test_a_volume_of_a_group_that_the_process_is_not_in_is_refused(
    volume: Path, fork: Fork
) -> None:
    os.chown(volume, -1, 2000)
    volume.chmod(0o2777)
    with pytest.raises(ConfigurationError, match="fsGroup"):
        as_nobody(fork, volume, create)
    assert not (volume / "kvcellar").exists()
    assert as_nobody(fork, volume, create, groups=(2000,)) == "made"
    status = (volume / "kvcellar").stat()
    assert (status.st_gid, stat.S_IMODE(status.st_mode)) == (2000, 0o2750)


@needs_root
def test_a_read_only_volume_is_refused(make_volume: MakeVolume) -> None:
    volume = make_volume(8 * MIB)
    (volume / "kvcellar").mkdir(mode=0o700)
    os.system(f"mount -o remount,ro {volume}")  # noqa: S605 - a path of this test
    for name in ("kvcellar", "other"):
        with pytest.raises(ConfigurationError, match=r"writable|cannot be made"):
            RegionDirectory.create(volume / name)
    unmount(volume)


@needs_root
def test_an_engine_outside_the_group_is_told_what_to_change(
    directory: RegionDirectory, volume: Path, fork: Fork
) -> None:
    make(directory)
    directory.path.chmod(0o2755)

    def attach() -> object:
        RegionDirectory.open(Path("kvcellar")).open_file(meta_name(ID))
        return "open"

    told = (
        "by uid 65534, gid 65534: it belongs to uid 0, gid 0 and has mode 660; "
        "run this process as uid 0 or in group 0"
    )
    with pytest.raises(ConfigurationError, match=told):
        as_nobody(fork, volume, attach)


@needs_root
@pytest.mark.parametrize("shut", ["kvcellar", "."])
def test_a_directory_that_may_not_be_opened_is_not_called_a_link(
    directory: RegionDirectory, volume: Path, fork: Fork, shut: str
) -> None:
    (volume / shut).chmod(0o700)

    def look() -> object:
        return RegionDirectory.open(Path("kvcellar"))

    told = "may not be opened by uid 65534, gid 65534"
    with pytest.raises(ConfigurationError, match=told) as refusal:
        as_nobody(fork, volume, look)
    assert "link" not in str(refusal.value)
    assert "runAsUser" in str(refusal.value)
    assert directory.is_there()


# --- the big lock


def test_the_big_lock_is_waited_for_until_the_deadline(
    directory: RegionDirectory, fork: Fork
) -> None:
    def holder(connection: Connection) -> None:
        other = RegionDirectory.open(directory.path)
        with other.lock():
            connection.send("locked")
            connection.recv()

    child = fork(holder)
    assert child.hear() == "locked"
    began = time.monotonic()
    with pytest.raises(NotReady, match="held by another process"), directory.lock(timeout_s=0.1):
        pytest.fail("two processes are inside")
    assert time.monotonic() - began < 5
    child.kill()
    with directory.lock(timeout_s=0.1):
        pass


def test_a_child_forked_inside_the_big_lock_does_not_keep_it(
    directory: RegionDirectory, fork: Fork
) -> None:
    def holder(connection: Connection) -> None:
        other = RegionDirectory.open(directory.path)
        with other.lock():
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            connection.send(child)
            connection.recv()

    parent = fork(holder)
    lingering = parent.hear()
    assert isinstance(lingering, int)
    parent.kill()
    try:
        with directory.lock(timeout_s=0.2):
            pass
    finally:
        os.kill(lingering, 9)


# --- names that somebody planted

PLANTS: dict[str, Callable[[Path], None]] = {
    "symlink": lambda path: path.symlink_to(path.parent.parent / "precious"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
    "hard link": lambda path: os.link(path.parent.parent / "precious", path),
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "device": lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3)),
}


TOLD = {
    "symlink": "is no regular file but a symbolic link",
    "dangling": "is no regular file but a symbolic link",
    "fifo": "is no regular file but a pipe",
    "directory": "is no regular file but a directory",
    "hard link": "has more than one name",
    "socket": "is no regular file but a socket",
    "device": "is no regular file but a device",
}


@pytest.fixture
def precious(volume: Path) -> Path:
    (volume / "precious").write_bytes(b"of somebody else")
    return volume / "precious"


@pytest.fixture(params=PLANTS, ids=lambda name: name.replace(" ", "-"))
def plant(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return PLANTS[request.param]


def test_a_planted_page_is_refused_and_left(
    directory: RegionDirectory, precious: Path, plant: Callable[[Path], None]
) -> None:
    path = directory.path / meta_name(ID)
    plant(path)
    before = path.lstat()
    with pytest.raises(RegionMismatch, match="kvcellar did not make it so"):
        make(directory)
    with pytest.raises(RegionMismatch):
        reclaim_unheld(directory, ID)
    found = survey(directory)
    assert [region.contents for region in found.regions] == [None]
    assert reclaim_loose(directory) == []
    assert reclaim_dead_engines(directory) == []
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert directory.names() == [path.name]
    assert precious.read_bytes() == b"of somebody else"


def test_a_planted_data_file_is_neither_adopted_nor_removed(
    directory: RegionDirectory, precious: Path, plant: Callable[[Path], None]
) -> None:
    region = make(directory)
    path = directory.path / data_name(ID, region.owner.nonce)
    path.unlink()
    plant(path)
    assert "replaced" in region.snapshot().damage
    region.close()
    again = make(directory)
    assert not again.is_adopted
    assert path.name in directory.names()
    assert again.release()
    assert directory.names() == [path.name]
    assert reclaim_loose(directory) == []
    assert os.path.lexists(path)
    assert precious.read_bytes() == b"of somebody else"


def test_a_planted_index_file_is_not_removed(
    directory: RegionDirectory, precious: Path, plant: Callable[[Path], None]
) -> None:
    region = make(directory)
    path = directory.path / index_name(ID, region.owner.nonce)
    path.unlink()
    plant(path)
    assert region.release()
    assert directory.names() == [path.name]
    assert precious.read_bytes() == b"of somebody else"


def test_a_planted_temporary_page_is_not_removed(
    directory: RegionDirectory, precious: Path, plant: Callable[[Path], None]
) -> None:
    path = directory.path / f".new.{ID}.0123456789abcdef"
    plant(path)
    make(directory)
    assert reclaim_loose(directory) == []
    assert os.path.lexists(path)
    assert precious.read_bytes() == b"of somebody else"


@pytest.mark.parametrize("kind", PLANTS)
def test_what_lies_at_the_name_of_a_page_is_told_in_words(
    directory: RegionDirectory, precious: Path, kind: str
) -> None:
    path = directory.path / meta_name(ID)
    PLANTS[kind](path)
    with pytest.raises(RegionMismatch, match=re.escape(f"{path} {TOLD[kind]}: kvcellar did not")):
        directory.open_file(path.name)


def test_a_second_name_for_our_data_file_is_refused(directory: RegionDirectory) -> None:
    region = make(directory)
    path = directory.path / data_name(ID, region.owner.nonce)
    os.link(path, directory.path / "second")
    region.close()
    with pytest.raises(RegionMismatch, match="more than one name"):
        make(directory)
    assert len(directory.names()) == 4


# --- what is found there


def test_a_survey_tells_owned_held_and_loose_apart(directory: RegionDirectory) -> None:
    owned = make(directory, engine_id=EngineId("a"))
    make(directory, engine_id=EngineId("b")).close()
    nonce = survey(directory).regions[1].contents
    assert nonce is not None
    fd = directory.open_file(data_name(EngineId("b"), nonce.owner.nonce))
    assert locks.try_lock(fd, locks.SLOT_BASE + 7)
    for name in ("c.0123456789abcdef.data", ".new.c.0123456789abcdef", "vllm.mmap", "x.meta.bak"):
        (directory.path / name).write_bytes(b"x" * 5000)
    found = survey(directory)
    assert [(r.engine_id, r.is_owned, r.held) for r in found.regions] == [
        ("a", True, ()),
        ("b", False, (7,)),
    ]
    assert [r.reserved_bytes for r in found.regions] == [4 * MIB, 4 * MIB]
    assert [(f.name, f.kind, f.size_bytes, f.is_held) for f in found.loose] == [
        (".new.c.0123456789abcdef", LooseKind.PART, 8192, False),
        ("c.0123456789abcdef.data", LooseKind.PART, 8192, False),
        ("vllm.mmap", LooseKind.FOREIGN, 8192, False),
        ("x.meta.bak", LooseKind.FOREIGN, 8192, False),
    ]
    os.close(fd)
    owned.close()


def test_what_is_no_regular_file_of_one_name_is_foreign(directory: RegionDirectory) -> None:
    names = [f"{kind}.0123456789abcdef.data" for kind in ("directory", "link", "pipe", "twice")]
    (directory.path / names[0]).mkdir()
    (directory.path / names[1]).symlink_to("/etc/passwd")
    os.mkfifo(directory.path / names[2])
    (directory.path / names[3]).touch()
    os.link(directory.path / names[3], directory.path / "other name")
    found = {loose.name: loose.kind for loose in survey(directory).loose}
    assert found == dict.fromkeys([*names, "other name"], LooseKind.FOREIGN)
    assert reclaim_loose(directory) == []


def test_loose_parts_are_removed_and_foreign_files_stay(directory: RegionDirectory) -> None:
    region = make(directory)
    part, foreign = "c.0123456789abcdef.data", "vllm_offload_c.mmap"
    for name in (part, foreign):
        (directory.path / name).touch()
    assert [found.name for found in reclaim_loose(directory)] == [part]
    assert foreign in directory.names()
    assert region.snapshot().damage == ""


@pytest.mark.parametrize("kind", ["data", "index"])
def test_a_loose_part_of_a_held_region_stays(directory: RegionDirectory, kind: str) -> None:
    region = make(directory)
    fd = directory.open_file(data_name(ID, region.owner.nonce))
    assert locks.try_lock(fd, locks.SLOT_BASE)
    (directory.path / meta_name(ID)).unlink()
    assert reclaim_loose(directory) == []
    os.close(fd)
    region.close()
    assert len(reclaim_loose(directory)) == 2
    assert directory.names() == []


def test_an_unheld_region_is_reclaimed_and_others_are_not(directory: RegionDirectory) -> None:
    region = make(directory)
    with pytest.raises(RegionHeld, match="owned by a living process"):
        reclaim_unheld(directory, ID)
    fd = directory.open_file(data_name(ID, region.owner.nonce))
    assert locks.try_lock(fd, locks.SLOT_BASE + 63)
    region.close()
    with pytest.raises(RegionHeld, match="held by an engine"):
        reclaim_unheld(directory, ID)
    assert len(directory.names()) == 3
    os.close(fd)
    reclaim_unheld(directory, ID)
    assert directory.names() == []
    with pytest.raises(FileNotFoundError):
        reclaim_unheld(directory, ID)


@pytest.mark.parametrize("suffix", ["meta", "data"])
def test_a_region_with_a_second_name_is_told_and_never_removed(
    directory: RegionDirectory, volume: Path, suffix: str
) -> None:
    region = make(directory)
    name = {"meta": meta_name(ID), "data": data_name(ID, region.owner.nonce)}[suffix]
    region.close()
    os.link(directory.path / name, volume / "second")
    names = directory.names()
    found = survey(directory).regions[0]
    assert f"{name} has more than one name" in found.error
    with pytest.raises(RegionMismatch, match="more than one name"):
        reclaim_unheld(directory, ID)
    assert directory.names() == names
    (volume / "second").unlink()
    assert survey(directory).regions[0].error == ""
    reclaim_unheld(directory, ID)
    assert directory.names() == []


def test_a_loose_part_whose_data_file_has_a_second_name_stays(
    directory: RegionDirectory, volume: Path
) -> None:
    data, index = (f"c.0123456789abcdef.{suffix}" for suffix in ("data", "index"))
    for name in (data, index):
        (directory.path / name).touch()
    os.link(directory.path / data, volume / "second")
    assert reclaim_loose(directory) == []
    found = {loose.name: loose for loose in survey(directory).loose}
    assert (found[data].kind, found[data].error) == (
        LooseKind.FOREIGN,
        f"{data} has more than one name",
    )
    assert "more than one name" in found[index].error
    (volume / "second").unlink()
    assert len(reclaim_loose(directory)) == 2


@needs_root
def test_a_region_whose_data_file_may_not_be_opened_is_not_called_unheld(
    directory: RegionDirectory, volume: Path, fork: Fork
) -> None:
    region = make(directory)
    region.close()
    (directory.path / data_name(ID, region.owner.nonce)).chmod(0o600)
    (directory.path / meta_name(ID)).chmod(0o666)
    directory.path.chmod(0o2777)

    def clean() -> object:
        with pytest.raises(ConfigurationError, match="may not be opened by uid 65534"):
            reclaim_unheld(RegionDirectory.open(Path("kvcellar")), ID)
        return survey(RegionDirectory.open(Path("kvcellar"))).regions[0].error

    assert "may not be opened by uid 65534" in str(as_nobody(fork, volume, clean))
    assert len(directory.names()) == 3


def test_a_survey_tells_what_a_region_has_lost(directory: RegionDirectory) -> None:
    region = make(directory)
    path = directory.path / data_name(ID, region.owner.nonce)
    assert survey(directory).regions[0].damage == ""
    os.truncate(path, 0)
    os.truncate(path, 4 * MIB)
    assert "(0 of them reserved)" in survey(directory).regions[0].damage
    path.unlink()
    assert "removed by another process" in survey(directory).regions[0].damage
    region.close()


def test_a_region_with_an_unreadable_page_is_left_whole(directory: RegionDirectory) -> None:
    make(directory).close()
    names = directory.names()
    (directory.path / meta_name(ID)).write_bytes(b"")
    with pytest.raises(MetadataDamaged):
        reclaim_unheld(directory, ID)
    assert reclaim_loose(directory) == []
    assert directory.names() == names


def test_only_regions_that_a_dead_engine_owned_are_reclaimed(directory: RegionDirectory) -> None:
    make(directory, engine_id=EngineId("sidecars")).close()
    dead = make(directory, Owner.ENGINE, EngineId("dead"))
    alive = make(directory, Owner.ENGINE, EngineId("alive"))
    dead.close()
    assert reclaim_dead_engines(directory) == ["dead"]
    assert {region.engine_id for region in survey(directory).regions} == {"alive", "sidecars"}
    assert alive.snapshot().damage == ""


def test_a_region_that_a_sidecar_adopts_from_an_engine_is_the_sidecars(
    directory: RegionDirectory,
) -> None:
    make(directory, Owner.ENGINE).close()
    region = make(directory)
    assert region.is_adopted
    assert region.snapshot().damage == ""
    region.close()
    assert reclaim_dead_engines(directory) == []
