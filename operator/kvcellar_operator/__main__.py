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

logger = logging.getLogger(__name__)

_NOISY = ("kopf", "uvicorn", "asyncio", "aiohttp")
"""Loggers whose INFO is of no use to who runs this: a line for each event, or for each start."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's; returns the exit status."""
    try:
        settings = parse(sys.argv[1:] if argv is None else argv)
        _configure_logging(settings.common.log_level)
        asyncio.run(_run(settings))
    except KVCellarError as error:
        print(f"kvcellar-operator: {error}", file=sys.stderr)  # noqa: T201 - the log may not be set up
        return error.exit_status
    return 0


async def _run(settings: WebhookSettings | ControllerSettings) -> None:
    # Each program loads its own libraries only: kopf, or FastAPI's web stack with certificates, is half of
    # the start's time and of the memory.
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    match settings:
        case WebhookSettings():
            from kvcellar_operator.webhook import Webhook

            logger.info("webhook %s starts", __version__)
            await Webhook(settings).run(stop)
        case ControllerSettings():
            from kvcellar_operator.controller import Controller

            logger.info("controller %s starts", __version__)
            await Controller(settings).run(stop)
    logger.info("ended")
    # kopf leaves generators behind that cannot be closed when the loop ends, which asyncio calls an error.
    loop.set_exception_handler(lambda _loop, context: logger.debug("%s", context["message"]))


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
