"""One JSON object a line on stderr for each event.

A line has `time` (RFC 3339, UTC), `level`, `event` (a few words that never hold a value), `logger`,
and the fields that were given as `extra`: ids and sizes stay machine-readable there. Only the entry
point calls `configure`. What the keeper logs with fields is not logged a second time by the region
package, nor starts and ends by the server.
"""

import json
import logging
import sys
import threading
from datetime import UTC, datetime

from typing_extensions import override

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

logger = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; whatever is not JSON is shown as text."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "event": record.getMessage(),
            "logger": record.name,
        }
        for name, value in vars(record).items():
            if name not in _STANDARD_FIELDS:
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str) -> None:
    """Send all log lines of this process to stderr as JSON, also those of a thread that died."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for told_otherwise in ("uvicorn", "asyncio", "kvcellar.region.owner"):
        logging.getLogger(told_otherwise).setLevel(logging.WARNING)
    threading.excepthook = _log_dead_thread


def _log_dead_thread(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value
    logger.error(
        "thread died",
        extra={"name_of_thread": arguments.thread.name if arguments.thread else ""},
        exc_info=(arguments.exc_type, error, arguments.exc_traceback) if error else None,
    )
