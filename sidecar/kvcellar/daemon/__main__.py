"""`python -m kvcellar.daemon`: the sidecar, the same as `kvcellar sidecar`."""

import signal
import sys
from types import FrameType


def _leave(_number: int, _frame: FrameType | None) -> None:
    """End at once: nothing has been made yet. A process that is PID 1 would ignore the signal."""
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    from kvcellar.daemon.app import main

    sys.exit(main(sys.argv[1:]))
