"""The initial zoom of learning curves, where methods differ, and a time axis on which all of them are visible."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from personax.evaluation.scores import higher_is_better

LATER = 1 / 3  # the last share of each curve, which sets the zoom
MARGIN = 0.2  # above and below, as a share of that part's height
GAIN = 0.6  # zoom only if the part is less than this share of the whole height
FAR = 3.0  # leave out a curve whose gap to the others is this many times their own range
TIMES_APART = 4.0  # use a logarithmic time axis if one curve is this many times as long as another


class Focus(NamedTuple):
    """The range of an axis, and the names of the curves that end outside it."""

    low: float
    high: float
    outside: list[str]


def focus(curves: Sequence[Any], metric: str) -> Focus | None:
    """Find the range of the last third of the curves; None if that is not much less than the whole range.

    `curves` are named traces. Those that end far behind the rest are left outside, so that the rest can be
    distinguished; at least three stay.
    """
    parts = {curve.name: (np.asarray(curve.x, float), np.asarray(curve.y, float)) for curve in curves}
    whole = np.concatenate([y[np.isfinite(y)] for _, y in parts.values()]) if parts else np.zeros(0)
    later = {name: kept for name, (x, y) in parts.items() if len(kept := _later(x, y))}
    if len(later) < 2 or not np.ptp(whole):
        return None
    sign = 1 if higher_is_better(metric) else -1
    order = sorted(later, key=lambda name: sign * later[name][-1])  # the worst first
    outside = []
    while len(order) > 3 and _gap(later, order, sign) > FAR * _height(later, order[1:]):
        outside.append(order.pop(0))
    low, high = _range(later, order)
    margin = MARGIN * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin
    return Focus(low, high, outside) if high - low < GAIN * np.ptp(whole) else None


def is_logarithmic(ends: Sequence[float]) -> bool:
    """Return True if some curves are too short to be visible on a linear time axis."""
    positive = [end for end in ends if end > 0]
    return len(positive) > 1 and max(positive) > TIMES_APART * min(positive)


def _later(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the finite values of the last part of a curve."""
    return y[np.isfinite(y) & (x >= x[-1] - LATER * (x[-1] - x[0]))]


def _gap(later: dict[str, np.ndarray], order: Sequence[str], sign: int) -> float:
    """Return the distance between the ends of the worst curve and the second-worst."""
    return sign * (later[order[1]][-1] - later[order[0]][-1])


def _height(later: dict[str, np.ndarray], names: Sequence[str]) -> float:
    low, high = _range(later, names)
    return high - low


def _range(later: dict[str, np.ndarray], names: Sequence[str]) -> tuple[float, float]:
    return min(float(later[name].min()) for name in names), max(float(later[name].max()) for name in names)
