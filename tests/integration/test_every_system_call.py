"""A process of each path of a region is killed at each of its system calls, or that call fails.

Points come from a clean run under strace (`tests.support.traced`); what the paths are and who lives beside
them is in `tests.support.scenes`. After each point the next start works, and no file, lock or byte
of the volume is left. CI takes every tenth point, from an offset that changes with the commit; the soak
takes them all.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcellar.errors import KVCellarError
from tests.integration.conftest import MakeVolume
from tests.support.scenes.every import SCENES
from tests.support.scenes.scene import Scene, usage
from tests.support.traced import (
    INJECTED,
    KILLED,
    Call,
    Ending,
    Traced,
    calls_between_marks,
    fail_at,
    kill_at,
)

ROOT = Path(__file__).resolve().parents[2]
EVERY = 10
"""CI takes every tenth point."""

ERRORS: dict[str, tuple[str, ...]] = {
    "openat": ("EMFILE", "EACCES", "ENOMEM"),
    "newfstatat": ("ENOMEM",),
    "fstat": ("ENOMEM",),
    "fstatfs": ("EIO",),
    "statfs": ("EIO",),
    "mkdirat": ("ENOSPC", "EACCES"),
    "fchmod": ("EIO",),
    "faccessat": ("EACCES",),
    "faccessat2": ("EACCES",),
    "getdents64": ("EIO",),
    "ftruncate": ("EIO", "EINTR"),
    "fallocate": ("ENOSPC", "EINTR", "ENOMEM"),
    "pread64": ("EIO",),
    "pwrite64": ("EIO", "ENOSPC"),
    "read": ("EIO",),
    "flock": ("EINTR", "ENOLCK"),
    "fcntl": ("ENOLCK", "ENOMEM"),
    "mmap": ("ENOMEM",),
    "madvise": ("ENOMEM", "EINVAL", "EBUSY"),
    "renameat2": ("EIO", "ENOSPC"),
    "unlinkat": ("EIO", "EACCES"),
}
"""What each call is made to fail with.

Left out: `close` and `munmap`, which cannot fail on a tmpfs and for whole mappings, and which would not be
done if they were made to; `getrandom`, `getpid`, `ioctl`, `lseek` and those of the allocator, which are
Python's own; `write` to a pipe or the log.
"""


MakeScene = Callable[[], Scene]
"""Makes a scene anew, on a volume that is empty."""


@pytest.fixture
def make_scene(name: str, make_volume: MakeVolume, driver: Path, sigio_ignored: None) -> MakeScene:
    volume = make_volume(64 * 2**20)
    return lambda: SCENES[name](volume, driver)


def offset() -> int:
    """Where this commit begins to take every tenth point; 0 outside a repository."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return int(found.stdout.strip() or "0", 16) % EVERY


def clean_run(make_scene: MakeScene) -> list[Call]:
    """Run the scene once without a fault; returns its calls."""
    ending = play(make_scene(), "-y")
    assert (ending.status, ending.error) == (0, "")
    return calls_between_marks(ending.log)


def play(scene: Scene, *faults: str) -> Ending:
    """Run the scene with a fault, then the next start, and show that nothing is left."""
    before = usage(scene.volume)
    try:
        scene.before()
        child = Traced(scene.prepare)
        scene.forked()
        gone_on: list[bool] = []

        def go_on() -> None:
            scene.others(None)
            if scene.lives_on:
                scene.next_start()
                gone_on.append(True)

        ending = child.finish(*faults, then=go_on)
        if not gone_on:
            scene.others(ending)
            scene.next_start()
    finally:
        scene.end()
    assert usage(scene.volume) == before
    return ending


def check_kill(scene: Scene, call: Call) -> None:
    ending = play(scene, *kill_at(call))
    assert ending.status == KILLED
    assert ending.killed_at == call.name


def check_error(scene: Scene, call: Call, error: str) -> None:
    ending = play(scene, *fail_at(call, error))
    assert INJECTED in ending.log
    assert ending.status == 0
    assert not ending.error or ending.is_typed, ending.error
    assert not ending.leaked


def failures(calls: list[Call]) -> list[tuple[Call, str]]:
    """Every call of ours with every error that it can return."""
    return [
        (call, error)
        for call in calls
        for error in ERRORS.get(call.name, ())
        if not cannot_fail(call)
    ]


def cannot_fail(call: Call) -> bool:
    """Whether it gives a lock back, which needs nothing, or is the allocator's, or the ranks' own talk."""
    is_ours = "MAP_SHARED" in call.arguments or "PROT_NONE" in call.arguments
    is_allocators = call.name == "mmap" and not is_ours
    gives_back = "LOCK_UN" in call.arguments or "F_OFD_SETLK, {l_type=F_UNLCK" in call.arguments
    return is_allocators or gives_back or "<socket:" in call.arguments


def sample(name: str, points: list[tuple[Call, str]]) -> list[tuple[Call, str]]:
    first = (offset() + list(SCENES).index(name)) % EVERY
    return points[first::EVERY]


def show(make_scene: MakeScene, taken: list[tuple[Call, str]]) -> None:
    """Play every point; what goes wrong is told at the end, for all of them."""
    wrong = []
    for call, error in taken:
        scene = make_scene()
        try:
            if error:
                check_error(scene, call, error)
            else:
                check_kill(scene, call)
        except (AssertionError, KVCellarError, OSError) as problem:
            empty(scene.volume)
            fault = f"{error or 'killed'} at call {call.position}"
            wrong.append(f"{fault}, {call.name}({call.arguments}:\n{problem}")
    assert not wrong, "\n\n".join(wrong)


def empty(volume: Path) -> None:
    """Remove what a scene that went wrong has left to the next one."""
    shutil.rmtree(volume / "kvcellar", ignore_errors=True)
    for left in volume.iterdir():
        left.unlink()


Say = Callable[[str], None]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Prints a line that is seen also when the test passes."""

    def write(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line} ")

    return write


@pytest.mark.parametrize("name", SCENES)
def test_killed_at_a_system_call_the_next_start_works_and_nothing_is_left(
    name: str, make_scene: MakeScene, say: Say
) -> None:
    points = [(call, "") for call in clean_run(make_scene)]
    taken = sample(name, points)
    say(f"{name}: killed at {len(taken)} of {len(points)} points")
    show(make_scene, taken)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENES)
def test_killed_at_every_system_call_the_next_start_works_and_nothing_is_left(
    name: str, make_scene: MakeScene, say: Say
) -> None:
    points = [(call, "") for call in clean_run(make_scene)]
    say(f"{name}: killed at all {len(points)} points")
    show(make_scene, points)


@pytest.mark.parametrize("name", SCENES)
def test_a_call_that_fails_ends_in_a_clean_error_or_in_none(
    name: str, make_scene: MakeScene, say: Say
) -> None:
    points = failures(clean_run(make_scene))
    taken = sample(name, points)
    say(f"{name}: {len(taken)} of {len(points)} errors")
    show(make_scene, taken)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCENES)
def test_every_call_that_fails_ends_in_a_clean_error_or_in_none(
    name: str, make_scene: MakeScene, say: Say
) -> None:
    points = failures(clean_run(make_scene))
    say(f"{name}: all {len(points)} errors")
    show(make_scene, points)
