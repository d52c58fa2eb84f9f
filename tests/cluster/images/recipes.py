"""The images of the test cluster, made without a registry and kept in the user's cache.

- ``base``: Debian with Python, by debootstrap;
- ``kvcellar``: the Dockerfile of this project on it, by ``make image``, as anybody makes it;
- ``engine``: the base with numpy and the small engines of the tests;
- ``pause``: one static program, for the sandbox of each pod;
- ``own-path`` and ``no-shell``: the engine in images of other shapes, which few tests need.

Each is made by `archives` under a lock, if there is none yet of the same content: the key in an archive's
name is the hash of all that it is made from.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.cluster.box.errors import BoxError
from tests.cluster.box.node_files import PAUSE_IMAGE

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
ENGINES = HERE.parent / "engines"

REPOSITORY = "kvcellar.test"
KVCELLAR_IMAGE = f"{REPOSITORY}/kvcellar:test"
ENGINE_IMAGE = f"{REPOSITORY}/engine:test"
OWN_PATH_IMAGE = f"{REPOSITORY}/engine-own-path:test"
"""The engine with a PYTHONPATH of its image's own, which leads to `own_module`."""
NO_SHELL_IMAGE = f"{REPOSITORY}/engine-no-shell:test"
"""The engine without any shell."""

_SUITE = "bookworm"
_PACKAGES = "ca-certificates,libnuma1,python3,python3-venv"
_UNUSED = (
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
)
_PAUSE_DOCKERFILE = """\
FROM scratch
COPY busybox /
USER 65535:65535
CMD ["/busybox", "sleep", "infinity"]
"""
_OWN_MODULE = '"""A module that only the image\'s own PYTHONPATH leads to."""\n'
_BUILD_TIMEOUT_S = 1800.0
_KEPT_S = 3600.0
"""How long an archive may still be wanted by a run that began before the sources changed."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image of the test cluster.

    Attributes:
        name: of the image, with registry and tag.
        archive: its file, as `docker save` writes it.
    """

    name: str
    archive: Path


def images() -> list[Image]:
    """Every image that a node is given; makes those that are not there yet.

    Blocks for minutes the first time.

    Raises:
        BoxError: one cannot be made.
    """
    base = _base_key()
    return [
        _image(PAUSE_IMAGE, "pause", _key(_PAUSE_DOCKERFILE), _make_pause),
        _engine(),
        _image(KVCELLAR_IMAGE, "kvcellar", _key(base, *_kvcellar_inputs()), _make_kvcellar),
    ]


def other_engines() -> list[Image]:
    """The engine in images of other shapes, as `images` makes the usual ones.

    Raises:
        BoxError: one cannot be made.
    """
    engine = _engine()
    made = []
    for name, stage in ((OWN_PATH_IMAGE, "own-path"), (NO_SHELL_IMAGE, "no-shell")):
        key = _key(engine.archive.name, HERE / "shapes.Dockerfile", _OWN_MODULE)
        make = partial(_make_other_engine, engine, name, stage)
        made.append(_image(name, stage, key, make))
    return made


def image_on(
    base: Image, name: str, label: str, inputs: Iterable[str | Path], fill: Callable[[Path], None]
) -> Image:
    """An image on top of another, made if there is none yet of the same content.

    Args:
        base: what it is made on: the build argument BASE of its Dockerfile.
        name: of the image, with registry and tag.
        label: the first part of its archive's name.
        inputs: what its content depends on besides the base.
        fill: puts its Dockerfile, and what that takes, into a folder.

    Raises:
        BoxError: it cannot be made.
    """

    def make(folder: Path) -> None:
        fill(folder)
        under = f"BASE=docker-archive:{base.archive}"
        _buildah("build", "--tag", name, "--build-arg", under, str(folder))

    return _image(name, label, _key(base.archive.name, *inputs), make)


def environment_of_make() -> dict[str, str]:
    """The variables under which ``make image`` works here, where no registry is: with this base, by buildah."""
    return _environment() | {"BASE": _make_base(), "IMAGE_TOOL": "buildah"}


def are_there() -> bool:
    """Whether `images` has nothing to make but perhaps this project's own image."""
    key = _key(_base_key(), *_engine_inputs())
    return (_cache() / f"engine-{key}.tar").exists()


def _engine() -> Image:
    return _image(ENGINE_IMAGE, "engine", _key(_base_key(), *_engine_inputs()), _make_engine)


def _image(name: str, label: str, key: str, make: Callable[[Path], None]) -> Image:
    archive = _cache() / f"{label}-{key}.tar"
    if not archive.exists():
        with _locked():
            if not archive.exists():
                with tempfile.TemporaryDirectory(dir=_cache(), prefix="making-") as scratch:
                    make(Path(scratch))
                    _push(name, Path(scratch, "image.tar"))
                    Path(scratch, "image.tar").rename(archive)
                _forget_old(label, archive)
    return Image(name, archive)


# ---- what each is made from


def _base_key() -> str:
    return _key(_SUITE, _PACKAGES, *_UNUSED, os.uname().machine)


def _engine_inputs() -> list[str | Path]:
    return [HERE / "engine.Dockerfile", _numpy_lock(), *sorted(ENGINES.glob("*_engine.py"))]


def _kvcellar_inputs() -> list[str | Path]:
    top = (ROOT / name for name in ("Dockerfile", ".dockerignore", "LICENSE", "README.md"))
    parts = (each for name in ("sidecar", "operator") for each in (ROOT / name).rglob("*"))
    sources = (each for each in parts if each.is_file() and "__pycache__" not in each.parts)
    return [
        *top,
        ROOT / "pyproject.toml",
        *sorted((ROOT / "requirements").glob("image*.txt")),
        *sorted(sources),
    ]


def _numpy_lock() -> str:
    """Numpy's lines of the tests' own lock file."""
    text = (ROOT / "requirements" / "dev.txt").read_text()
    found = re.search(r"^numpy==.*(?:\n    --hash=.*)+", text, re.MULTILINE)
    if found is None:
        raise BoxError("requirements/dev.txt locks no numpy")
    return found[0] + "\n"


def _key(*inputs: str | Path) -> str:
    """The hash of texts and of files with their names."""
    digest = hashlib.sha256()
    for each in inputs:
        content = each.read_bytes() if isinstance(each, Path) else each.encode()
        name = str(each.relative_to(ROOT)) if isinstance(each, Path) else ""
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:24]


# ---- how each is made


def _make_base() -> str:
    """The base in the store of images; returns its name."""
    name = f"{REPOSITORY}/base:{_base_key()}"
    if _buildah("inspect", "--type", "image", name, check=False).returncode == 0:
        return name
    with tempfile.TemporaryDirectory(dir=_cache(), prefix="base-") as scratch:
        system, archive = Path(scratch, "system"), Path(scratch, "system.tar")
        bootstrap = ("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE)
        _run([*bootstrap, str(system)])
        for each in _UNUSED:
            shutil.rmtree(system / each, ignore_errors=True)
        _run(["tar", "-C", str(system), "--numeric-owner", "-cf", str(archive), "."])
        Path(scratch, "Dockerfile").write_text("FROM scratch\nADD system.tar /\n")
        Path(scratch, ".dockerignore").write_text("*\n!system.tar\n")
        _buildah("build", "--tag", name, scratch)
    return name


def _make_pause(folder: Path) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        raise BoxError("no command busybox on this machine: install busybox-static")
    shutil.copy(busybox, folder / "busybox")
    (folder / "Dockerfile").write_text(_PAUSE_DOCKERFILE)
    _buildah("build", "--tag", PAUSE_IMAGE, str(folder))


def _make_engine(folder: Path) -> None:
    base = _make_base()
    (folder / "numpy.txt").write_text(_numpy_lock())
    for each in (HERE / "engine.Dockerfile", *ENGINES.glob("*_engine.py")):
        shutil.copy(each, folder)
    ca = os.environ.get("SSL_CERT_FILE")
    secrets = ("--secret", f"id=ca,src={ca}") if ca else ()
    _buildah(
        *("build", "--tag", ENGINE_IMAGE, "--build-arg", f"BASE={base}", *secrets),
        *("--file", str(folder / "engine.Dockerfile"), str(folder)),
    )


def _make_other_engine(engine: Image, name: str, stage: str, folder: Path) -> None:
    (folder / "own_module.py").write_text(_OWN_MODULE)
    _buildah(
        *("build", "--tag", name, "--target", stage),
        *("--build-arg", f"ENGINE=docker-archive:{engine.archive}"),
        *("--file", str(HERE / "shapes.Dockerfile"), str(folder)),
    )


def _make_kvcellar(_folder: Path) -> None:
    _run(
        ["make", "image", f"IMAGE={KVCELLAR_IMAGE}", f"BASE={_make_base()}", "IMAGE_TOOL=buildah"],
        cwd=ROOT,
    )


def _push(name: str, archive: Path) -> None:
    # Of the formats that a runtime imports, the one that does not compress: that would take longest here.
    _buildah("push", name, f"docker-archive:{archive}:{name}")


def _buildah(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return _run(["buildah", *arguments], check=check)


def _run(
    argv: list[str], *, cwd: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise BoxError(f"no command {argv[0]} on this machine: run make system-cluster") from None
    if check and done.returncode != 0:
        output = f"{done.stdout}{done.stderr}"[-4000:]
        raise BoxError(f"{' '.join(argv)}: status {done.returncode}\n{output}")
    return done


def _environment() -> dict[str, str]:
    """The variables under which buildah keeps what it makes in the cache, and needs no more than root."""
    cache = _cache()
    storage = cache / "storage.conf"
    text = f'[storage]\ndriver = "vfs"\ngraphroot = "{cache}/store"\nrunroot = "{cache}/run"\n'
    if not storage.exists() or storage.read_text() != text:
        storage.write_text(text)
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    own = {"BUILDAH_ISOLATION": "chroot", "CONTAINERS_STORAGE_CONF": str(storage), "PATH": path}
    return {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"} | own


# ---- where they are kept


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "kvcellar", "images")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    with (_cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _forget_old(label: str, newest: Path) -> None:
    """Remove archives of the same image that are old, and layers that no image has any more."""
    old = newest.stat().st_mtime - _KEPT_S
    _remove(
        each
        for each in _cache().glob(f"{label}-*.tar")
        if each != newest and each.stat().st_mtime < old
    )
    _buildah("rmi", "--prune", check=False)


def _remove(files: Iterable[Path]) -> None:
    for each in files:
        each.unlink(missing_ok=True)
