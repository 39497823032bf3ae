"""CSV files of device traces, with errors that name the file, the row and the column."""

import csv
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path

import numpy as np

DEVICE_COLUMNS = ("samples_per_second", "upload", "download")
INTERVAL_COLUMNS = ("start", "end")


def read_devices(path: Path) -> tuple[list[str], np.ndarray]:
    """Read the names of devices, and samples and bytes (up and down) per second: [devices, 3]."""
    names: dict[str, int] = {}
    rows = []
    for number, name, values in _rows(path, DEVICE_COLUMNS):
        if name in names:
            raise ValueError(
                f"{path}, row {number}, column `device`: {name!r} is also in row {names[name]}. Remove one."
            )
        for column, given in zip(DEVICE_COLUMNS, values, strict=True):
            if given <= 0:
                raise ValueError(f"{path}, row {number}, column `{column}`: must be positive, got {given:g}.")
        names[name] = number
        rows.append(values)
    return list(names), np.asarray(rows)


def read_intervals(path: Path, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read the intervals of these devices: offsets [devices + 1], and starts and ends, sorted for each device."""
    places = {name: place for place, name in enumerate(names)}
    device: list[int] = []
    intervals: list[tuple[float, ...]] = []
    numbers: list[int] = []
    for number, name, (start, end) in _rows(path, INTERVAL_COLUMNS):
        if name not in places:
            raise ValueError(f"{path}, row {number}, column `device`: {name!r} is not in the file of devices.")
        if start < 0:
            raise ValueError(f"{path}, row {number}, column `start`: must not be negative, got {start:g}.")
        if end <= start:
            raise ValueError(f"{path}, row {number}, column `end`: must be after the start {start:g}, got {end:g}.")
        device.append(places[name])
        intervals.append((start, end))
        numbers.append(number)
    starts, ends = np.asarray(intervals).T
    order = np.lexsort((starts, device))
    owner, starts, ends = np.asarray(device)[order], starts[order], ends[order]
    overlaps = np.flatnonzero((owner[1:] == owner[:-1]) & (starts[1:] < ends[:-1]))
    if len(overlaps):
        first, second = sorted(numbers[int(order[overlaps[0] + next])] for next in (0, 1))
        name = names[int(owner[overlaps[0]])]
        raise ValueError(f"{path}, row {second}, column `start`: overlaps row {first} of device {name!r}. Join them.")
    counts = np.bincount(owner, minlength=len(names))
    if not counts.all():
        name = names[int(np.argmin(counts))]
        raise ValueError(f"{path}: device {name!r} has no interval and would never be online. Add one, or remove it.")
    return np.r_[0, np.cumsum(counts)], starts, ends


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, str, tuple[float, ...]]]:
    """Yield the row number, counted from 1 with the header, the device and the numbers of each row."""
    if not path.is_file():
        raise FileNotFoundError(f"File not found: {path}.")
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            yield from _parsed(path, csv.reader(file), columns)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a CSV file in UTF-8: {error.reason}. Export the trace as CSV.") from None
        except csv.Error as error:
            raise ValueError(f"{path} is not a CSV file: {error}. Export the trace as CSV.") from None


def _parsed(path: Path, reader: Iterator[list[str]], columns: Sequence[str]) -> Iterator[tuple]:
    titles = [title.strip() for title in next(reader, [])]
    wanted = ("device", *columns)
    missing = [column for column in wanted if column not in titles]
    if missing:
        raise ValueError(f"{path} has no column `{missing[0]}`. It needs {', '.join(wanted)}; it has {titles}.")
    places, number = [titles.index(column) for column in wanted], 1
    for number, row in enumerate(reader, 2):
        if not row:
            continue
        if len(row) != len(titles):
            raise ValueError(f"{path}, row {number}: must have {len(titles)} entries, got {len(row)}.")
        name, *texts = (row[place].strip() for place in places)
        if not name:
            raise ValueError(f"{path}, row {number}, column `device`: missing value.")
        yield number, name, tuple(_number(path, number, *pair) for pair in zip(columns, texts, strict=True))
    if number == 1:
        raise ValueError(f"{path} has no rows below its header. Add the devices.")


def _number(path: Path, row: int, column: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not isfinite(found):
        raise ValueError(f"{path}, row {row}, column `{column}`: must be a number, got {text!r}.")
    return found
