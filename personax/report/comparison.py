"""Plain tables of a reproduction: the paper's numbers beside ours, and its claims with their effects."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from personax.report.words import MINUS
from personax.reproduce.experiment import Verdict
from personax.reproduce.outcome import (
    CellRecord,
    ClaimRecord,
    EffectRecord,
    ReadingRecord,
    ReproductionRecord,
    ScoringRecord,
    difference_shown,
    interval_shown,
    shown,
)

MEASURES = {
    "accuracy": "accuracy, %",
    "train_loss": "training loss",
    "loss": "validation loss",
    "active_share": "active clients, %",
    "step_times_curvature": "step times largest curvature",
}
SUFFIXES = (
    ": training loss",
    ": validation loss",
    ": validation accuracy",
    ": alpha times curvature",
)  # suffixes of rows that repeat the measure
MARKS: dict[str, str] = {
    "holds": "✔",
    "holds in part": "◐",
    "does not hold": "✘",
    "undecided": "≈",
    "not testable": "–",
    "not tested": "–",
    "not finite": "∞",
}
POINTS = ("accuracy", "active_share")
ALL = "all:"  # before a note that concerns every cell
MOST_COLUMNS = 6  # with more settings than this, each setting is a row


class NumberTable(NamedTuple):
    """A table as text; `notes` explain its flags, which are numbered if there are several."""

    caption: str
    scoring: str
    heads: list[str]
    rows: list[list[str]]
    notes: list[str]


def reading_groups(record: ReproductionRecord) -> list[list[ReadingRecord]]:
    """Group the readings that share tables: all together if each is one setting, otherwise each alone."""
    settings = Counter((reading, metric) for reading, metric, _ in {(c.reading, c.metric, c.row) for c in record.cells})
    alone = any(num > 1 for num in settings.values())
    return [[reading] for reading in record.readings] if alone else [list(record.readings)]


def reading_words(reading: ReadingRecord) -> str:
    """Describe a reading: its words, its source, and why it does not count if it is excluded."""
    left_out = f" Not counted in the verdicts: {reading.excluded}." if reading.excluded else ""
    return f"{reading.words} Source: {reading.source}.{left_out}"


def tables_of(
    record: ReproductionRecord, readings: Sequence[ReadingRecord], first: bool = True
) -> Iterator[NumberTable]:
    """Yield the tables of readings, one per measure, for the first scoring or for each of the others."""
    mine = {reading.name for reading in readings}
    cells = [cell for cell in record.cells if cell.reading in mine]
    names = dict.fromkeys(one.name for cell in cells for one in cell.scorings if (one is cell.scorings[0]) == first)
    for metric in dict.fromkeys(cell.metric for cell in cells):
        for scoring in [""] if first else names:
            chosen = [cell for cell in cells if cell.metric == metric and (first or _scored(cell, scoring))]
            if chosen:
                yield _table(chosen, metric, scoring)


def _scored(cell: CellRecord, scoring: str) -> ScoringRecord | None:
    """Return a cell under one scoring; the first scoring if the name is empty."""
    return next((one for one in cell.scorings if one.name == scoring or not scoring), None)


def _table(cells: Sequence[CellRecord], metric: str, scoring: str) -> NumberTable:
    """Make a row per method and a column per setting, or the reverse if the paper's numbers differ by setting."""
    settings = list(dict.fromkeys(cell.row for cell in cells))
    columns = list(dict.fromkeys(cell.column for cell in sorted(cells, key=lambda cell: cell.is_baseline)))
    readings = {cell.reading for cell in cells}
    titles = {row: _short(row, readings) for row in settings}
    at = {(cell.row, cell.column): cell for cell in cells}
    papers = {column: {at[row, column].paper for row in settings if (row, column) in at} for column in columns}
    flags = [one.flag for cell in cells if not cell.is_baseline and (one := _scored(cell, scoring))]
    marks = _marks(flags)
    names = [cell.scorings[0].name for cell in cells if not cell.is_baseline]
    words = scoring or (names[0] if len(set(names)) == 1 and names[0] != "ours" else "")
    caption = ", ".join(filter(None, (MEASURES.get(metric, metric), words)))
    ours = lambda row, column: _ours(at.get((row, column)), scoring, marks)
    paper = lambda row, column, with_interval=True: _paper(at.get((row, column)), with_interval)
    if len(settings) > MOST_COLUMNS or any(len(of) > 1 for of in papers.values()):
        paired = [column for column in columns if papers[column] != {None}]
        heads = ["", *(head for one in columns for head in ((f"{one}: paper", "ours") if one in paired else (one,)))]
        lines = [
            [
                titles[row],
                *(
                    text
                    for one in columns
                    for text in ([paper(row, one, False)] if one in paired else []) + [ours(row, one)]
                ),
            ]
            for row in settings
        ]
    else:
        stated = any(of != {None} for of in papers.values())
        heads = ["", *(["paper"] if stated else []), *([titles[row] for row in settings] if settings[1:] else ["ours"])]
        lines = [
            [one, *([paper(settings[0], one)] if stated else []), *(ours(row, one) for row in settings)]
            for one in columns
        ]
        caption = caption if settings[1:] else f"{titles[settings[0]]}: {caption}"
    notes = [f"{sign} {flag}" for flag, sign in marks.items()]
    return NumberTable(caption, words, heads, lines, notes)


def _short(row: str, readings: Collection[str]) -> str:
    """Shorten the name of a row: the caption has the measure, and a single reading needs no name."""
    short = next((row.removesuffix(suffix) for suffix in SUFFIXES if row.endswith(suffix)), row)
    return short.removesuffix(f"; {next(iter(readings))}") if len(readings) == 1 else short


def _marks(flags: Sequence[str]) -> dict[str, str]:
    """Return a sign for each flag: a number, or "all:" if all cells share one flag, which then needs no sign."""
    found = [flag for flag in dict.fromkeys(flags) if flag]
    if len(set(flags)) == 1:
        return dict.fromkeys(found, ALL)
    return {flag: f"({number})" for number, flag in enumerate(found, 1)}


def _ours(cell: CellRecord | None, scoring: str, marks: Mapping[str, str]) -> str:
    found = None if cell is None else _scored(cell, scoring)
    if cell is None or found is None:
        return ""
    sign = "" if cell.is_baseline else marks.get(found.flag, "")
    return f"{interval_shown(found.ours, cell.metric)}{f' {sign}' if sign and sign != ALL else ''}"


def _paper(cell: CellRecord | None, with_interval: bool) -> str:
    if cell is None or cell.paper is None:
        return ""
    half = f" ± {shown(cell.paper_interval, cell.metric)}" if cell.paper_interval and with_interval else ""
    return f"{shown(cell.paper, cell.metric)}{half}"


def scorings_of(record: ReproductionRecord) -> list[str]:
    """Return each scoring with its description."""
    return list(dict.fromkeys(f"{one.name}: {one.words}" for of in record.cells for one in of.scorings))


def mark(verdict: Verdict | str) -> str:
    """Return a verdict with its sign.

    >>> mark("holds in part")
    '◐ in part'
    """
    return f"{MARKS[verdict]} {verdict.removeprefix('holds ') if verdict != 'holds' else verdict}"


def rounded(number: float, metric: str) -> str:
    """Format a number for a sentence: accuracies with one digit, losses with three.

    >>> rounded(92.13, "accuracy"), rounded(0.15449, "loss")
    ('92.1', '0.154')
    """
    return f"{number:.{1 if metric in (*POINTS, 'step_times_curvature') else 3}f}" if isfinite(number) else "not finite"


def effect_shown(effect: EffectRecord | None, ranged: bool = True) -> str:
    """Format the size of a difference, positive in the direction of the claim, in points of accuracy or as a loss.

    The size is the mean over comparisons, followed by their range if there are several.
    """
    if effect is None:
        return ""
    found, digits = effect.difference, _digits(effect)
    if not isfinite(found.mean):
        return "not finite"
    signed = lambda number: f"{number:+.{digits}f}".replace("-", MINUS)
    half = f" ± {found.half:.{digits}f}" if found.half else ""
    ends = f" (of {effect.num_contrasts}: {signed(effect.least)} to {signed(effect.most)})"
    return f"{signed(found.mean)}{half}{_unit(effect)}{ends if ranged and effect.num_contrasts > 1 else ''}"


def _digits(effect: EffectRecord) -> int:
    found = effect.difference
    if effect.metric in POINTS:
        return 2 if abs(found.mean) < 0.1 or (found.half or 1.0) < 0.05 else 1
    return 3 if abs(found.mean) >= 0.05 else 4


def _unit(effect: EffectRecord) -> str:
    return " points" if effect.metric in POINTS else f" in {MEASURES.get(effect.metric, effect.metric)}"


def effect_range(effects: Sequence[EffectRecord | None]) -> str:
    """Format the range of the effects of several readings, or the only one with its interval."""
    found = sorted((one for one in effects if one is not None), key=lambda one: one.difference.mean)
    if len(found) < 2:
        return effect_shown(found[0], ranged=False) if found else ""
    digits = min(map(_digits, found))
    least, most = (f"{one.difference.mean:+.{digits}f}".replace("-", MINUS) for one in (found[0], found[-1]))
    return f"{least if least == most else f'{least} to {most}'}{_unit(found[0])}"


def verdicts_by_reading(record: ReproductionRecord, scoring: str = "") -> NumberTable | None:
    """Tabulate the sign of the verdict and the effect, with a row per claim and a column per reading.

    Uses the first scoring unless one is given. Returns None for a single reading without further scorings.
    """
    if not scoring and len(record.readings) == 1:
        return None
    rows = []
    for claim in record.claims:
        found = {}
        for one in claim.judged:
            if one.scoring == scoring or (not scoring and one.reading not in found):
                found[one.reading] = f"{MARKS[one.verdict]} {effect_shown(one.effect, ranged=False)}".strip()
        if found:
            rows.append([claim.words, *(found.get(reading.name, "") for reading in record.readings)])
    heads = ["claim", *(f"({one.name})" if one.excluded else one.name for one in record.readings)]
    notes = ["readings in parentheses do not count"] if any(one.excluded for one in record.readings) else []
    return NumberTable("Verdicts by reading", scoring, heads, rows, notes) if rows else None


def claim_lines(claims: Sequence[ClaimRecord]) -> Iterator[str]:
    """Yield a line for each claim: its verdict, its words, the effect and the reason."""
    for claim in claims:
        found = "; ".join(filter(None, (effect_shown(claim.effect), claim.reason)))
        yield f"{mark(claim.verdict):16}{claim.words} ({claim.place}){': ' if found else ''}{found}"


def comparisons(claim: ClaimRecord) -> Iterator[tuple[str, str, str]]:
    """Yield every comparison of a claim: its words, the paired difference and the verdict."""
    readings, scorings = ({getattr(one, of) for one in claim.judged} for of in ("reading", "scoring"))
    for judged in claim.judged:
        several = (judged.reading if len(readings) > 1 else "", judged.scoring if len(scorings) > 1 else "")
        where = ", ".join(filter(None, several))
        for one in judged.contrasts:
            name = one.name.removeprefix(f"{judged.reading}: ")  # the row may have the name of the reading
            yield f"{where}: {name}" if where else name, difference_shown(one), mark(one.verdict)
