"""What the server has settled, on its disk before it answers anyone.

    journal.jsonl   one line for each thing that happened: for people, and to prove that nothing was lost or done twice
    log/            the same with the uploaded arrays, since the last two checkpoints: what a restart repeats

A record is written whole or, where the process or the disk stopped in the middle, does not count. What is written
survives the end of the process (kill -9); with `sync` also that of the machine, for the price of waiting for the disk.
"""

import json
import os
import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from personax.checkpoint import write_atomically
from personax.live.messages import Content, checksum

_HEAD = struct.Struct("<4sIQQQ")  # a mark, the lengths of the words and of the arrays, their checksums
_MARK = b"PXJ1"
_SEGMENT = re.compile(r"(\d{12})\.log")


class Record(NamedTuple):
    """One thing that happened, and the arrays that came with it."""

    about: dict[str, Any]  # `number` counts the records of a run from 1
    arrays: Content = b""


class Journal:
    """The records of one run, in its folder. Only one process may write there.

    The log is a row of segments, each named by its first record. Segments that a checkpoint has made superfluous are
    written over, because that is many times faster than growing new files; what is left of their old records has
    numbers that do not follow, which is where reading ends.
    """

    def __init__(self, folder: Path, sync: bool = False) -> None:
        self.lines, self.log, self.sync = folder / "journal.jsonl", folder / "log", sync
        self.log.mkdir(parents=True, exist_ok=True)
        self.broken = False  # after a write that failed nothing more is written
        self.last = self._mend()
        self.text = os.open(self.lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._begin_segment()

    def append(self, about: dict[str, Any], arrays: Content = b"") -> Record:
        """Write the next record; when this returns, the end of this process cannot lose it."""
        if self.broken:
            raise OSError(f"{self.log} cannot be written to, and the server must stop. Make room and start it again.")
        record = Record({"number": self.last + 1, **about}, arrays)
        words = json.dumps(record.about).encode()
        head = _HEAD.pack(_MARK, len(words), len(arrays), checksum(words), checksum(arrays))
        self.broken = True
        _write(self.segment, [head, words, arrays], self.end)
        if self.sync:
            os.fsync(self.segment)
        _write(self.text, [words, b"\n"], None)
        self.broken = False
        self.end += len(head) + len(words) + len(arrays)
        self.last += 1
        return record

    def after(self, number: int) -> Iterator[Record]:
        """The records after this one, in order."""
        expected = number + 1
        for begin in self._segments():
            for record, _ in _records(self._path(begin), begin):
                if record.about["number"] == expected:
                    yield record
                    expected += 1
        if expected <= self.last:
            raise ValueError(f"{self.log} lacks record {expected}. Restore the run folder from a copy.")

    def rotate(self) -> None:
        """Begin a new segment: before a checkpoint of all records so far."""
        os.close(self.segment)
        self._begin_segment()

    def forget(self, number: int) -> None:
        """Segments that have no record after this one may be written over."""
        begins = self._segments()
        for begin, following in pairwise(begins):
            if following <= number + 1:
                self._path(begin).rename(self.log / f"spare-{begin:012d}.log")

    def close(self) -> None:
        """Flush to the disk, and close."""
        for file in (self.segment, self.text):
            os.fsync(file)
            os.close(file)

    def _begin_segment(self) -> None:
        path = self._path(self.last + 1)
        spares = sorted(self.log.glob("spare-*.log"))
        if spares and not path.exists():
            spares[-1].rename(path)
        for spare in spares[:-3]:
            spare.unlink(missing_ok=True)
        self.segment, self.end = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), 0

    def _path(self, begin: int) -> Path:
        return self.log / f"{begin:012d}.log"

    def _segments(self) -> list[int]:
        """The numbers of the first records of all segments."""
        return sorted(int(found[1]) for found in map(_SEGMENT.fullmatch, os.listdir(self.log)) if found)

    def _mend(self) -> int:
        """Make the lines tell what the log has, no less and no more; the number of the last record that is whole."""
        begins = self._segments()
        last = begins[-1] - 1 if begins else 0
        told, missing = _mend_lines(self.lines), []
        for begin in begins:
            for record, _ in _records(self._path(begin), begin):
                last = record.about["number"]
                if last > told:
                    missing.append(json.dumps(record.about).encode() + b"\n")
        if told > last:  # a machine that stops may keep the lines and lose what they tell
            kept = (line for line in self.lines.read_bytes().splitlines(True) if json.loads(line)["number"] <= last)
            write_atomically(self.lines, b"".join(kept))
        with self.lines.open("ab") as file:
            file.writelines(missing)
        return last


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The journal of a run folder."""
    with (folder / "journal.jsonl").open("rb") as file:
        return [json.loads(line) for line in file if line.endswith(b"\n")]


def _write(file: int, parts: list[Content], at: int | None) -> None:
    """Write all parts at a place, or append all or nothing."""
    if at is not None:
        written = os.pwritev(file, parts, at)
        rest = memoryview(b"".join(parts))[written:] if written < sum(map(len, parts)) else b""
        while rest:  # a disk that is full says so at the second try
            written += os.pwrite(file, rest, at + written)
            rest = memoryview(b"".join(parts))[written:]
        return
    begin = os.lseek(file, 0, os.SEEK_END)
    try:
        rest = memoryview(b"".join(parts))
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        os.ftruncate(file, begin)
        raise


def _mend_lines(path: Path) -> int:
    """Cut off a line that was not written whole; the number of the last one."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    good = content.rfind(b"\n") + 1
    if good < len(content):
        os.truncate(path, good)
    lines = content[:good].splitlines()
    return json.loads(lines[-1])["number"] if lines else 0


def _records(path: Path, expected: int) -> Iterator[tuple[Record, int]]:
    """The records of a segment that are whole and follow each other, and where each ends."""
    with path.open("rb") as file:
        while True:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            mark, num_words, num_arrays, check_words, check_arrays = _HEAD.unpack(head)
            if mark != _MARK or num_words > 1 << 24 or num_arrays > 1 << 40:
                return
            words, arrays = file.read(num_words), file.read(num_arrays)
            if checksum(words) != check_words or checksum(arrays) != check_arrays:
                return
            about = json.loads(words)
            if about["number"] != expected:
                return
            yield Record(about, arrays), file.tell()
            expected += 1
