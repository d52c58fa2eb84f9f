"""A small engine: attaches to the pod's region, and stores and loads patterns that it checks.

For tests that need an engine that starts in a second. It is configured by the variables that kvcellar
injects, writes one line of JSON for each thing that happens, and ends on SIGTERM. A pattern that comes back
changed ends it with status 9.
"""

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from kvcellar.contract import Direction
from kvcellar.worker import Region, attach
from kvcellar.worker.attach import AttachOptions

CHUNK_BYTES = 1 << 20
CHANGED = 9
_REPORT_S = 0.5


def say(**what: object) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def pattern(chunk: int, seed: int) -> bytes:
    """The bytes of a chunk, another for each chunk and seed."""
    return random.Random(f"{chunk} {seed}").randbytes(4096) * (CHUNK_BYTES // 4096)


class Patterns:
    """What was stored, and whether it is what is loaded."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._stored: dict[int, bytes] = {}
        self.stores = 0
        self.loads = 0

    def store(self, chunk: int, seed: int) -> None:
        """Copy a new pattern into a chunk."""
        data = pattern(chunk, seed)
        ctypes.memmove(self._address(chunk), data, CHUNK_BYTES)
        self._stored[chunk] = data
        self._region.add_counters(Direction.STORE, CHUNK_BYTES, ok=True)
        self.stores += 1

    def load(self, chunk: int) -> bool:
        """Whether a chunk has the pattern that it was given."""
        same = ctypes.string_at(self._address(chunk), CHUNK_BYTES) == self._stored[chunk]
        self._region.add_counters(Direction.LOAD, CHUNK_BYTES, ok=same)
        self.loads += 1
        return same

    def _address(self, chunk: int) -> int:
        return self._region.base_address + chunk * self._region.geometry.chunk_stride_bytes


def main() -> int:
    """Attach, then store and load until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    environ = os.environ
    root = Path(environ.get("KVCELLAR_ROOT", "/dev/shm"))
    began = time.monotonic()
    options = AttachOptions(directory=root / "kvcellar", fingerprint="ab" * 8, timeout_s=60.0)
    region = attach(environ["KVCELLAR_ENGINE_ID"], CHUNK_BYTES, options=options)
    say(
        event="attached",
        owner=environ.get("KVCELLAR_OWNER"),
        generation=region.generation,
        chunks=region.num_chunks,
        seconds=round(time.monotonic() - began, 3),
    )
    patterns = Patterns(region)
    reported = 0.0
    try:
        while not stop.wait(0.02):
            seed = patterns.stores
            chunk = seed % min(region.num_chunks, 16)
            patterns.store(chunk, seed)
            if not patterns.load(chunk):
                say(event="changed", chunk=chunk)
                return CHANGED
            if time.monotonic() - reported >= _REPORT_S:
                reported = time.monotonic()
                say(event="checked", stores=patterns.stores, loads=patterns.loads)
    finally:
        region.close()
    say(event="ended", stores=patterns.stores, loads=patterns.loads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
