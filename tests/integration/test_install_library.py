"""`kvcellar install-library`: what lies in the directory afterwards, whatever happens meanwhile."""

import ast
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar import __version__
from kvcellar.cli import install_library
from kvcellar.cli.library import VERSION_NAME, Files, LibraryDirectory
from kvcellar.errors import ConfigurationError, DoesNotFit, LibraryMismatch, NotReady
from tests.integration.conftest import MakeVolume
from tests.support.sidecars import KVCELLAR

pytestmark = pytest.mark.integration

FILES = install_library.package_files()
NAME = install_library.version_name(FILES)
OLD_FILES: Files = {"kvcellar/__init__.py": b"old = True\n"}
NOBODY = 65534


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return tmp_path / "library"


def version(number: int) -> str:
    return f"0.0.{number}-{number:016x}"


def install(path: Path, name: str = NAME, files: Files = FILES) -> None:
    with LibraryDirectory.locked(path) as directory:
        directory.install(name, files)


def command(
    path: Path, *wrapper: str | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*wrapper, KVCELLAR, "install-library", path],
        env={k: v for k, v in os.environ.items() if not k.startswith("KVCELLAR_")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=cwd,
    )


def command_as_nobody(library: Path) -> subprocess.CompletedProcess[str]:
    """Run it as another uid, from inside the directory, to which that uid has no way."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a command as another uid")
    wrapper = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return command(Path(), *wrapper, cwd=library)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, links included as what they lead to."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def children_of_this_process() -> set[int]:
    """Its children that nobody has waited for yet; waiting would take them from whom they belong to."""
    pid = os.getpid()
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def versions(library: Path) -> list[str]:
    return sorted(name for name in os.listdir(library) if VERSION_NAME.fullmatch(name))


# --- what is installed ----------------------------------------------------------------------------------


def test_it_is_installed_once_and_found_as_it_is_the_second_time(library: Path) -> None:
    first = command(library)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == f"{library}/current -> {NAME}\n"
    assert NAME.startswith(f"{__version__}-")
    assert os.readlink(library / "current") == NAME
    inode = (library / NAME / "kvcellar" / "vllm" / "spec.py").stat().st_ino
    again = command(library)
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert (library / NAME / "kvcellar" / "vllm" / "spec.py").stat().st_ino == inode
    assert sorted(os.listdir(library)) == [NAME, "current"]


def test_only_kvcellar_becomes_importable_and_no_program_of_it(library: Path) -> None:
    install(library)
    assert os.listdir(library / "current") == ["kvcellar"]
    parts = set(os.listdir(library / "current" / "kvcellar"))
    assert {"vllm", "worker", "plugin", "index", "region", "contract", "py.typed"} <= parts
    assert not parts & {"cli", "daemon", "demo", "__pycache__"}


def test_every_module_of_kvcellar_that_is_imported_is_there() -> None:
    there = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in FILES
        if path.endswith(".py")
    }
    for path, data in FILES.items():
        for node in ast.walk(ast.parse(data)) if path.endswith(".py") else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            wanted = {name for name in names if name.split(".")[0] == "kvcellar"}
            assert wanted <= there, (path, wanted - there)


def test_an_interpreter_gets_it_by_its_path_even_with_a_safe_path(library: Path) -> None:
    install(library)
    code = "import kvcellar.region.geometry as g, kvcellar.worker.plan; print(g.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(library / "current"), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(library / "current" / "kvcellar"))


def test_everybody_can_read_it_whatever_the_umask_and_no_byte_code_lies_in_it(
    library: Path,
) -> None:
    done = command(library, "sh", "-c", 'umask 077; exec "$@"', "sh")
    assert done.returncode == 0
    for path in (library / NAME).rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644), path
        assert path.suffix != ".pyc"


@pytest.mark.parametrize("mode", [0o777, 0o2777])
def test_another_uid_installs_into_a_volume_of_root(library: Path, mode: int) -> None:
    library.mkdir()
    library.chmod(mode)
    done = command_as_nobody(library)
    assert (done.returncode, done.stderr) == (0, "")
    assert (library / NAME).stat().st_uid == NOBODY
    assert stat.S_IMODE((library / NAME / "kvcellar").stat().st_mode) == 0o755
    # And root behind it finds it as it should be.
    assert command(library).returncode == 0
    assert tree(library / "current") == FILES


def test_in_a_sticky_directory_the_link_of_another_uid_stays(library: Path) -> None:
    install(library, version(0), OLD_FILES)
    library.chmod(0o1777)
    done = command_as_nobody(library)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "may not be replaced by this process" in done.stderr
    assert tree(library / "current") == OLD_FILES
    assert sorted(os.listdir(library)) == sorted([version(0), NAME, "current"])


# --- versions ------------------------------------------------------------------------------------------


def test_the_version_that_was_replaced_stays_and_older_ones_go(library: Path) -> None:
    for number in range(4):
        install(library, version(number), OLD_FILES)
    assert versions(library) == [version(2), version(3)]
    install(library)
    assert versions(library) == [version(3), NAME]
    assert os.readlink(library / "current") == NAME


def test_going_back_to_the_version_before_removes_neither(library: Path) -> None:
    for number in (0, 1, 0):
        install(library, version(number), OLD_FILES)
    assert versions(library) == [version(0), version(1)]
    assert os.readlink(library / "current") == version(0)
    # The newer one is not older than the one that is replaced now; it goes with the next.
    install(library, version(2), OLD_FILES)
    assert versions(library) == [version(0), version(1), version(2)]
    install(library, version(3), OLD_FILES)
    assert versions(library) == [version(2), version(3)]


def test_what_others_put_there_stays(library: Path) -> None:
    install(library, version(0), OLD_FILES)
    (library / "image").mkdir()
    (library / "image" / "0").symlink_to("/somewhere")
    (library / "0.0.0-ffffffffffffffff").symlink_to("/")
    (library / "notes.txt").write_text("mine")
    for number in (1, 2):
        install(library, version(number), OLD_FILES)
    assert {"image", "0.0.0-ffffffffffffffff", "notes.txt"} < set(os.listdir(library))
    assert os.readlink(library / "image" / "0") == "/somewhere"


# --- kills ---------------------------------------------------------------------------------------------


def is_whole(library: Path) -> bool:
    """Whether the link leads to all of one version."""
    found = tree(library / "current")
    return found in (FILES, OLD_FILES) and bool(found)


CHANGES = "mkdir,mkdirat,fchmod,fsync,symlinkat,rename,renameat,renameat2,unlinkat,rmdir"
"""The system calls that change the directory, on every architecture."""


def strace(option: str, log: str | Path = os.devnull) -> list[str]:
    return ["strace", "-f", "-o", str(log), "-e", option]


def changes(library: Path, log: Path) -> list[tuple[str, int]]:
    """Each change that an installation makes: the system call, and how many of that kind it is."""
    assert command(library, *strace(f"trace={CHANGES}", log)).returncode == 0
    counts = Counter[str]()
    found = []
    for name in re.findall(r"^\d+ +(\w+)\(", log.read_text(), re.MULTILINE):
        counts[name] += 1
        found.append((name, counts[name]))
    return found


def kill_at(library: Path, change: tuple[str, int]) -> int:
    name, number = change
    return command(library, *strace(f"inject={name}:signal=KILL:when={number}")).returncode


def test_a_kill_at_any_change_leaves_the_old_version_or_the_new_one(
    library: Path, tmp_path: Path
) -> None:
    def begin() -> None:
        shutil.rmtree(library, ignore_errors=True)
        for number in (0, 1):
            install(library, version(number), OLD_FILES)

    begin()
    moments = changes(library, tmp_path / "log")
    # Of the many files, a few; the rest is made, swapped in and cleaned up in the last ones.
    targets = set()
    for moment in (*moments[:4], *moments[4:-20:40], *moments[-14:]):
        begin()
        assert kill_at(library, moment) == -signal.SIGKILL
        assert is_whole(library), moment
        targets.add(os.readlink(library / "current"))
        install(library)
        assert tree(library / "current") == FILES
        assert [name for name in os.listdir(library) if name.startswith(".")] == []
    assert targets == {version(1), NAME}


def test_a_kill_in_an_empty_directory_leaves_no_link_or_a_whole_version(
    library: Path, tmp_path: Path
) -> None:
    moments = changes(tmp_path / "another", tmp_path / "log")
    for moment in (*moments[:3], *moments[-5:]):
        assert kill_at(library, moment) == -signal.SIGKILL
        assert not os.path.lexists(library / "current") or is_whole(library)
        shutil.rmtree(library, ignore_errors=True)
    kill_at(library, moments[100])
    assert command(library).returncode == 0
    assert is_whole(library)
    assert sorted(os.listdir(library)) == [NAME, "current"]


def test_several_at_once_leave_one_whole_version(library: Path) -> None:
    install(library, version(0), OLD_FILES)
    done = [
        subprocess.Popen(
            [KVCELLAR, "install-library", library],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for _ in range(6)
    ]
    while any(process.poll() is None for process in done):
        assert is_whole(library)
        time.sleep(0.005)
    assert [(process.wait(), process.communicate()[1]) for process in done] == [(0, b"")] * 6
    assert tree(library / "current") == FILES
    assert sorted(os.listdir(library)) == sorted([version(0), NAME, "current"])


def test_one_that_waits_too_long_for_another_says_so(library: Path) -> None:
    library.mkdir()
    held = os.open(library, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with (
        pytest.raises(NotReady, match="another process has been installing"),
        LibraryDirectory.locked(library, deadline_s=0.1),
    ):
        pass
    os.close(held)
    install(library)


# --- what cannot be used -------------------------------------------------------------------------------


def a_link(library: Path) -> None:
    (library / "current").symlink_to("/etc")


def a_link_into_the_directory(library: Path) -> None:
    (library / "mine").mkdir()
    (library / "current").symlink_to("mine")


def a_folder(library: Path) -> None:
    (library / "current").mkdir()


def a_link_as_version(library: Path) -> None:
    (library / "elsewhere").mkdir()
    (library / NAME).symlink_to("elsewhere")


def a_changed_version(library: Path) -> None:
    install(library)
    (library / NAME / "kvcellar" / "errors.py").write_text("")


def a_second_module(library: Path) -> None:
    install(library)
    (library / NAME / "torch.py").write_text("")


def a_link_inside(library: Path) -> None:
    install(library)
    (library / NAME / "kvcellar" / "errors.py").unlink()
    (library / NAME / "kvcellar" / "errors.py").symlink_to("/etc/passwd")


def a_pipe_inside(library: Path) -> None:
    install(library)
    (library / NAME / "kvcellar" / "errors.py").unlink()
    os.mkfifo(library / NAME / "kvcellar" / "errors.py")


def an_unreadable_file(library: Path) -> None:
    install(library)
    (library / NAME / "kvcellar" / "errors.py").chmod(0o600)


SPOILS = [
    a_link, a_link_into_the_directory, a_folder, a_link_as_version, a_changed_version, a_second_module,
    a_link_inside, a_pipe_inside, an_unreadable_file,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_was_not_installed_is_neither_followed_nor_touched(
    library: Path, spoil: Callable[[Path], None]
) -> None:
    library.mkdir()
    spoil(library)
    before = sorted(os.listdir(library))
    done = command(library)
    assert (done.returncode, done.stderr.count("\n")) == (5, 1), done.stderr
    assert "remove it" in done.stderr
    assert sorted(os.listdir(library)) == before


def test_byte_code_that_an_engine_left_does_no_harm(library: Path) -> None:
    install(library)
    (library / NAME / "kvcellar" / "__pycache__").mkdir()
    (library / NAME / "kvcellar" / "__pycache__" / "errors.cpython-313.pyc").write_bytes(b"x")
    install(library)


def missing_parent(library: Path) -> Path:
    return library / "a" / "b"


def link(library: Path) -> Path:
    library.symlink_to(library.parent)
    return library


def file(library: Path) -> Path:
    library.write_text("")
    return library


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (missing_parent, "it or its parent is not there"),
        (link, "it is a link or no directory"),
        (file, "it is a link or no directory"),
    ],
)
def test_a_directory_that_cannot_be_used_ends_it_with_2(
    library: Path, spoil: Callable[[Path], Path], said: str
) -> None:
    path = spoil(library)
    done = command(path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr
    assert str(path) in done.stderr
    with pytest.raises(ConfigurationError):
        install(path)


def test_an_empty_directory_is_not_taken_for_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [KVCELLAR, "install-library", ""], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "argument DIR: it is empty; give the directory" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_full_volume_ends_it_with_3_and_keeps_what_is_in_use(make_volume: MakeVolume) -> None:
    volume = make_volume(256 * 1024)
    install(volume, version(0), OLD_FILES)
    done = command(volume)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert tree(volume / "current") == OLD_FILES
    assert sorted(os.listdir(volume)) == [version(0), "current"]
    with pytest.raises(DoesNotFit):
        install(volume)


def test_a_read_only_volume_ends_it_with_2(make_volume: MakeVolume) -> None:
    volume = make_volume(2**20)
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    done = command(volume)
    assert (done.returncode, "mounted read-only" in done.stderr) == (2, True)


def test_without_a_directory_it_is_a_mistake_of_usage() -> None:
    done = subprocess.run([KVCELLAR, "install-library"], capture_output=True, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("name", ["current", ".new.0123456789abcdef"])
def test_names_of_versions_are_no_other_names(name: str) -> None:
    assert VERSION_NAME.fullmatch(NAME)
    assert not VERSION_NAME.fullmatch(name)


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """Commands are waited for; a test that leaves a child has failed to. Those of other tests are not ours."""
    before = children_of_this_process()
    yield
    assert children_of_this_process() <= before


def test_a_mismatch_names_the_file_and_the_remedy(library: Path) -> None:
    library.mkdir()
    a_link(library)
    with pytest.raises(LibraryMismatch, match=r"library/current is no link that kvcellar made"):
        install(library)
