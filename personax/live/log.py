"""The logger of live federations. Each record is one line without control characters, whatever a peer sends.

At most `_MOST` records a minute with the same text and the same first argument (the client's name) are logged.
"""

import logging
import time

from personax.experiment.names import printable

_MOST, _MINUTE = 30, 60.0
logged: dict[tuple[str, str], tuple[float, int]] = {}  # start of the current minute, and the count since then


def _on_one_line(record: logging.LogRecord) -> bool:
    first = record.args[0] if isinstance(record.args, tuple) and record.args else ""
    key, now = (str(record.msg), str(first)), time.monotonic()
    since, num = logged.get(key, (now, 0))
    if now - since >= _MINUTE:
        since, num = now, 0
    logged[key] = (since, num + 1)
    more = " (Further lines are omitted for this minute.)" if num + 1 == _MOST else ""
    record.msg, record.args = printable(record.getMessage()) + more, ()
    return num < _MOST


logger = logging.getLogger("personax.live")
logger.addFilter(_on_one_line)
