"""The papers' claims across all experiments that test them, with the texts of `papers.toml` and their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from jinja2 import StrictUndefined, Template

from personax.report.comparison import MARKS, effect_range, effect_shown, mark, rounded
from personax.report.words import MINUS
from personax.reproduce import EXPERIMENTS
from personax.reproduce.experiment import Experiment, Verdict
from personax.reproduce.judging import overall
from personax.reproduce.outcome import CellRecord, ClaimRecord, CurveRecord, JudgedRecord, ReproductionRecord, shown
from personax.reproduce.papers import FINDINGS, PAPERS, Paper, PaperClaim

Records = Mapping[str, ReproductionRecord]
UNRUN = "not run yet"


class OverviewRow(NamedTuple):
    """A claim as a row of the overview."""

    words: str
    places: str
    verdict: str
    mark: str
    effect: str
    why: str
    is_main: bool
    headline: str

    @property
    def sign(self) -> str:
        """Return the sign of the verdict."""
        return MARKS[self.verdict]


def overview_rows(papers: Mapping[str, Paper], records: Records) -> dict[str, list[OverviewRow]]:
    """Return the claims of each paper, and report all texts that contradict the records together."""
    rows: dict[str, list[OverviewRow]] = {key: [] for key in papers}
    errors = []
    for key, paper in papers.items():
        for claim in paper.claims:
            try:
                rows[key].append(overview_row(claim, records))
            except ValueError as error:
                errors.append(str(error))
    if errors:
        raise ValueError("\n".join(errors))
    return rows


def overview_row(claim: PaperClaim, records: Records) -> OverviewRow:
    """Judge a claim across all experiments that test it."""
    names = [test.partition(": ")[0] for test in claim.tests]
    experiments = [EXPERIMENTS[name](False) for name in names]
    places = [experiment.source.split(", ")[1] for experiment in experiments]
    where = ", ".join(dict.fromkeys(places))
    judged = [_judged(test, records) for test in claim.tests]
    unrun = [f"Not run yet: `personax reproduce {names[at]}`." for at, one in enumerate(judged) if one is None]
    reason = next((one.unavailable for one in experiments if one.unavailable), unrun[0] if unrun else "")
    shown_as = partial(OverviewRow, claim.words, where, is_main=claim.main, headline=claim.headline)
    if reason:
        return shown_as(verdict="not tested", mark=mark("not tested"), effect="", why=reason)
    found = [one for one in judged if one is not None]
    verdict = over_experiments([one.verdict for one in found])
    if verdict != claim.expected:
        raise ValueError(
            f"papers.toml: the records give {verdict!r} for {claim.words!r}, but the sentence about it expects "
            f"{claim.expected!r}. Rewrite the sentence, then update `expected`."
        )
    counted = [counted_of(one, records[name]) for one, name in zip(found, names, strict=True)]
    effects = [effects_shown(one) for one in counted]
    labeled = [f"{label}: {one}" for label, one in zip(claim.labels, effects, strict=False)] or effects
    why = " ".join((filled(claim.why, records), *(_older(one, records) for one in claim.older)))
    sign = mark_of(verdict, *counted)
    sign = f"{sign}, {claim.qualifier}" if claim.qualifier else sign
    return shown_as(verdict=verdict, mark=sign, effect="; ".join(filter(None, labeled)), why=why.strip())


def counted_of(claim: ClaimRecord, record: ReproductionRecord) -> list[JudgedRecord]:
    """Return the claim in each reading that counts, with the first scoring."""
    excluded = {reading.name for reading in record.readings if reading.excluded}
    first = {one.reading: one for one in reversed(claim.judged) if one.reading not in excluded}
    return [one for one in claim.judged if first.get(one.reading) is one]


def mark_of(verdict: str, *tests: Sequence[JudgedRecord]) -> str:
    """Return a verdict with its sign; "in part" becomes "depends on the reading" if a test both holds and fails."""
    split = any({"holds", "does not hold"} <= {one.verdict for one in judged} for judged in tests)
    return f"{MARKS[verdict]} depends on the reading" if split and verdict == "holds in part" else mark(verdict)


def effects_shown(judged: Sequence[JudgedRecord]) -> str:
    """Format the effect of a claim in its readings: a range if the verdicts agree, otherwise one for each verdict."""
    if len(judged) == 1:
        return effect_shown(judged[0].effect)
    groups: dict[str, list[JudgedRecord]] = {}
    for one in judged:
        groups.setdefault(one.verdict, []).append(one)
    texts = []
    for verdict, same in groups.items():
        size = effect_range([one.effect for one in same]) if verdict != "not testable" else ""
        where = f"({'; '.join(one.reading for one in same)})" if len(groups) > 1 else f"over {len(same)} readings"
        sign = MARKS[verdict] if len(groups) > 1 else ""
        texts.append(" ".join(filter(None, (sign, size, where))))
    return ", ".join(texts)


def _older(test: str, records: Records) -> str:
    """Return the verdict and effect of an entry of `older`, with what is outdated about its record."""
    name = test.partition(": ")[0]
    judged = _judged(test, records)
    if judged is None:
        return ""
    aged = outdated(records[name], EXPERIMENTS[name](False))
    if not aged:
        raise ValueError(f"papers.toml: the record of {name} is up to date. Move {test!r} from `older` to `tests`.")
    counted = counted_of(judged, records[name])
    return f"{aged}: {mark_of(judged.verdict, counted)}, {effects_shown(counted) or judged.reason}."


def outdated(record: ReproductionRecord, experiment: Experiment) -> str:
    """Describe how a record differs from its experiment; an empty text if it does not.

    It differs in the precision of matrix products, in the first scoring of a cell, or by missing baselines.
    """
    stated = {(cell.row, cell.column): cell for cell in experiment.cells}
    now = {place: next(iter(cell.scorings)) for place, cell in stated.items()}
    then = {(cell.row, cell.column): cell.scorings[0].name for cell in record.cells}
    other = dict.fromkeys(f'"{then[place]}" instead of "{now[place]}"' for place in then if then[place] != now[place])
    parts = [] if record.precision == "float32" else [record.precision.upper()]
    parts += [f"scored with {' and '.join(other)}"] if other else []
    missing = any(cell.is_baseline and place not in then for place, cell in stated.items())
    parts += ["no baselines"] if missing else []
    return f"Old record ({', '.join(parts)})" if parts else ""


def _judged(test: str, records: Records) -> ClaimRecord | None:
    """Return the recorded claim that an entry of `tests` names; None if it was not run."""
    name, _, words = test.partition(": ")
    if words not in {claim.words for claim in EXPERIMENTS[name](False).claims}:
        raise ValueError(f"papers.toml: {name} has no claim {words!r}. Copy its words from personax/reproduce.")
    return next((one for one in records[name].claims if one.words == words), None) if name in records else None


def over_experiments(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine the verdicts of several experiments, ignoring `not testable` unless there is nothing else."""
    return overall([one for one in verdicts if one != "not testable"] or verdicts)


def with_numbers(paper: Paper, records: Records) -> Paper:
    """Fill the summary and findings of a paper with numbers from the records."""
    findings = [filled(text, records) for text in paper.findings]
    return replace(paper, summary=filled(paper.summary, records), findings=findings)


def filled(text: str, records: Records, name: str = "") -> str:
    """Fill a text of `papers.toml` or `findings.toml` with numbers from the records: see `_RecordNumbers`.

    `here(row, column)` and `lead(row, better, worse)` are `ours` and `gap` in the experiment `name`.
    """
    numbers = _RecordNumbers(records)
    names = {
        one: getattr(numbers, one) for one in ("ours", "paper", "gap", "effect", "alongside", "per_round", "ratio")
    }
    here = {"here": partial(numbers.ours, name), "lead": partial(numbers.gap, name)} if name else {}
    return Template(text, undefined=StrictUndefined).render(**names, **here)


def findings_of(record: ReproductionRecord, records: Records) -> list[str]:
    """Return the findings about an experiment, without those that need records that are not given."""
    texts = (filled(text, records, record.name) for text in FINDINGS.get(record.name, ()))
    return [text for text in texts if UNRUN not in text]


def why_of(record: ReproductionRecord, claim: ClaimRecord) -> str:
    """Return the sentence of `papers.toml` about a claim, if it is about this claim alone and its verdict."""
    test = f"{record.name}: {claim.words}"
    stated = (one for paper in PAPERS.values() for one in paper.claims if one.tests == [test])
    texts = [filled(one.why, {record.name: record}) for one in stated if one.expected == claim.verdict]
    return next((text for text in texts if UNRUN not in text), "")


class _RecordNumbers:
    """Functions that texts call, for instance `ours("fallah-table1", "MNIST, 4 steps, 0.01", "FedAvg + update")`."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def ours(self, name: str, row: str, column: str, scoring: str = "") -> str:
        """The mean of a cell with its first scoring, or with another one."""
        found = self._cell(name, row, column)
        return UNRUN if found is None else rounded(float(np.mean(_of_seeds(found, scoring))), found.metric)

    def paper(self, name: str, row: str, column: str) -> str:
        """The paper's number of a cell."""
        found = self._cell(name, row, column)
        return UNRUN if found is None else "–" if found.paper is None else shown(found.paper, found.metric)

    def gap(self, name: str, row: str, better: str, worse: str, scoring: str = "") -> str:
        """The mean of one column of a row minus that of another."""
        one, other = self._cell(name, row, better), self._cell(name, row, worse)
        if one is None or other is None:
            return UNRUN
        difference = float(np.mean(_of_seeds(one, scoring)) - np.mean(_of_seeds(other, scoring)))
        return rounded(difference, one.metric).replace("-", MINUS)

    def alongside(self, name: str, row: str, column: str, other: str) -> str:
        """The mean of a column of a row at the time, in seconds, when the training of another one ends."""
        one, end = self._curve(name, row, column), self._curve(name, row, other)
        if one is None or end is None:
            return UNRUN
        return rounded(float(np.interp(end.seconds[-1], one.seconds, np.mean(one.of_seeds, axis=1))), "accuracy")

    def per_round(self, name: str, row: str, column: str) -> str:
        """The milliseconds of a round."""
        found = self._curve(name, row, column)
        return UNRUN if found is None else f"{1000 * _seconds_per_round(found):.2f}"

    def ratio(self, name: str, row: str, column: str, other: str) -> str:
        """The duration of a round of one column over that of another one."""
        one, end = self._curve(name, row, column), self._curve(name, row, other)
        return UNRUN if one is None or end is None else f"{_seconds_per_round(one) / _seconds_per_round(end):.1f}"

    def _curve(self, name: str, row: str, column: str) -> CurveRecord | None:
        found = self._cell(name, row, column)
        return None if found is None else found.curve

    def effect(self, name: str, words: str, reading: str = "") -> str:
        """The size of a claim's difference, in its first testable reading or in another one."""
        judged = _judged(f"{name}: {words}", self.records)
        if judged is None:
            return UNRUN
        found = next((one.effect for one in judged.judged if one.reading == reading), judged.effect)
        return effect_shown(found, ranged=False).removeprefix("+")

    def _cell(self, name: str, row: str, column: str) -> CellRecord | None:
        known = self.records[name].cells if name in self.records else []
        found = next((one for one in known if (one.row, one.column) == (row, column)), None)
        if found is None and (row, column) not in {(cell.row, cell.column) for cell in EXPERIMENTS[name](False).cells}:
            raise ValueError(f"papers.toml: {name} has no cell ({row!r}, {column!r}). Copy its row and column.")
        return found


def _seconds_per_round(curve: CurveRecord) -> float:
    return curve.seconds[-1] / curve.rounds[-1]


def _of_seeds(cell: CellRecord, scoring: str) -> list[float]:
    return next(one.of_seeds for one in cell.scorings if one.name == scoring or not scoring)
