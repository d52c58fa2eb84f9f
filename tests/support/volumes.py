"""A memory-backed volume of a test's own: a tmpfs with a size, mounted and unmounted again."""

import ctypes
import os
from pathlib import Path

import pytest

_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def mount_tmpfs(path: Path, size_bytes: int, options: str = "") -> None:
    """Mount a tmpfs of `size_bytes`; where this process may not, skip the test, or fail it in CI.

    It is world-writable and sticky, as a kubelet mounts a memory-backed emptyDir. `options` are more
    mount options, such as `huge=always`.
    """
    path.mkdir(parents=True, exist_ok=True)
    data = ",".join(filter(None, [f"size={size_bytes}", "mode=1777", options]))
    if _libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, data.encode()) == 0:
        return
    reason = os.strerror(ctypes.get_errno())
    sentence = f"this test mounts a tmpfs of its own, which needs root (CAP_SYS_ADMIN): {reason}"
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


def unmount(path: Path) -> None:
    """Unmount; the memory goes with the last process that still has a file of it open."""
    _libc.umount2(os.fsencode(path), _MNT_DETACH)


def used_bytes(volume: Path) -> int:
    """What the volume has given out."""
    stat = os.statvfs(volume)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize
