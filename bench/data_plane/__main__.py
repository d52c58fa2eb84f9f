"""The data plane side by side with vLLM 0.32's own code: `make bench-data-plane`.

Prints Markdown tables: vLLM's figure, kvcellar's, and the ratio; above 1 kvcellar is better. Everything runs in one
process inside a sandbox, whose /dev/shm is private, with the library installed as a user installs it. Run it
on a quiet machine.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence

from bench.data_plane.measuring import Scale
from kvcellar.demo.sandbox import Sandbox

_INSIDE = "KVCELLAR_BENCH_INSIDE"
_HEAD_ROOM_BYTES = 256 << 20


def main(arguments: Sequence[str]) -> int:
    """Run the bench in a sandbox; always 0 unless something breaks, since it measures and does not judge."""
    parser = argparse.ArgumentParser(prog="bench.data_plane", description=__doc__)
    for field in dataclasses.fields(Scale):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=field.default)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    given = vars(parser.parse_args(arguments))
    only = given.pop("only")
    scale = Scale(**given)
    if os.environ.get(_INSIDE):
        return run(scale, only)
    size_bytes = 2 * max(scale.region_bytes, scale.copy_bytes) + _HEAD_ROOM_BYTES
    with Sandbox.open(size_bytes) as sandbox:
        command = [sys.executable, "-m", "bench.data_plane", *arguments]
        process = sandbox.popen(command, env={**os.environ, _INSIDE: "1"})
        return process.wait()


PARTS = ("regions", "transfers", "copies", "managers")


def run(scale: Scale, only: Sequence[str]) -> int:
    """Run the parts named."""
    # vLLM is imported here: the process outside the sandbox has no use for it.
    from bench.data_plane import copies, managers, regions, transfers
    from bench.data_plane.measuring import Bench

    bench = Bench(scale)
    for part in (regions, transfers, copies, managers):
        if part.__name__.rpartition(".")[2] in only:
            part.compare(bench)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
