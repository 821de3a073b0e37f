"""The log of all parts of the server, JAX's and uvicorn's too, in one format."""

from __future__ import annotations

import datetime
import json
import logging
from typing import TextIO

FORMATS = ("text", "json")


def configure(format: str) -> None:
    """Sends the log to stderr, unless the program that runs this has sent it elsewhere.

    format: one of FORMATS. A later call changes it.
    """
    root = logging.getLogger()
    if not all(isinstance(each, _Handler) for each in root.handlers):
        return
    handler = _Handler()
    is_json = format == "json"
    handler.setFormatter(JsonLines() if is_json else logging.Formatter("%(asctime)s %(message)s"))
    root.setLevel(logging.INFO)
    root.handlers = [handler]
    # It tells which accelerators there are not.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)


class _Handler(logging.StreamHandler[TextIO]):
    """That of the last call of `configure`."""


class JsonLines(logging.Formatter):
    """A JSON object a line. A record's `fields` take the place of its message."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **getattr(record, "fields", {"message": record.getMessage()}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
