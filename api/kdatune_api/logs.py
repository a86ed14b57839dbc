"""Short structured logs: one JSON object a line, the request id on every line of a request."""

import contextvars
import json
import logging
from datetime import UTC
from datetime import datetime

ROOT = "kdatune"
request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("kdatune_request_id", default=None)


class JsonLines(logging.Formatter):
    """A record as one line of JSON. `extra={"fields": {...}}` adds keys."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {
            "at": at,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        current = request_id.get()
        if current is not None:
            line["request_id"] = current
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging() -> None:
    """Send kdatune's logs to stderr as JSON lines, and uvicorn's, unless whoever runs the app has set up logging already."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name, level in ((ROOT, logging.INFO), ("uvicorn", logging.WARNING)):
        root = logging.getLogger(name)
        if not root.hasHandlers():
            root.addHandler(handler)
            root.setLevel(level)
