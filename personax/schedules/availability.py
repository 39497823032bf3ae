"""Availability of devices: intervals in which each is online, and the clock that runs while it is."""

from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from personax.values import require_positive


class Online(Protocol):
    """The times at which devices are online. Work stops while a device is offline and continues afterwards."""

    def worked(self, devices: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Return the total time that each device has been online up to a given time."""
        ...

    def begins(self, devices: np.ndarray, worked: np.ndarray) -> np.ndarray:
        """Return the time at which each device continues after a given total time online."""
        ...

    def ends(self, devices: np.ndarray, worked: np.ndarray) -> np.ndarray:
        """Return the first time at which the total time online reaches `worked`."""
        ...

    def online_from(self, devices: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Return the given time for each device that is online then, and otherwise the time of its next interval."""
        ...

    def scalars(self) -> "OnlineScalars": ...


@dataclass(frozen=True)
class OnlineScalars:
    """The methods of `Online` for one device, which a loop over events calls millions of times."""

    worked: Callable[[int, float], float]
    ends: Callable[[int, float], float]
    online_from: Callable[[int, float], float]


@dataclass(frozen=True)
class AlwaysOnline:
    """Devices that are never offline."""

    def worked(self, devices: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Return the time itself."""
        return np.broadcast_to(time, np.shape(devices))

    online_from = worked

    def begins(self, devices: np.ndarray, worked: np.ndarray) -> np.ndarray:
        """Return the time worked."""
        return np.broadcast_to(worked, np.shape(devices))

    ends = begins

    def scalars(self) -> OnlineScalars:
        """Return the same functions for single devices."""
        same = lambda device, time: time
        return OnlineScalars(same, same, same)


@dataclass(frozen=True, eq=False)
class Availability:
    """Intervals in seconds in which each device is online; all repeat after `period` seconds.

    Device d has the intervals `offsets[d]` to `offsets[d + 1]`, which are sorted and disjoint, and at least one.

    >>> one = Availability(np.array([0, 2]), np.array([0.0, 20.0]), np.array([5.0, 30.0]), period=40.0)
    >>> one.ends(np.array([0]), np.array([7.0])).tolist()  # online for 5 s, and for 2 s more from second 20 on
    [22.0]
    """

    offsets: np.ndarray
    start: np.ndarray
    end: np.ndarray
    period: float

    def __post_init__(self) -> None:
        require_positive("period", self.period)
        if self.offsets[-1] != len(self.start) or np.any(np.diff(self.offsets) < 1):
            raise ValueError("Each device needs at least one interval in which it is online.")
        first = np.zeros(len(self.start), bool)
        first[self.offsets[:-1]] = True
        overlap = ~first[1:] & (self.start[1:] < self.end[:-1])
        if np.any(self.end <= self.start) or np.any(self.start < 0) or np.any(self.end > self.period) or overlap.any():
            raise ValueError("Intervals must be sorted, disjoint and not empty, and lie between 0 and the period.")

    @property
    def share(self) -> float:
        """The mean share of devices that are online."""
        return float(self._total.mean() / self.period)

    @cached_property
    def _before(self) -> np.ndarray:
        """The time that a device has been online before each of its intervals."""
        ended = np.r_[0.0, np.cumsum(self.end - self.start)]
        first = np.repeat(ended[self.offsets[:-1]], np.diff(self.offsets))
        return ended[:-1] - first

    @cached_property
    def _total(self) -> np.ndarray:
        """The time that each device is online in a period."""
        last = self.offsets[1:] - 1
        return self._before[last] + (self.end - self.start)[last]

    def _last(self, values: np.ndarray, devices: np.ndarray, at_most: np.ndarray) -> np.ndarray:
        """Find each device's last interval whose value is at most `at_most`, or the one before its first interval."""
        low, high = self.offsets[devices] - 1, self.offsets[np.asarray(devices) + 1]
        for _ in range(int(np.diff(self.offsets).max()).bit_length()):
            middle = (low + high) >> 1
            right = (middle > low) & (values[middle] <= at_most)
            low, high = np.where(right, middle, low), np.where(right | (middle == low), high, middle)
        return low

    def worked(self, devices: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Return the total time that each device has been online up to a given time."""
        turns, phase = np.divmod(time, self.period)
        at = self._last(self.start, devices, phase)
        now = self._before[at] + np.minimum(phase, self.end[at]) - self.start[at]
        return turns * self._total[devices] + np.where(at >= self.offsets[devices], now, 0.0)

    def begins(self, devices: np.ndarray, worked: np.ndarray) -> np.ndarray:
        """Return the time at which each device continues after a given total time online."""
        turns, rest = np.divmod(worked, self._total[devices])
        at = self._last(self._before, devices, rest)
        return turns * self.period + self.start[at] + (rest - self._before[at])

    def ends(self, devices: np.ndarray, worked: np.ndarray) -> np.ndarray:
        """Return the first time at which the total time online reaches `worked`."""
        total = self._total[devices]
        turns, rest = np.divmod(worked, total)
        full = (rest == 0) & (turns > 0)
        turns, rest = turns - full, np.where(full, total, rest)
        at = self._last(self._before, devices, rest)
        at = at - ((self._before[at] == rest) & (at > self.offsets[devices]))
        return turns * self.period + self.start[at] + (rest - self._before[at])

    def online_from(self, devices: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Return the given time for each device that is online then, and otherwise the time of its next interval."""
        turns, phase = np.divmod(np.broadcast_to(time, np.shape(devices)), self.period)
        first, after = self.offsets[devices], self.offsets[np.asarray(devices) + 1]
        at = self._last(self.start, devices, phase)
        is_online = (at >= first) & (phase < self.end[at])
        is_last = at + 1 == after
        next_start = (turns + is_last) * self.period + self.start[np.where(is_last, first, at + 1)]
        return np.where(is_online, time, np.maximum(time, next_start))

    def scalars(self) -> OnlineScalars:
        """Return the same functions for single devices. Python's own numbers are ten times faster one at a time."""
        packed = lambda values: array("d", np.asarray(values, float).tobytes())
        start, end, before, total = map(packed, (self.start, self.end, self._before, self._total))
        offsets, period = array("q", self.offsets.astype(np.int64).tobytes()), self.period

        def worked(device: int, time: float) -> float:
            turns, phase = divmod(time, period)
            low = offsets[device]
            at = bisect_right(start, phase, low, offsets[device + 1]) - 1
            return turns * total[device] + (0.0 if at < low else before[at] + min(phase, end[at]) - start[at])

        def ends(device: int, worked: float) -> float:
            turns, rest = divmod(worked, total[device])
            if rest == 0 and turns > 0:
                turns, rest = turns - 1, total[device]
            low = offsets[device]
            at = bisect_right(before, rest, low, offsets[device + 1]) - 1
            at -= before[at] == rest and at > low
            return turns * period + start[at] + (rest - before[at])

        def online_from(device: int, time: float) -> float:
            turns, phase = divmod(time, period)
            low, high = offsets[device], offsets[device + 1]
            after = bisect_right(start, phase, low, high)
            if after > low and phase < end[after - 1]:
                return time
            return max(time, turns * period + start[after] if after < high else (turns + 1) * period + start[low])

        return OnlineScalars(worked, ends, online_from)
