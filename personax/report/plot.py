"""Figures for notebooks, `px.plot`, drawn from run folders or from a `Comparison` in memory.

Each function returns a Plotly figure: one view of a figure that the report shows with selectors.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from personax.evaluation.scores import Comparison
from personax.experiment.results import client_rows
from personax.experiment.summaries import evaluation_record, headline_of, score_record
from personax.report import figures
from personax.report.clients import Clients
from personax.report.runs import GRAYS, PALETTE, SYMBOLS, Look, Score, read_runs, scores_of
from personax.report.words import ROLES
from personax.values import require_one_of, unknown_name

__all__ = ["clients", "curves", "gains", "staleness"]


def curves(*runs: Path | str, metric: str | None = None, against: str = "rounds") -> go.Figure:
    """Plot learning curves of run folders: means over clients against "rounds", "virtual time", "seconds" or "bytes".

    >>> px.plot.curves("runs/people", against="seconds").show()  # doctest: +SKIP
    """
    require_one_of("against", against, tuple(figures.AXES))
    return _view(figures.learning_curves(*_given(runs, metric)), against=against)


def clients(*runs: Path | str | Comparison, metric: str | None = None) -> go.Figure:
    """Plot the values of single clients in ascending order, one curve per score.

    >>> px.plot.clients("runs/people", metric="loss").show()  # doctest: +SKIP
    """
    return _view(figures.distribution(*_given(runs, metric)))


def gains(
    *runs: Path | str | Comparison, metric: str | None = None, against: str | None = None, score: str | None = None
) -> go.Figure:
    """Plot each client's gain or loss against the shared model ("global") or local training ("local").

    With `score`, each of its clients is a bar. By default, `against` is "global" if that baseline exists.

    >>> px.plot.gains("runs/people", against="local", score="APFL").show()  # doctest: +SKIP
    """
    found = figures.changes(*_given(runs, metric))
    if found is None:
        raise ValueError("No baseline to compare with. Give runs of `personax compare`, which trains both baselines.")
    if against is not None:
        require_one_of("against", against, tuple(ROLES))
    return _view(found, against=None if against is None else ROLES[against], score=score)


def staleness(*runs: Path | str) -> go.Figure:
    """Plot the staleness of asynchronous updates, in versions of the shared model.

    >>> px.plot.staleness("runs/people").show()  # doctest: +SKIP
    """
    read = read_runs([Path(run) for run in runs])
    found = next((one for one in figures.activity(read, scores_of(read)) if one.name == "staleness"), None)
    if found is None:
        raise ValueError("No algorithm of these runs is asynchronous. Give runs with an asynchronous algorithm.")
    return _view(found)


def _given(runs: Sequence[Path | str | Comparison], metric: str | None) -> tuple[list[Score], list[str]]:
    """Return the scores of run folders or of one comparison, and the requested or headline metric."""
    compared = [run for run in runs if isinstance(run, Comparison)]
    if compared and len(runs) > 1:
        raise ValueError("Give run folders, or one comparison.")
    if compared:
        scores, known = _of_comparison(compared[0]), compared[0].metrics
    else:
        read = read_runs([Path(run) for run in runs if not isinstance(run, Comparison)])
        scores, known = scores_of(read), list(dict.fromkeys(name for run in read for name in run.record.metrics))
    if metric is not None and metric not in known:
        raise ValueError(unknown_name("the run", metric, known, "metric"))
    return scores, [headline_of(known) if metric is None else metric]


def _of_comparison(comparison: Comparison) -> list[Score]:
    """Convert the scores of a comparison to the form that client figures read."""
    made = []
    for at, (name, found) in enumerate(comparison.evaluations.items()):
        role = {comparison.local: "local", comparison.shared: "global"}.get(name, "")
        color = GRAYS[role][0] if role else PALETTE[at % len(PALETTE)][0]
        look = Look(color, "dash" if role else "solid", SYMBOLS[at % len(SYMBOLS)])
        names = [f"client {one}" for one in found.clients.ravel().tolist()]
        seeds = range(found.clients.size // found.clients.shape[-1])
        rows = client_rows((comparison.algorithms.get(name, name), name), seeds, found, names)
        record = score_record(name, found.scoring, [evaluation_record(found, 0, 0.0)], None)
        run: Any = comparison  # client figures only check that scores belong to the same run
        algorithm: Any = None
        made.append(Score(name, name, run, algorithm, record, Clients(rows), role, look))
    return made


def _view(found: figures.Figure, **chosen: str | None) -> go.Figure:
    """Return the view that these choices select; the default is the first option."""
    at = []
    for name, offered in found.choices.items():
        wanted = chosen.get(name) or offered[0]
        require_one_of(name, wanted, tuple(offered))
        at.append(offered.index(wanted))
    sizes = [len(offered) for offered in found.choices.values()]
    place = int(np.ravel_multi_index(at, sizes)) if at else 0
    return go.Figure(found.views[place]).update_layout(template="plotly_white", title=found.title)
