"""The log of a process: one line a record, as text or JSON, under the name of the process."""

import logging
import sys

import msgspec

from protocol.config import EngineConfig, LogFormat, RunConfig
from protocol.lifecycle import Role, process_name


def log_label(role: Role, rank: int, config: EngineConfig) -> str:
    """Return the name of a process in the log."""
    if role is Role.API and config.api.api_server_count > 1:
        return f"{role}-{rank}"
    name = process_name(role, rank) if role in (Role.WORKER, Role.ZYGOTE) else str(role)
    return name if config.run.replica is None else f"replica-{config.run.replica} {name}"


class JsonFormatter(logging.Formatter):
    """Formats each record as one line of JSON."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._label,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


def configure_logging(label: str, run: RunConfig) -> None:
    """Send the log of `troika`, and of no other logger, to stderr, with the process's label."""
    handler = logging.StreamHandler(sys.stderr)
    if run.log_format is LogFormat.JSON:
        handler.setFormatter(JsonFormatter(label))
    else:
        line = f"%(asctime)s [{label}] %(levelname)s %(message)s"
        handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
    logger = logging.getLogger("troika")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(run.log_level.upper())
