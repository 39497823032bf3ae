"""The page of a report on one or several runs."""

from collections.abc import Iterator, Sequence

from personax.experiment.control import endings
from personax.experiment.divergence import warnings
from personax.report import classes, figures, tables, tuning
from personax.report.document import (
    Block,
    Bullets,
    Facts,
    Folded,
    PageSection,
    Paragraph,
    Preformatted,
    Subtitle,
    document,
)
from personax.report.figures import Figure
from personax.report.runs import ReportedRun, Score, algorithm_labels, scores_of
from personax.report.steps import steps
from personax.report.words import facts, verdict


def render(runs: Sequence[ReportedRun]) -> str:
    """Render the page."""
    scores = scores_of(runs)
    metrics = list(
        dict.fromkeys([run.record.headline for run in runs] + [m for run in runs for m in run.record.metrics])
    )
    named = runs[0].label if len(runs) == 1 else f"{len(runs)} runs: {' · '.join(run.label for run in runs)}"
    about = Facts(facts(runs[0].record)) if len(runs) == 1 else tables.facts(runs)
    source = "the results.json, clients.parquet and config.toml of a run"
    return document(named, about, list(_sections(runs, scores, metrics)), source)


def _sections(runs: Sequence[ReportedRun], scores: Sequence[Score], metrics: Sequence[str]) -> Iterator[PageSection]:
    """Yield the sections in order, without those whose figures are empty."""

    def drawn(anchor: str, title: str, *made: Figure | None) -> Iterator[PageSection]:
        found = [figure for figure in made if figure is not None]
        if found:
            yield PageSection(anchor, title, figures=found)

    yield PageSection("results", "Results", list(_results(runs, scores, metrics)))
    yield PageSection("next", "Next steps", [steps(runs, scores)])
    tuned = list(tuning.blocks(runs))
    if tuned:
        yield PageSection("tuning", "Tuning", tuned, list(tuning.figures(runs, scores)))
    yield from drawn("curves", "Learning curves", figures.learning_curves(scores, metrics))
    reached = tables.targets(runs)
    if reached is not None:
        yield PageSection("target", "Time to the target", [reached])
    yield from drawn(
        "clients", "Results per client", figures.distribution(scores, metrics), figures.changes(scores, metrics)
    )
    by_class = list(classes.figures(runs, scores))
    if by_class:
        yield PageSection("classes", "Results per class", list(classes.tables(runs, scores)), by_class)
    yield from drawn("mixing", "Mixing weights", *figures.mixing(runs, scores))
    yield from drawn("activity", "Staleness and activity", *figures.activity(runs, scores))
    yield from drawn("stationarity", "Stationarity", figures.stationarity(runs, scores))
    yield from drawn("newcomers", "New clients", figures.newcomers(scores, metrics))
    yield PageSection("federation", "Federation", [block for run in runs for block in _federation(run, len(runs) > 1)])
    yield PageSection("protocols", "What each score measures", [tables.scorings(scores)])
    yield PageSection("cost", "Time and traffic", [tables.cost(runs), tables.COST])
    configs = [Folded(f"config.toml of {run.label}", Preformatted(run.config)) for run in runs]
    yield PageSection("configuration", "Configuration", configs)
    yield PageSection("citations", "Citations", [_citations(runs)])


def _results(runs: Sequence[ReportedRun], scores: Sequence[Score], metrics: Sequence[str]) -> Iterator[Block]:
    """Yield the sentences of findings, the headline tables, and the other metrics folded."""
    for run in runs:
        facts = verdict(run, [score for score in scores if score.run is run], run.record.headline)
        if facts:
            yield Paragraph(facts, "verdict", f"{run.label}." if len(runs) > 1 else "")
        early = endings(run.record)
        if early:
            yield Paragraph(" ".join(early), "words", f"{run.label}." if len(runs) > 1 else "")
        sentences = warnings(run.record)
        if sentences:
            yield Paragraph(" ".join(sentences), "flag", f"{run.label}." if len(runs) > 1 else "")
    headlines = list(dict.fromkeys(run.record.headline for run in runs))
    yield from (tables.headline(runs, scores, metric) for metric in headlines)
    yield tables.notes(runs, scores)
    for metric in metrics:
        if metric not in headlines and any(score.row(metric) is not None for score in scores):
            yield Folded(f"The same table for {metric}", tables.headline(runs, scores, metric))


def _federation(run: ReportedRun, with_name: bool) -> list[Block]:
    about = run.record.federation
    facts = {
        "clients in training": f"{about.num_clients:,}",
        "clients held out": f"{about.num_held_out:,}",
        "training samples": f"{about.num_samples:,}",
        "test samples": f"{about.num_test_samples:,}",
    }
    title = [Subtitle(run.label)] if with_name else []
    return [*title, Facts(facts), Preformatted(about.summary, hanging=True)]


def _citations(runs: Sequence[ReportedRun]) -> Block:
    """List the keys of BibTeX entries with what each is cited for."""
    cited: dict[str, dict[str, None]] = {}
    for label, _, algorithm in algorithm_labels(runs):
        for key in algorithm.citations:
            cited.setdefault(key, {})[label] = None
    for run in runs:
        for key in run.record.federation.citations:
            cited.setdefault(key, {})["the data"] = None
    return Bullets([(key, ", ".join(of)) for key, of in cited.items()]) if cited else Paragraph("None.")
