"""The server's log lines: text for people, or JSON for machines. Both have the date in ISO 8601."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Literal

LogFormat = Literal["text", "json"]


def set_up_logging(kind: LogFormat) -> None:
    """Log to stderr: this package from INFO on, others from WARNING on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if kind == "json" else _Text("%(asctime)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("spillover").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # its messages would repeat those of the server's own log


class _Text(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _time(record)


class _Json(logging.Formatter):
    """One JSON object per line; the entries of a record's `fields`, if it has any, are added to it."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name,
                "message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
