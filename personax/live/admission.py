"""Admission of uploads: a bound on every uploaded array, a budget for loud uploads, and a cap on a client's share.

The norm of an upload's delta, and of each part of its extra, may be at most

    min( model_factor * max(|w|, 1),  outlier_factor * median * min(1, loud_budget - spent + 1/4) )

where the median is over the other clients. For deltas it uses the norms of their last deltas; for each part of the
extra it uses the largest norm so far of that part (a control variate moves most at its first visit). The second bound
applies once `least_peers` clients have a norm. An extra whose structure differs from the model's may consist of
squares, so its bounds apply to the square roots of its norms. An upload with norm r * outlier_factor * median spends
r - 1/4 of its client's budget, or earns it back if that is negative: over time, the norms of a client may average a
quarter of the bound.
"""

from collections.abc import Callable, Iterable, Mapping
from math import inf
from statistics import median
from typing import NamedTuple

from personax.experiment.config import Terms
from personax.live.ledger import Seat

QUIET = 0.25  # the share of the bound that costs nothing


class Verdict(NamedTuple):
    """The bound on a delta's norm, the problem with an upload (or ""), and the budget spent once it is applied.

    `may_clip` states whether scaling the delta down to the bound would solve the problem.
    """

    bound: float
    problem: str
    excess: float
    may_clip: bool = False


def judge(
    terms: Terms,
    seat: Seat,
    peers: list[Seat],
    norm: float,
    extras: Mapping[str, float],
    model_norm: Callable[[], float],
) -> Verdict:
    """Judge an upload of these norms by the bounds above. `model_norm` is called only if its result matters."""
    largest = _model_bound(terms, max(norm, *extras.values()) if extras else norm, model_norm)
    usual = {"": _median(terms, (one.norm for one in peers))}
    usual |= {part: _median(terms, (one.extras.get(part) for one in peers)) for part in extras}
    room = max(0.0, min(1.0, terms.loud_budget - seat.excess + QUIET))
    ours = lambda middle: inf if middle == inf else terms.outlier_factor * room * middle
    bounds = {part: min(ours(middle), largest) for part, middle in usual.items()}
    found = {"": norm, **extras}
    loud = [part for part in found if not found[part] <= bounds[part]]
    if not loud:
        return Verdict(bounds[""], "", _excess(terms, seat, found, usual))
    part = loud[0]
    what = f"The norm {found[part]:.3g} of its {f'`{part}`' if part else 'update'}"
    if bounds[part] == largest:
        rule = f"is too large for the model. The bound is {largest:.3g} (`live.model_factor`)."
    elif room < 1:
        rule = f"exceeds the remaining budget for loud uploads, {bounds[part]:.3g} (`live.loud_budget`)."
    else:
        rule = f"is far beyond the other clients' norms. The bound is {bounds[part]:.3g} (`live.outlier_factor`)."
    clipped = {**found, "": min(norm, bounds[""])}
    return Verdict(bounds[""], f"{what} {rule}", _excess(terms, seat, clipped, usual), loud == [""])


def weight_of(terms: Terms, name: str, claimed: float, known: Mapping[str, float]) -> float:
    """The number of samples used as a client's weight: the operator's value, or the client's claim up to the cap.

    `known` has the numbers that the members of the round registered with or claimed last; this client's is added.
    """
    if name in terms.samples:
        return terms.samples[name]
    counts = {other: terms.samples.get(other, number) for other, number in known.items() if number > 0}
    return min(claimed, largest_weight({**counts, name: claimed}.values(), terms.max_share))


def largest_weight(counts: Iterable[float], max_share: float) -> float:
    """The cap on weights at which no client has more than `max_share` times a uniform share of the total weight.

    It solves cap = (max_share / n) sum_i min(count_i, cap).

    >>> round(largest_weight([10, 10, 10, 10, 10, 10, 10, 10, 10, 910], 3), 6)
    38.571429
    """
    ordered = sorted(counts, reverse=True)
    share = max_share / len(ordered)
    for num, count in enumerate(ordered):
        left = 1 - num * share
        if not max_share or left <= 0:
            return inf
        cap = share * sum(ordered[num:]) / left
        if count <= cap:
            return cap
    return inf


def _model_bound(terms: Terms, norm: float, model_norm: Callable[[], float]) -> float:
    """The bound given by the model's scale, or a smaller bound that `norm` already respects."""
    if not terms.model_factor:
        return inf
    return terms.model_factor * (1.0 if norm <= terms.model_factor else max(model_norm(), 1.0))


def _median(terms: Terms, norms: Iterable[float | None]) -> float:
    """The median of the peers' norms, or infinity if too few peers have one."""
    known = [norm for norm in norms if norm is not None]
    return inf if terms.outlier_factor == 0 or len(known) < terms.least_peers else median(known)


def _excess(terms: Terms, seat: Seat, found: Mapping[str, float], usual: Mapping[str, float]) -> float:
    """The budget that a client has spent once this upload is applied."""
    scales = {part: terms.outlier_factor * middle for part, middle in usual.items() if 0 < middle < inf}
    share = max((found[part] / scale for part, scale in scales.items()), default=0.0)
    return round(max(0.0, seat.excess + share - QUIET), 6)
