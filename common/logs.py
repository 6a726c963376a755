"""Log lines that people and machines can read: one line an event, with request_id, attempt and role where there are any.

Code logs through ``logging.getLogger(__name__)`` and passes what belongs to a request as ``extra={"request_id": …}``, and what else
a program may want to read of a line as ``extra={"fields": {…}}``.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time

from kvrelay.common.clock import Clock

_WARNED_EVERY_S = 1.0
_CONTEXT_FIELDS = ("role", "worker_id", "request_id", "attempt", "trace_id", "peer_id", "cause")


class TextFormatter(logging.Formatter):
    """``12:00:01.123 INFO  message request_id=… attempt=…``, then the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, plus the traceback's lines."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        context = "".join(f" {name}={value}" for name, value in _context(record).items())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {record.getMessage()}{context}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        fields: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_context(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class RareWarnings:
    """Warnings of which there may be a flood, one line a second at the most: the next line says how many there were besides."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._num_unlogged = 0
        self._logged_s: float | None = None

    def warn(self, text: str, cause: str) -> None:
        """One more, on any thread; ``cause`` is a short stable word for the line's context."""
        with self._lock:
            now_s = self._clock()
            if self._logged_s is not None and now_s - self._logged_s < _WARNED_EVERY_S:
                self._num_unlogged += 1
                return
            num_unlogged, self._num_unlogged, self._logged_s = self._num_unlogged, 0, now_s
        more = f" (and {num_unlogged} more since the last such line)" if num_unlogged else ""
        self._log.warning("%s%s", text, more, extra={"cause": cause})


def configure_logs(level: str, log_format: str) -> None:
    """Send all logs of this process to stderr in one format. Called once, by a process's entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Its starts and stops are told by the component that runs it.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.INFO)  # at debug it says only which selector it uses
    logging.getLogger("PIL").setLevel(logging.INFO)  # at debug it says what clients' images have in their EXIF data


def _context(record: logging.LogRecord) -> dict[str, object]:
    given = {name: record.__dict__.get(name, "") for name in _CONTEXT_FIELDS}
    fields: dict[str, object] = record.__dict__.get("fields", {})
    return {**{name: value for name, value in given.items() if value != ""}, **fields}
