"""The section on tuning: the trials, their validation scores, and the chosen options."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import plotly.graph_objects as go

from personax.experiment.records import TrialRecord, TunedAlgorithm, TuningRecord
from personax.report.document import Block, Folded, Group, Paragraph, Row, Table, TableCell, table
from personax.report.figures import Figure
from personax.report.runs import GRAYS, Look, ReportedRun, Score
from personax.report.traces import dots, figure
from personax.report.words import is_share, number, unit

CHOSEN = Look(GRAYS["global"][0], "solid", "circle-open")
LOGARITHMIC = 8.0  # use a logarithmic axis if an option's values span at least this factor


def blocks(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    """Yield the description, the chosen options and all trials of each tuned run."""
    for run in runs:
        if run.record.tuning is not None:
            yield from _of_run(run.label if len(runs) > 1 else "", run.record.tuning)


def _of_run(label: str, record: TuningRecord) -> Iterator[Block]:
    seeds = ", ".join(map(str, record.seeds))
    words = (
        f"Each trial left out {100 * record.share:.0f} % of every client's training data and was scored on it "
        f"(validation data, split with seed {record.seed}); test data was not used. Scores are means over the "
        f"seeds {seeds}."
    )
    yield Paragraph(words, "words", f"{label}." if label else "")
    rows = [_choice(one) for one in record.algorithms]
    heads = [TableCell(head, "text") for head in ("Algorithm", "chosen", "score", "before", "score", "tried")]
    yield Table("The chosen options", heads, [Group(rows)], data=_full_numbers(record))
    for one in record.algorithms:
        yield from (Paragraph(warning, "flag") for warning in one.warnings)
    for one in record.algorithms:
        yield Folded(f"All trials of {one.algorithm}", _trials(one))


def _choice(one: TunedAlgorithm) -> Row:
    """Make the row of an algorithm: its chosen options beside its original ones."""
    some = f" of {one.num_combinations}" if len(one.trials) < one.num_combinations else ""  # a grid may be extended
    tried = f"{len(one.trials)}{some}, {one.search}"
    cells = [
        TableCell(_options(one.chosen), "text"),
        TableCell(_score(one.of(one.chosen), one.metric)),
        TableCell(_options(one.before), "text"),
        TableCell(_score(one.of(one.before), one.metric)),
        TableCell(tried, "text"),
    ]
    return Row(TableCell(one.algorithm, small=[f"by {one.metric}"]), cells)


def _trials(one: TunedAlgorithm) -> Table:
    """Tabulate all trials in order."""
    names = list(dict.fromkeys(name for trial in one.trials for name in trial.options))
    rows = []
    for trial in one.trials:
        options = [TableCell(_value(trial.options.get(name))) for name in names[1:]]
        kind = "best" if trial.options == one.chosen else ""
        small = ["chosen"] if trial.options == one.chosen else []
        score = TableCell(_score(trial, one.metric), "mean")
        rows.append(Row(TableCell(_value(trial.options.get(names[0])), small=small), [*options, score], kind))
    heads = (*names, f"validation {one.metric}{unit(one.metric)}")
    return table(f"Trials of {one.algorithm}: {one.words}", heads, rows)


def figures(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Iterator[Figure]:
    """Draw the validation scores over the values of each numeric option, for each tuned run."""
    for at, run in enumerate(runs):
        record = run.record.tuning
        if record is None:
            continue
        looks = {score.algorithm.name: score.look for score in reversed(scores) if score.run is run}
        tried = [one for one in record.algorithms if one.algorithm in looks]
        names = dict.fromkeys(name for one in tried for trial in one.trials for name in trial.options)
        views = {name: _view(name, tried, looks) for name in names}
        shown = {name: view for name, view in views.items() if view is not None}
        if shown:
            words = "Each point is a trial, scored on validation data; rings mark the chosen trials."
            alt = "Validation scores over the values of the options."
            title = "Validation scores" + (f" of {run.label}" if len(runs) > 1 else "")
            yield Figure(f"tuning-{at}", title, words, alt, list(shown.values()), {"option": list(shown)})


def _view(name: str, tried: Sequence[TunedAlgorithm], looks: Mapping[str, Look]) -> go.Figure | None:
    """Draw the scores over one option; None if it has fewer than two numeric values."""
    traces, chosen, values = [], dict[str, tuple[float, float]](), []
    for one in tried:
        points = [(trial, at) for trial in one.trials if (at := _place(trial, name, one.metric)) is not None]
        texts = [_options(trial.options) for trial, _ in points]
        if points:
            hover = "%{y:.4~g} with %{customdata}"
            traces.append(dots(looks[one.algorithm], one.algorithm, [at for _, at in points], hover, texts))
        values += [at[0] for _, at in points]
        chosen |= {f"{one.algorithm}: {_options(one.chosen)}": at for t, at in points if t.options == one.chosen}
    if len(set(values)) < 2:
        return None
    if chosen:
        ring = dots(CHOSEN, "chosen", list(chosen.values()), "%{y:.4~g}, %{customdata}", list(chosen))
        traces.append(ring.update(marker={"size": 15}))
    metrics = dict.fromkeys(one.metric + (", %" if is_share(one.metric) else "") for one in tried)
    view = figure(traces, name, f"validation {' or '.join(metrics)}")
    if min(values) > 0 and max(values) > LOGARITHMIC * min(values):
        view.update_xaxes(type="log")
    return view


def _place(trial: TrialRecord, name: str, metric: str) -> tuple[float, float] | None:
    """Return the position of a trial in the figure; None if it diverged or the option is not a number."""
    value = trial.options.get(name)
    if trial.score is None or isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value), trial.score * (100 if is_share(metric) else 1)


def _score(trial: TrialRecord | None, metric: str) -> str:
    if trial is None:
        return "not tried"
    return "diverged" if trial.score is None else f"{number(trial.score, metric)}{unit(metric)}"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_value(value)}" for name, value in options.items()) or "–"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def _full_numbers(record: TuningRecord) -> list[list[object]]:
    """Return all trials of all algorithms, for the CSV."""
    rows: list[list[object]] = [["algorithm", "metric", "options", "score", "of_seeds", "chosen"]]
    for one in record.algorithms:
        for trial in one.trials:
            of_seeds = " ".join(map(repr, trial.of_seeds))
            is_chosen = trial.options == one.chosen
            rows.append([one.algorithm, one.metric, json.dumps(trial.options), trial.score, of_seeds, is_chosen])
    return rows
