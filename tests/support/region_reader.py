"""Reads a region by docs/reference/region-format.md alone: nothing of kvcellar is imported here.

As a program::

    python region_reader.py DIRECTORY ENGINE_ID               the page as JSON
    python region_reader.py DIRECTORY ENGINE_ID RANK CHUNK    the bytes of a chunk, on stdout

Exit status 0, or 1 with a sentence on stderr.
"""

import json
import os
import stat
import struct
import sys
import zlib
from pathlib import Path

FIRST, SECOND = 0x5A5A5A5A5A5A5A5A, 0xA5A5A5A5A5A5A5A5
STATES = {1: "Reserving", 2: "Reserved", 3: "Ready", 4: "Failed"}
COUNTERS = (
    *("store_bytes", "load_bytes", "stores_ok", "stores_failed", "loads_ok", "loads_failed"),
    *("lookup_hit", "lookup_miss", "lookup_pending", "used_chunks"),
)


class NotARegion(Exception):
    """What lies there is not what the document describes."""


def read_page(directory: Path, engine_id: str) -> dict[str, object]:
    """The page as plain values: `owner`, `session` (None before the first start) and `slots` by number."""
    page = _read(directory / f"{engine_id}.meta", 65536)
    magic, version, size, slots, crc = struct.unpack_from("<8sIIII", page)
    if magic != b"KVCELLAR" or crc != zlib.crc32(page[:20]):
        raise NotARegion("the header is damaged")
    if (version, size, slots) != (1, 65536, 64):
        raise NotARegion(f"format version {version} is not known")
    owner = _section(page, 1024, 1024)
    if owner is None:
        raise NotARegion("there is no owner")
    session = _section(page, 4096, 512)
    rows = {n: _section(page, 8192 + 640 * n, 256) for n in range(64)}
    return {
        "owner": _owner(owner),
        "session": None if session is None else _session(session),
        "slots": {n: _slot(row) for n, row in rows.items() if row is not None},
    }


def read_chunk(directory: Path, engine_id: str, rank: int, chunk: int) -> bytes:
    """The KV bytes of a chunk of a rank."""
    page = read_page(directory, engine_id)
    owner, session = page["owner"], page["session"]
    if not isinstance(session, dict) or not isinstance(owner, dict):
        raise NotARegion("no engine has attached yet")
    if not 0 <= chunk < session["num_chunks"] or not 0 <= rank < session["world_size"]:
        raise NotARegion(f"there is no chunk {chunk} of rank {rank}")
    path = directory / f"{engine_id}.{owner['nonce']}.data"
    status = path.lstat()
    found = status.st_dev, status.st_ino, status.st_size
    if found != (owner["device"], owner["inode"], owner["capacity_bytes"]):
        raise NotARegion(f"{path} is another file")
    used_range = 0 if session["layout"] == "replicated" else rank
    offset = used_range * session["rank_bytes"] + chunk * session["chunk_stride_bytes"]
    return _read(path, session["chunk_bytes"], offset)


def read_failed(directory: Path, engine_id: str) -> list[tuple[int, int]]:
    """(range, chunk) of every store that is marked as failed."""
    owner = read_page(directory, engine_id)["owner"]
    if not isinstance(owner, dict):
        raise NotARegion("there is no owner")
    path = directory / f"{engine_id}.{owner['nonce']}.index"
    magic, version, ranges, chunks = struct.unpack("<8sIIQ", _read(path, 24))
    if magic != b"KVCINDEX" or version != 1:
        raise NotARegion("the index file is not known")
    marks = _read(path, ranges * chunks, 8192)
    return [divmod(n, chunks) for n, mark in enumerate(marks) if mark]


def _read(path: Path, size: int, offset: int = 0) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise NotARegion(f"{path} is no regular file with one name")
        data = os.pread(fd, size, offset)
    finally:
        os.close(fd)
    if len(data) != size:
        raise NotARegion(f"{path} is cut")
    return data


def _section(page: bytes, at: int, size: int) -> bytes | None:
    (selector,) = struct.unpack_from("<Q", page, at)
    good: dict[int, tuple[int, bytes]] = {}
    for number, name in enumerate((FIRST, SECOND)):
        copy = page[at + 64 + number * size :][:size]
        crc, _, sequence = struct.unpack_from("<IIQ", copy)
        if crc == zlib.crc32(copy[4:]):
            good[name] = sequence, copy[16:]
    if selector in good:
        return good[selector][1]
    if good:
        return max(good.values())[1]
    if selector == 0:
        return None
    raise NotARegion(f"the section at {at} is damaged")


def _owner(data: bytes) -> dict[str, object]:
    state, mode, kind = data[0], data[1], data[2]
    numbers = struct.unpack_from("<6Q", data, 24)
    reserve_s, settle_s, length = struct.unpack_from("<ddH", data, 72)
    names = ("capacity_bytes", "page_bytes", "device", "inode", "settled_bytes", "huge_page_bytes")
    return {
        "state": STATES[state],
        "mode": ("plugin", "stock")[mode],
        "kind": ("sidecar", "engine")[kind],
        "nonce": data[8:24].decode("ascii"),
        **dict(zip(names, numbers, strict=True)),
        "reserve_seconds": reserve_s,
        "settle_seconds": settle_s,
        "reason": data[90 : 90 + length].decode(),
    }


def _session(data: bytes) -> dict[str, object]:
    generation, starts = struct.unpack_from("<QQ", data, 48)
    world, page = struct.unpack_from("<II", data, 72)
    numbers = struct.unpack_from("<5Q", data, 80)
    names = ("capacity_bytes", "chunk_bytes", "rank_bytes", "chunk_stride_bytes", "num_chunks")
    return {
        "session": data[:16].hex(),
        "fingerprint": data[16:48].hex(),
        "generation": generation,
        "engine_starts": starts,
        "layout": ("sharded", "replicated")[data[64]],
        "world_size": world,
        "page_bytes": page,
        **dict(zip(names, numbers, strict=True)),
    }


def _slot(data: bytes) -> dict[str, object]:
    (rank,) = struct.unpack_from("<I", data, 24)
    (since,) = struct.unpack_from("<d", data, 28)
    return {
        "session": data[:16].hex(),
        "role": ("scheduler", "worker")[data[16]],
        "pinned": bool(data[17]),
        "rank": rank,
        "since_unix_s": since,
        **dict(zip(COUNTERS, struct.unpack_from("<10Q", data, 36), strict=True)),
    }


def main(arguments: list[str]) -> int:
    """Run as a program."""
    directory, engine_id = Path(arguments[0]), arguments[1]
    try:
        if len(arguments) == 4:
            chunk = read_chunk(directory, engine_id, int(arguments[2]), int(arguments[3]))
            sys.stdout.buffer.write(chunk)
        else:
            sys.stdout.write(json.dumps(read_page(directory, engine_id)) + "\n")
    except (NotARegion, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
