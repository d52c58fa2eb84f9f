"""`kvcellar install-library DIR`: put the library where engines find it, by PYTHONPATH=DIR/current.

What is installed is this package without the programs in it: what an engine imports, as source. Engines
have another Python than this process, and only `kvcellar` may become importable beside their packages.
"""

import hashlib
import sys
from pathlib import Path

import kvcellar
from kvcellar.cli.library import CURRENT, Files, LibraryDirectory

PROGRAMS = frozenset({"cli", "daemon", "demo"})
"""Subpackages that no engine imports."""


def run(directory: Path) -> int:
    """Install, or find that all is as it should be; prints where the link leads.

    Raises:
        ConfigurationError: the directory cannot be used.
        DoesNotFit: its volume is full.
        LibraryMismatch: something that was not installed lies where the library has to be.
        NotReady: another process has been installing for too long.
    """
    files = package_files()
    name = version_name(files)
    with LibraryDirectory.locked(directory) as library:
        library.install(name, files)
    sys.stdout.write(f"{directory / CURRENT} -> {name}\n")
    return 0


def package_files() -> Files:
    """The files that an engine needs, by their path below a folder of PYTHONPATH."""
    package = Path(kvcellar.__file__).parent
    found = {}
    for path in sorted(package.rglob("*")):
        parts = path.relative_to(package).parts
        is_wanted = parts[0] not in PROGRAMS and "__pycache__" not in parts
        if is_wanted and path.is_file() and path.suffix in (".py", ".typed"):
            found["/".join([package.name, *parts])] = path.read_bytes()
    return found


def version_name(files: Files) -> str:
    """`<version>-<hash of the files>`: two builds of one version lie side by side."""
    digest = hashlib.sha256()
    for path, data in sorted(files.items()):
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    return f"{kvcellar.__version__}-{digest.hexdigest()[:16]}"
