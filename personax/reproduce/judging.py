"""Judge the claims of a paper in each reading and with each scoring, paired by seed."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from personax.evaluation.scores import Interval, higher_is_better, interval, is_share
from personax.reproduce.experiment import MOST_FREQUENT, Claim, Contrast, Place, Reading, Verdict
from personax.reproduce.outcome import (
    LARGEST_LOSS,
    CellRecord,
    ClaimRecord,
    ContrastRecord,
    EffectRecord,
    JudgedRecord,
)

_FAILING: tuple[Verdict, ...] = ("does not hold", "undecided", "not finite")
_Found = tuple[ContrastRecord, np.ndarray]  # a contrast and its difference for each seed


def judge(claim: Claim, cells: Sequence[CellRecord], readings: Sequence[Reading]) -> ClaimRecord:
    """Judge a claim in each reading; the overall verdict covers the readings that count, with their first scoring.

    A contrast holds if its paired interval is above 0 and fails if it is below 0. It is not testable in a row where no
    method beats both baselines, or where no compared method beats the most frequent class, and not finite if a number
    is not, is an absurd loss, or comes from a training that diverged. Readings in which nothing is testable are ignored
    if something is testable in others. Claims along curves are judged with the first scoring alone.
    """
    if claim.untestable:
        return ClaimRecord(claim.words, claim.place, "not testable", claim.untestable, None, [])
    by_place = {(cell.row, cell.column): cell for cell in cells}
    judged, counted = [], []
    for reading in readings:
        contrasts = [one for one in claim.contrasts if by_place[one.better[0]].reading == reading.name]
        names = _scorings(contrasts, by_place)
        for at, name in enumerate(names[:1] if claim.is_along_curves else names):
            found = [_contrasted(claim, one, by_place, cells, at) for one in contrasts]
            judged.append(_judged(reading.name, name, found))
            counted += [judged[-1]] if at == 0 and not reading.excluded else []
    testable = [one for one in counted if one.verdict != "not testable"] or counted
    verdict = overall([one.verdict for one in testable])
    reason = next((one.reason for one in testable if one.verdict == verdict and one.reason), "")
    effect = testable[0].effect if testable else None
    return ClaimRecord(claim.words, claim.place, verdict, reason, effect, judged)


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine verdicts: the common one if all agree, otherwise "holds in part" if any of them holds.

    >>> overall(["holds", "undecided"]), overall(["undecided", "does not hold"])
    ('holds in part', 'does not hold')
    """
    if len(set(verdicts)) == 1:
        return verdicts[0]
    if "holds" in verdicts or "holds in part" in verdicts:
        return "holds in part"
    failing: list[Verdict] = [one for one in _FAILING if one in verdicts]
    return failing[0] if failing else "not testable"


def _scorings(contrasts: Sequence[Contrast], cells: Mapping[Place, CellRecord]) -> list[str]:
    """Return the names of the scorings with which the contrasts can be judged, as many as any cell has.

    A cell with a single scoring always uses it; other cells are matched by position.
    """
    of_cells = [cells[place].scorings for one in contrasts for place in (*one.better, *one.worse)]
    several = [scorings for scorings in of_cells if len(scorings) > 1] or of_cells[:1]
    names = lambda at: dict.fromkeys(scorings[at].name for scorings in several if len(scorings) > at)
    return [", ".join(names(at)) for at in range(max(map(len, several), default=0))]


def _judged(reading: str, scoring: str, found: Sequence[_Found]) -> JudgedRecord:
    contrasts = [contrast for contrast, _ in found]
    verdict = overall([one.verdict for one in contrasts])
    reason = next((one.reason for one in contrasts if one.reason), "")
    return JudgedRecord(reading, scoring, verdict, reason, _effect(found), contrasts)


def _effect(found: Sequence[_Found]) -> EffectRecord | None:
    """Average the finite contrasts of accuracies, or those of the first metric if there are none."""
    finite = [(one.metric, of_seeds) for one, of_seeds in found if np.isfinite(of_seeds).all()]
    if not finite:
        return None
    metric = next((metric for metric, _ in finite if is_share(metric)), finite[0][0])
    values = np.stack([of_seeds for of, of_seeds in finite if of == metric])
    means = values.mean(axis=1)
    mean = interval(values.mean(axis=0))
    return EffectRecord(metric, mean, len(values), float(means.min()), float(means.max()))


def _contrasted(
    claim: Claim, contrast: Contrast, by_place: Mapping[Place, CellRecord], cells: Sequence[CellRecord], at: int
) -> _Found:
    better, worse = ([by_place[place] for place in side] for side in (contrast.better, contrast.worse))
    compared = [*better, *worse]
    seconds = min((cell.curve.seconds[-1] for cell in compared if cell.curve is not None), default=0.0)
    values = lambda side: np.stack([_values(cell, claim, at, seconds) for cell in side])
    if claim.of == "turn":
        of_seeds = _turn(values(better))
    else:
        of_seeds = contrast.scale * (_combined(claim, values(better)) - _combined(claim, values(worse)))
    reason = next((one.diverged for one in compared if one.diverged), "")
    of_seeds = np.full_like(of_seeds, np.nan) if reason else of_seeds
    found = interval(of_seeds)
    verdict, reason = _undecidable(compared, cells, at, np.isfinite(of_seeds), reason)
    return ContrastRecord(contrast.name, better[0].metric, found, verdict or _verdict(claim, found), reason), of_seeds


def _combined(claim: Claim, values: np.ndarray) -> np.ndarray:
    """Combine the values of one side of a contrast, of the shape [cells, seeds]."""
    if claim.of == "spread":
        return -np.ptp(values, axis=0)
    return values.sum(axis=0)


def _turn(values: np.ndarray) -> np.ndarray:
    """Return each seed's smaller one of the largest rise and the largest fall between neighbors (see `Claim`)."""
    rises = np.diff(values, axis=0)
    mean = rises.mean(axis=1)
    return np.minimum(rises[mean.argmax()], -rises[mean.argmin()])


def _verdict(claim: Claim, found: Interval) -> Verdict:
    """Return the verdict of a finite difference."""
    if claim.within is not None:
        near = found.is_above(-claim.within) and found.is_below(claim.within)
        far = found.is_above(claim.within) or found.is_below(-claim.within)
        return "holds" if near else "does not hold" if far else "undecided"
    return "holds" if found.is_above(0) else "does not hold" if found.is_below(0) else "undecided"


def _undecidable(
    compared: Sequence[CellRecord], cells: Sequence[CellRecord], at: int, finite: np.ndarray, diverged: str
) -> tuple[Verdict | None, str]:
    """Return the verdict that does not depend on the difference, or None, and the reason."""
    if diverged:
        return "not finite", diverged
    if not finite.all():
        return "not finite", f"{np.sum(~finite)} of {len(finite)} seeds are not finite"
    for row in sorted({cell.row for cell in compared if is_share(cell.metric)}):
        here = {one.column: one for one in cells if one.row == row}
        bars = {name: _of(one, at) for name, one in here.items() if one.is_baseline}
        trained = {name: _of(one, at) for name, one in here.items() if not one.is_baseline}
        reached = {one.column: _of(one, at) for one in compared if one.row == row}
        guess = [values for name, values in bars.items() if name == MOST_FREQUENT]
        stated = ", ".join(f"{name} {values.mean():.1f}" for name, values in {**bars, **reached}.items())
        if not any(_is_above_all(values, bars.values()) for values in trained.values()):
            return "not testable", f"no method is above both baselines ({stated} %)"
        if not any(_is_above_all(values, guess) for values in reached.values()):
            return "not testable", f"no compared method is above guessing ({stated} %)"
    return None, ""


def _is_above_all(values: np.ndarray, bars: Iterable[np.ndarray]) -> bool:
    """Return True if a method beats every baseline, by its paired interval or by its only seed."""
    return all(interval(values - bar).is_above(0) if len(values) > 1 else values[0] > bar[0] for bar in bars)


def _of(cell: CellRecord, at: int) -> np.ndarray:
    """Return a cell's values with the scoring at a position, or with its only one."""
    return np.asarray(cell.scorings[at if at < len(cell.scorings) else 0].of_seeds)


def _values(cell: CellRecord, claim: Claim, at: int, seconds: float) -> np.ndarray:
    """Return the compared values of each seed, signed so that higher is better; curves use the first scoring."""
    if claim.of == "wavering":
        assert cell.curve is not None  # the experiment records it
        curve = np.asarray(cell.curve.of_seeds)
        return -curve[len(curve) // 2 :].std(axis=0)
    sign = 1 if higher_is_better(cell.metric) else -1
    if cell.curve is None or not claim.is_along_curves:
        found = _of(cell, at)
        return sign * (found if is_share(cell.metric) else np.where(found > LARGEST_LOSS, np.nan, found))
    curve = np.asarray(cell.curve.of_seeds)
    if claim.along == "seconds":
        return sign * np.array([np.interp(claim.at * seconds, cell.curve.seconds, of_seed) for of_seed in curve.T])
    along = np.asarray(cell.curve.times or cell.curve.rounds, float)
    return sign * curve[np.argmin(np.abs(along - claim.at * along[-1]))]
