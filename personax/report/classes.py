"""The section with results per class: a figure and a table for every run that has classes."""

from collections.abc import Iterator, Sequence

import numpy as np

from personax.experiment.records import ClassesRecord
from personax.report.document import Block, Folded, Group, Paragraph, Row, Table, TableCell
from personax.report.figures import Figure
from personax.report.runs import ReportedRun, Score
from personax.report.traces import dots, figure, text
from personax.report.words import number

MOST_OPEN = 12  # tables with more classes are folded
WORDS = (
    "Recall is the share of a class's test samples that are predicted correctly; precision is the share of the "
    "predictions of a class that are correct. Both pool the test samples of all clients and are averaged over seeds. "
    "The means over clients above weight the classes differently."
)
Measured = tuple[Score, ClassesRecord]


def figures(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Iterator[Figure]:
    """Draw recall and precision per class, one figure for each run that has classes."""
    for at, (run, found) in enumerate(_of_runs(runs, scores)):
        names = run.record.federation.schema.classes
        views = []
        for measure in ("recall", "precision"):
            hover = f"{measure} %{{y:.1f}} %, class %{{customdata}}"
            shares = ((score, 100 * _means(getattr(record, measure))) for score, record in found)
            traces = [dots(s.look, s.label, list(enumerate(share.tolist())), hover, names) for s, share in shares]
            view = figure(traces, "class", f"{measure}, %")
            ticks = {"tickvals": list(range(len(names))), "ticktext": list(map(text, names))}
            views.append(view.update_xaxes(range=[-0.5, len(names) - 0.5], **ticks))
        title = "Recall and precision" + (f" of {run.label}" if len(runs) > 1 else "")
        alt = f"Recall of {len(names)} classes, with points for {len(found)} scores."
        yield Figure(f"classes-{at}", title, WORDS, alt, views, {"measure": ["recall", "precision"]})


def tables(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Iterator[Block]:
    """Tabulate the recall per class of each run; the CSV also has the precision."""
    for run, found in _of_runs(runs, scores):
        names = run.record.federation.schema.classes
        heads = [TableCell("Class"), TableCell("test samples"), *(TableCell(score.label) for score, _ in found)]
        shares = [100 * _means(record.recall) for _, record in found]
        rows = []
        for at, name in enumerate(names):
            cells = [TableCell(f"{share[at]:.1f}" if np.isfinite(share[at]) else "–") for share in shares]
            rows.append(Row(TableCell(name), [TableCell(f"{found[0][1].num_samples[at]:,}"), *cells]))
        caption = "Recall of each class, %" + (f": {run.label}" if len(runs) > 1 else "")
        made = Table(caption, heads, [Group(rows)], data=_full_numbers(names, found))
        yield Paragraph(_weakest(names, found), "words")
        yield made if len(names) <= MOST_OPEN else Folded(f"All {len(names)} classes", made)


def _weakest(names: Sequence[str], found: Sequence[Measured]) -> str:
    """Name the class with the lowest recall for each score, in one sentence."""
    said = []
    for score, record in found:
        share = _means(record.recall)
        if np.isfinite(share).any():
            at = int(np.nanargmin(share))
            said.append(f"{names[at]} for {score.label} ({number(float(share[at]), 'accuracy')} %)")
    return f"The class with the lowest recall is {', '.join(said)}." if said else ""


def _of_runs(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Iterator[tuple[ReportedRun, list[Measured]]]:
    """Yield the scores of each run that have results per class."""
    for run in runs:
        found = [(score, score.record.classes) for score in scores if score.run is run]
        kept = [(score, record) for score, record in found if record is not None]
        if kept:
            yield run, kept


def _means(of_classes: Sequence[Sequence[float]]) -> np.ndarray:
    """Average each class over the seeds that have a value; NaN if none has."""
    shares = np.asarray(of_classes, float)
    known = np.isfinite(shares)
    total = np.where(known, shares, 0).sum(axis=1)
    return np.divide(total, known.sum(axis=1), out=np.full(len(shares), np.nan), where=known.any(axis=1))


def _full_numbers(names: Sequence[str], found: Sequence[Measured]) -> list[list[object]]:
    rows: list[list[object]] = [["run", "score", "class", "num_samples", "recall", "precision"]]
    for score, record in found:
        recall, precision = _means(record.recall), _means(record.precision)
        for at, name in enumerate(names):
            measured = (score.run.label, score.label, name, record.num_samples[at])
            rows.append(
                [*measured, *(float(share[at]) if np.isfinite(share[at]) else None for share in (recall, precision))]
            )
    return rows
