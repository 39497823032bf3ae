"""Text formatting of numbers and findings."""

from collections.abc import Sequence
from datetime import datetime
from math import floor, isfinite, log10

from personax.evaluation.scores import Interval, higher_is_better, is_share, show
from personax.experiment.records import RunRecord
from personax.report.runs import ReportedRun, Score

MINUS = "\N{MINUS SIGN}"
ROLES = {"local": "local training", "global": "the global model"}


def unit(metric: str) -> str:
    """Return the unit to append to a number of a metric."""
    return " %" if is_share(metric) else ""


def number(value: Interval | float | None, metric: str, signed: bool = False) -> str:
    """Format a value of a metric, with half its interval if it has one; a dash if there is no value."""
    if value is None:
        return "–"
    mean = value.mean if isinstance(value, Interval) else value
    if not isfinite(mean):
        return "not finite"
    text = show(value, metric) if is_share(metric) else _rounded(value)
    if signed:
        text = text if text.startswith("-") else f"+{text}"
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def _rounded(value: Interval | float) -> str:
    """Round a number to three digits, or a mean to the precision that its interval supports.

    >>> _rounded(0.3), _rounded(1638.712), _rounded(Interval(0.638712, 0.5915, 0.6859, 3))
    ('0.300', '1639', '0.639 ± 0.047')
    """
    if not isinstance(value, Interval):
        return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:#.3g}".rstrip(".")
    half = value.half
    if half is None or not 1e-6 < half < 1e5:
        return _rounded(value.mean)
    digits = max(0, 1 - floor(log10(half)))
    return f"{value.mean:.{digits}f} ± {half:.{digits}f}"


def share(value: float | None) -> str:
    """Format a share of clients in %."""
    return "–" if value is None else "not finite" if not isfinite(value) else f"{100 * value:.0f} %"


def rounds(numbers: Sequence[int]) -> str:
    """Name the rounds of all seeds.

    >>> rounds([20, 20]), rounds([20, 40])
    ('round 20', 'rounds 20 to 40')
    """
    first, last = min(numbers), max(numbers)
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def seconds(value: float) -> str:
    """Format a duration.

    >>> seconds(0.25), seconds(75), seconds(7500)
    ('0.25 s', '75.0 s', '2.1 h')
    """
    return (
        f"{value:.2f} s"
        if value < 10
        else f"{value:.1f} s"
        if value < 600
        else (f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h")
    )


def size(num_bytes: float) -> str:
    """Format a number of bytes.

    >>> size(0), size(1536), size(3.2e9)
    ('0 B', '1.54 kB', '3.2 GB')
    """
    for name in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {name}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def moment(iso: str) -> str:
    """Format an ISO time stamp; other text is returned unchanged.

    >>> moment("2026-03-05T14:07:31+00:00")
    '5 March 2026, 14:07 UTC'
    """
    try:
        at = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    zone = at.tzname() or ""
    return f"{at.day} {at:%B %Y, %H:%M} {zone}".rstrip()


def facts(record: RunRecord) -> dict[str, str]:
    """Return the date, machine and versions of a run."""
    seeds = ", ".join(map(str, record.seeds))
    return {"started": moment(record.started), **record.machine, "personax": record.personax, "seeds": seeds}


def best_score(scores: Sequence[Score], metric: str) -> Score | None:
    """Return the best score of a run among comparable ones without flags or lost seeds; None if only one remains."""
    baseline = next((score for score in scores if score.role), scores[0])
    ranked = _ranked(scores, metric, baseline.group)
    return ranked[0][0] if len(ranked) > 1 else None


def verdict(run: ReportedRun, scores: Sequence[Score], metric: str) -> str:
    """Summarize the table in one or two sentences, without claiming more than its numbers support."""
    best = best_score(scores, metric)
    if best is None:
        return ""
    if len(run.record.seeds) == 1:
        return "With one seed there are no intervals, so the order of the scores is not a finding."
    row = best.row(metric)
    assert row is not None
    order, side = ("highest", "above") if higher_is_better(metric) else ("lowest", "below")
    text = f"{_subject(best)} has the {order} mean {metric}, {number(row.mean, metric)}{unit(metric)}."
    second = _ranked(scores, metric, best.group)[1][0]
    rivals = [score for score in scores if score.role and score is not best and not score.num_lost(metric)]
    against = [_against(best, other, metric, side) for other in (*rivals, *([] if second.role else [second]))]
    against = [text for text in against if text]
    return f"{text} Its 95 % interval {_list(against)}." if against else text


def _ranked(scores: Sequence[Score], metric: str, group: str) -> list[tuple[Score, float]]:
    rows = [(score, score.row(metric)) for score in scores if score.group == group]
    means = [(score, row.mean.mean) for score, row in rows if row and row.is_ranked and isfinite(row.mean.mean)]
    return sorted(means, key=lambda pair: pair[1], reverse=higher_is_better(metric))


def _against(best: Score, other: Score, metric: str, side: str) -> str:
    """Compare the interval of the best score with another's; empty if the two are not comparable."""
    mine, theirs = best.row(metric), other.row(metric)
    if mine is None or theirs is None or other.group != best.group or theirs.mean.low is None:
        return ""
    overlap = _overlap(mine.mean, theirs.mean)
    where = "overlaps" if overlap else f"lies {side}"
    if not other.role:
        chance = ", so their order may be due to chance" if overlap else ""
        return f"{where} that of the runner-up, {other.name}{chance}"
    change = mine.over_local if other.role == "local" else mine.over_global
    if change is None:
        return f"{where} that of {ROLES[other.role]}"
    includes = not (change.is_above(0) or change.is_below(0))
    zero = ", which includes 0" if includes else ", which excludes 0" if overlap else ""
    points = " points" if is_share(metric) else ""
    paired = f"paired difference {number(change, metric, signed=True)}{points}{zero}"
    return f"{where} that of {ROLES[other.role]} ({paired})"


def _subject(score: Score) -> str:
    plain = not score.role or score.name == ROLES[score.role]
    return score.name if plain else f"{score.name} ({ROLES[score.role]})"


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"


def _overlap(one: Interval, other: Interval) -> bool:
    """Return True unless two known intervals have no point in common.

    >>> _overlap(Interval(1, 0.5, 1.5, 2), Interval(-1, -2, 0.0, 2))
    False
    """
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return True
    return one.low <= other.high and other.low <= one.high
