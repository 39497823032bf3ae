"""The audit log of a live run: who did what to the server. (The journal records what happened to the model.)

`audit.jsonl` in the run folder has a line for each start (with the settings that changed), login, refusal (with its
reason), revocation, and operator action. Events that a client can cause repeatedly are counted: the first is logged at
once, and the next line follows `_QUIET` seconds later with the number of events in between.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from personax.experiment.names import printable
from personax.live.files import open_private

_QUIET = 600.0  # seconds between lines about the same event
NAME = "audit.jsonl"


class Audit:
    """Writer of the audit log of a run folder; without a folder it only counts."""

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.pending = clock, {}
        self.file = None if folder is None else open_private(folder / NAME, os.O_WRONLY | os.O_APPEND)

    def note(self, what: str, **facts: Any) -> None:
        """Write a line now."""
        if self.file is not None:
            at = datetime.now(UTC).isoformat(timespec="seconds")
            os.write(self.file, json.dumps({"time": at, "what": what, **facts}).encode() + b"\n")

    def count(self, what: str, **facts: str) -> bool:
        """Write a line if the last one about this event is old enough, otherwise count it. Return True if written."""
        key, now = (what, *sorted(facts.items())), self.clock()
        at, num = self.pending.get(key, (-_QUIET, 0))
        if now - at < _QUIET:
            self.pending[key] = (at, num + 1)
            return False
        self.pending[key] = (now, 0)
        self.note(what, **facts, **({"count": num + 1} if num else {}))
        return True

    def flush(self, everything: bool = False) -> None:
        """Write the counts that are due, and forget them."""
        now = self.clock()
        for key, (at, num) in list(self.pending.items()):
            if everything or now - at >= _QUIET:
                del self.pending[key]
                if num:
                    self.note(key[0], **dict(key[1:]), count=num)

    def close(self) -> None:
        """Write all counts, and close the file."""
        self.flush(everything=True)
        if self.file is not None:
            os.close(self.file)
            self.file = None


def read_audit(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's audit log, without incomplete ones."""
    path = folder / NAME
    if not path.is_file():
        raise FileNotFoundError(f"File not found: {path}. Give the folder of a live run served by this version.")
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def describe(line: dict[str, Any]) -> str:
    """Format a line of the audit log for a terminal."""
    facts = ", ".join(f"{key} {item}" for key, item in line.items() if key not in ("time", "what", "settings"))
    return printable(f"{line.get('time', '')}  {line.get('what', '')}  {facts}")


def settings_changed(lines: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of `[live]` that changed since the last start, as old and new values."""
    before = next((line["settings"] for line in reversed(lines) if line.get("what") == "start"), None)
    if before is None:
        return {}
    keys = sorted(before.keys() | settings.keys())
    return {key: [before.get(key), settings.get(key)] for key in keys if before.get(key) != settings.get(key)}
