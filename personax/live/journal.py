"""The journal of a server: every settled event, on disk before the server answers.

    journal.jsonl      one line per event, readable and as proof that nothing is lost or applied twice
    state/0, state/1   the states after the last events that changed it, written alternately
    archive/           compressed lines that a restart no longer needs

A line has the checksum of the resulting state, if the event changed the state. A state is valid if a line has its
checksum, and such a line is valid if its state, or a later one, is on disk. After an interrupted write, the run is
therefore in the state before that write. What is written survives a killed process (kill -9); with `sync` it also
survives a crash of the machine, at the cost of waiting for the disk. State files are overwritten, because this is many
times faster than growing new ones.
"""

import gzip
import json
import os
import struct
from pathlib import Path
from typing import Any

from personax.experiment.checkpoint import write_atomically
from personax.live.files import open_private, require_folder
from personax.live.log import logger
from personax.live.messages import ALIGNMENT, Buffers, Content, checksum, checksum_of

JOURNAL = "journal.jsonl"
ARCHIVED_BYTES = 64 << 20  # size of the journal at which lines are compressed
_HEAD = struct.Struct(f"<Q{ALIGNMENT - 8}x")  # the number of the record that led to the state
Record = dict[str, Any]  # one event; `number` counts the events of a run from 1


class Journal:
    """The records of one run, in its folder. Only one process may write them, after calling `restore`."""

    def __init__(self, folder: Path, sync: bool = False) -> None:
        if (folder / "log").exists():
            what = f"{folder} has a run of an older version of personax"
            raise ValueError(f"{what}. Finish it with that version, or start in another folder.")
        self.lines, self.sync = folder / JOURNAL, sync
        self.places = [folder / "state" / name for name in ("0", "1")]
        require_folder(self.places[0].parent)
        self.last = self.end = self.turn = 0  # the last record, the end of the lines, the state to overwrite next
        self.broken = False  # after a failed write, nothing more is written
        self.archive, self.archived_end = folder / "archive", 0  # lines before this offset are also in the archive
        self.text, *self.states = (open_private(path, os.O_RDWR) for path in (self.lines, *self.places))

    def append(self, about: Record, state: Buffers | None = None) -> Record:
        """Write the next record and, if it changes the state, the resulting state.

        When this returns, both survive the end of this process.
        """
        if self.broken:
            raise OSError(f"A write to {self.lines} failed, and the server must stop. Free disk space and restart it.")
        record = {"number": self.last + 1, **about}
        if state is not None:
            record["state"] = checksum_of(state)
        self.broken = True
        line = json.dumps(record).encode() + b"\n"
        try:
            _write(self.text, [line], self.end)
        except OSError:
            os.ftruncate(self.text, self.end)
            raise
        if state is not None:
            _write(self.states[self.turn], [_HEAD.pack(self.last + 1), *state], 0)
            if self.sync:
                os.fsync(self.states[self.turn])
        if self.sync:
            os.fsync(self.text)
        self.broken = False
        self.last += 1
        self.end += len(line)
        self.turn ^= state is not None
        return record

    def restore(self, number: int) -> tuple[list[Record], Content | None]:
        """Restore a run from its checkpoint of record `number`.

        Return the records since then, and the newest state if it is later than the checkpoint. Invalid lines are cut.
        """
        records, ends = _records(self.lines.read_bytes(), number)
        known = {record["number"]: record["state"] for record in records if "state" in record}
        kept = [memoryview(path.read_bytes()) for path in self.places]
        heads = [_HEAD.unpack(one[: _HEAD.size])[0] if len(one) > _HEAD.size else 0 for one in kept]
        whole = {head: turn for turn, head in enumerate(heads) if checksum(kept[turn][_HEAD.size :]) == known.get(head)}
        newest = max(whole, default=number)
        lost = [at for at, record in enumerate(records) if record["number"] > newest and "state" in record]
        last = records[-1]["number"] if records else number
        if (lost and lost[0] + 1 < len(records)) or max(heads) > last:  # more than the write in progress is missing
            words = "%s is incomplete. The run goes back to record %d, and later events are lost."
            logger.warning(words, self.lines.parent, records[lost[0]]["number"] - 1 if lost else last)
        if lost:
            records, ends = records[: lost[0]], ends[: lost[0] + 1]
        self.end = ends[-1]
        os.ftruncate(self.text, self.end)
        self.last = records[-1]["number"] if records else number
        self.turn = 1 - whole[newest] if whole else heads.index(min(heads))
        return records, kept[whole[newest]][_HEAD.size :] if whole else None

    def archive_lines(self, last: int, end: int) -> None:
        """Compress the lines up to record `last`, which end at `end`, if they are long enough. Safe in a thread."""
        if end >= ARCHIVED_BYTES and not self.archived_end:
            require_folder(self.archive)
            content = gzip.compress(_read(self.text, end), 6)
            write_atomically(self.archive / f"{last:012d}.jsonl.gz", content, private=True)
            self.archived_end = end

    def cut_archived(self) -> int:
        """Remove the lines that are in the archive; return the number of bytes removed."""
        cut, self.archived_end = self.archived_end, 0
        if cut:
            write_atomically(self.lines, _read(self.text, self.end)[cut:], private=True)
            os.close(self.text)
            self.text, self.end = open_private(self.lines, os.O_RDWR), self.end - cut
        return cut

    def flush(self) -> None:
        """Wait until all lines are on disk."""
        os.fsync(self.text)

    def close(self) -> None:
        """Flush to disk, and close."""
        for file in (self.text, *self.states):
            os.fsync(file)
            os.close(file)


def read_lines(folder: Path) -> list[Record]:
    """The journal of a run folder, including its archive."""
    contents = [gzip.decompress(path.read_bytes()) for path in sorted((folder / "archive").glob("*.jsonl.gz"))]
    found: list[Record] = []
    for content in [*contents, (folder / JOURNAL).read_bytes()]:
        lines = (json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n"))
        last = found[-1]["number"] if found else 0
        found += [line for line in lines if line["number"] > last]  # after a crash, some lines are in both
    return found


def _records(content: bytes, number: int) -> tuple[list[Record], list[int]]:
    """The records after record `number`, and the offsets where the first begins and each ends."""
    end = content.rfind(b"\n") + 1  # the rest is an incomplete line
    records, ends = [], [end]
    while end:
        begin = content.rfind(b"\n", 0, end - 1) + 1
        try:
            record = json.loads(content[begin:end])
            if record["number"] <= number:
                break
        except (ValueError, KeyError, TypeError):  # a power failure may leave zeros: drop them and what follows
            records, ends = [], []
        else:
            records.append(record)
        ends.append(begin)
        end = begin
    return records[::-1], ends[::-1]


def _read(file: int, num_bytes: int) -> bytes:
    """Read the first bytes of a file."""
    parts, have = [], 0
    while have < num_bytes and (part := os.pread(file, num_bytes - have, have)):
        parts.append(part)
        have += len(part)
    return b"".join(parts)


def _write(file: int, parts: Buffers, at: int) -> None:
    """Write all parts at an offset."""
    written = os.pwritev(file, parts, at)
    if written < sum(map(len, parts)):
        whole = memoryview(b"".join(parts))
        while written < len(whole):  # a full disk raises an error at the second attempt
            written += os.pwrite(file, whole[written:], at + written)
