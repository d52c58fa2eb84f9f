"""A small engine: attaches to the pod's region, and stores and loads patterns that it checks.

For tests that need an engine that starts in a second. It is configured by the variables that kvcellar
injects, writes one line of JSON for each thing that happens, and ends on SIGTERM. A pattern that comes back
changed ends it with status 9. On SIGUSR1 it takes memory of its own until it is killed.

Two variables are the tests' own: ``ENGINE_LOADS``, after how many loads it ends by itself, and
``ENGINE_SUFFIX``, what follows the engine id where a container has several engines.
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
from kvcellar.errors import KVCellarError
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
        # Seeds, not bytes: what this process has of its own is the same from its first pattern on.
        self._seeds: dict[int, int] = {}
        self.stores = 0
        self.loads = 0

    def store(self, chunk: int, seed: int) -> None:
        """Copy a new pattern into a chunk."""
        ctypes.memmove(self._address(chunk), pattern(chunk, seed), CHUNK_BYTES)
        self._seeds[chunk] = seed
        self._region.add_counters(Direction.STORE, CHUNK_BYTES, ok=True)
        self.stores += 1

    def load(self, chunk: int) -> bool:
        """Whether a chunk has the pattern that it was given."""
        stored = pattern(chunk, self._seeds[chunk])
        same = ctypes.string_at(self._address(chunk), CHUNK_BYTES) == stored
        self._region.add_counters(Direction.LOAD, CHUNK_BYTES, ok=same)
        self.loads += 1
        return same

    def _address(self, chunk: int) -> int:
        return self._region.base_address + chunk * self._region.geometry.chunk_stride_bytes


def eat(*_: object) -> None:
    """Take memory until the kernel ends this process."""
    say(event="eating")
    taken = []
    while True:
        taken.append(b"x" * (1 << 20))


def serve_without(stop: threading.Event, error: KVCellarError) -> int:
    """What an engine without a region does: stop with the reason, or go on without the host tier."""
    if os.environ.get("KVCELLAR_ON_FAILURE") == "fail":
        say(event="stopped", reason=str(error))
        return error.exit_status
    say(event="without", reason=str(error))
    stop.wait()
    return 0


def work(region: Region, stop: threading.Event) -> int:
    """Store and load until `stop`, or as often as was asked."""
    most = int(os.environ.get("ENGINE_LOADS", "0"))
    patterns = Patterns(region)
    reported = 0.0
    while not stop.wait(0.02) and (not most or patterns.loads < most):
        seed = patterns.stores
        chunk = seed % min(region.num_chunks, 16)
        patterns.store(chunk, seed)
        if not patterns.load(chunk):
            say(event="changed", chunk=chunk)
            return CHANGED
        if time.monotonic() - reported >= _REPORT_S:
            reported = time.monotonic()
            say(event="checked", stores=patterns.stores, loads=patterns.loads)
    say(event="ended", stores=patterns.stores, loads=patterns.loads)
    return 0


def main() -> int:
    """Attach, then store and load until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGUSR1, eat)
    environ = os.environ
    root = Path(environ.get("KVCELLAR_ROOT", "/dev/shm"))
    engine_id = environ["KVCELLAR_ENGINE_ID"] + environ.get("ENGINE_SUFFIX", "")
    began = time.monotonic()
    options = AttachOptions(directory=root / "kvcellar", fingerprint="ab" * 8, timeout_s=60.0)
    try:
        region = attach(engine_id, CHUNK_BYTES, options=options)
    except KVCellarError as error:
        return serve_without(stop, error)
    say(
        event="attached",
        owner=environ.get("KVCELLAR_OWNER"),
        engine=engine_id,
        generation=region.generation,
        chunks=region.num_chunks,
        seconds=round(time.monotonic() - began, 3),
    )
    try:
        return work(region, stop)
    finally:
        region.close()


if __name__ == "__main__":
    sys.exit(main())
