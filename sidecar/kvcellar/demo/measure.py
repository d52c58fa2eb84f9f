"""What the kernel and the metadata page say of the regions in a sandbox, past sidecar and engine."""

import os
from pathlib import Path

from kvcellar.contract import DIRECTORY_NAME, EngineId
from kvcellar.demo.sandbox import SHM, Sandbox
from kvcellar.errors import KVCellarError
from kvcellar.region import metafile
from kvcellar.region.names import meta_name


def directory(sandbox: Sandbox) -> Path:
    """The directory of the regions, as seen from outside the sandbox."""
    return sandbox.path(SHM) / DIRECTORY_NAME


def region_bytes(sandbox: Sandbox) -> int:
    """Bytes that the file system has promised to all data files together."""
    return sum(file.stat().st_blocks * 512 for file in directory(sandbox).glob("*.data"))


def data_file(sandbox: Sandbox) -> Path:
    """The one data file that there is.

    Raises:
        KVCellarError: there is none, or more than one.
    """
    found = list(directory(sandbox).glob("*.data"))
    if len(found) != 1:
        raise KVCellarError(f"one data file was expected, there are {len(found)}")
    return found[0]


def stored_bytes(sandbox: Sandbox, engine_id: EngineId) -> int:
    """Bytes stored by the engine that holds, or last held, the region, by the page itself."""
    fd = os.open(directory(sandbox) / meta_name(engine_id), os.O_RDONLY)
    try:
        return sum(row.counters.store_bytes for row in metafile.read_contents(fd).rows.values())
    finally:
        os.close(fd)


def mapped_bytes(pid: int) -> int:
    """Bytes of data files that a process maps, by the kernel's own list."""
    lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    ranges = [line.split()[0].split("-") for line in lines if line.endswith(".data")]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


def used_bytes(sandbox: Sandbox) -> int:
    """Bytes in use on the sandbox's `/dev/shm`, whoever uses them."""
    status = os.statvfs(sandbox.path(SHM))
    return (status.f_blocks - status.f_bfree) * status.f_frsize
