"""The papers' claims across all experiments that test them, with the texts of `papers.toml` and their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jinja2 import StrictUndefined, Template

from personax.report.comparison import MARKS, effect_shown, rounded
from personax.reproduce import EXPERIMENTS
from personax.reproduce.experiment import Verdict
from personax.reproduce.judging import overall
from personax.reproduce.outcome import CellRecord, ClaimRecord, ReproductionRecord, shown
from personax.reproduce.papers import Paper, PaperClaim

Records = Mapping[str, ReproductionRecord]
UNRUN = "not run yet"


class OverviewRow(NamedTuple):
    """A claim as a row of the overview."""

    words: str
    places: str
    verdict: str
    effect: str
    why: str
    is_main: bool

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
    if reason:
        return OverviewRow(claim.words, where, "not tested", "", reason, claim.main)
    found = [one for one in judged if one is not None]
    verdict = over_experiments([one.verdict for one in found])
    if verdict != claim.expected:
        raise ValueError(
            f"papers.toml: the records give {verdict!r} for {claim.words!r}, but the sentence about it expects "
            f"{claim.expected!r}. Rewrite the sentence, then update `expected`."
        )
    effects = [effect_shown(one.effect, ranged=len(found) == 1) for one in found]
    texts = [
        effect if len(set(places)) == 1 else f"{place}: {effect}"
        for place, effect in zip(places, effects, strict=True)
        if effect
    ]
    return OverviewRow(claim.words, where, verdict, "; ".join(texts), filled(claim.why, records), claim.main)


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


def filled(text: str, records: Records) -> str:
    """Fill a text of `papers.toml` with numbers from the records.

    `{{ ours("fallah-table1", "MNIST, 4 steps, 0.01", "FedAvg + update") }}` is the mean of a cell, `paper(...)` the
    paper's number there, and `effect("fallah-table1", "words of a claim")` the size of a claim's difference.
    """

    def cell_of(name: str, row: str, column: str) -> CellRecord | None:
        found = (
            [one for one in records[name].cells if (one.row, one.column) == (row, column)] if name in records else []
        )
        if not found and (row, column) not in {(cell.row, cell.column) for cell in EXPERIMENTS[name](False).cells}:
            raise ValueError(f"papers.toml: {name} has no cell ({row!r}, {column!r}). Copy its row and column.")
        return found[0] if found else None

    def ours(name: str, row: str, column: str) -> str:
        found = cell_of(name, row, column)
        return UNRUN if found is None else rounded(found.scorings[0].ours.mean, found.metric)

    def paper(name: str, row: str, column: str) -> str:
        found = cell_of(name, row, column)
        return UNRUN if found is None else "–" if found.paper is None else shown(found.paper, found.metric)

    def effect(name: str, words: str) -> str:
        judged = _judged(f"{name}: {words}", records)
        return UNRUN if judged is None else effect_shown(judged.effect, ranged=False).removeprefix("+")

    return Template(text, undefined=StrictUndefined).render(ours=ours, paper=paper, effect=effect)
