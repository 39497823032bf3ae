"""The logger of the live part. Whatever a peer put into a message, a record is one line without control characters."""

import logging

from personax.experiment.names import printable


def _on_one_line(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


logger = logging.getLogger("personax.live")
logger.addFilter(_on_one_line)
