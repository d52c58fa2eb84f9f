"""`kvcellar-operator webhook` and `kvcellar-operator controller`.

Exit status: 0 told to end; 2 a flag or a file that cannot be used; 1 anything else, to be started again.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from kvcellar import __version__
from kvcellar.errors import KVCellarError
from kvcellar_operator.config import ControllerSettings, WebhookSettings, parse
from kvcellar_operator.controller import Controller
from kvcellar_operator.sidecars import Resolve, pod_address
from kvcellar_operator.webhook import Webhook

logger = logging.getLogger(__name__)

_NOISY = ("kopf", "uvicorn", "asyncio", "aiohttp")
"""Loggers whose INFO is of no use to who runs this: a line for each event, or for each start."""


def main(argv: Sequence[str] | None = None, resolve: Resolve = pod_address) -> int:
    """Run a command line; returns the exit status.

    Args:
        argv: without the program's name; None takes this process's.
        resolve: how the controller finds a pod's sidecar.
    """
    try:
        settings = parse(sys.argv[1:] if argv is None else argv)
        _configure_logging(settings.common.log_level)
        asyncio.run(_run(settings, resolve))
    except KVCellarError as error:
        print(f"kvcellar-operator: {error}", file=sys.stderr)  # noqa: T201 - the log may not be set up
        return error.exit_status
    return 0


async def _run(settings: WebhookSettings | ControllerSettings, resolve: Resolve) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    match settings:
        case WebhookSettings():
            logger.info("webhook %s starts", __version__)
            await Webhook(settings).run(stop)
        case ControllerSettings():
            logger.info("controller %s starts", __version__)
            await Controller(settings, resolve).run(stop)
    logger.info("ended")


def _configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


if __name__ == "__main__":
    sys.exit(main())
