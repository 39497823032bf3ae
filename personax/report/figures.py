"""The figures of a report, as Plotly graph objects with captions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import unescape
from itertools import pairwise, product
from typing import Any, NamedTuple, Protocol

import numpy as np
import plotly.graph_objects as go

from personax.evaluation.scores import higher_is_better
from personax.experiment.records import EvaluationRecord, ScoreRecord
from personax.report.clients import MOST_POINTS, Clients, Sorted, thinned
from personax.report.focus import focus, is_logarithmic
from personax.report.runs import Look, ReportedRun, Score, algorithm_labels
from personax.report.traces import band_and_line, bars, figure, signed_bars, sorted_line, spread_lines, steps, thin_line
from personax.report.words import ROLES, is_share

AXES: dict[str, tuple[str, Callable[[EvaluationRecord], float]]] = {
    "rounds": ("round", lambda e: e.round),
    "virtual time": ("virtual time", lambda e: float(np.mean(e.time))),
    "seconds": ("wall-clock seconds", lambda e: e.seconds),
    "bytes": ("megabytes sent up and down", lambda e: float(np.mean(e.bytes_up) + np.mean(e.bytes_down)) / 1e6),
}
WHY_LOGARITHMIC = "The time axis is logarithmic if some runs are much shorter than others; it then omits time 0."
MOST_BARS = 40
LEAST_POINTS, ALL_POINTS = 60, 2400  # points of one score at least, and about those of all scores in a client figure
IN_ORDER, IN_FULL = "share of clients, %", [-1, 101]


@dataclass(frozen=True, eq=False)
class Figure:
    """A figure with its text. `choices` are the options of its selectors, with one view for each combination.

    `alt` describes the figure for screen readers; the page adds the numbers.
    """

    name: str
    title: str
    words: str
    alt: str
    views: list[go.Figure]
    choices: dict[str, list[str]] = field(default_factory=dict)


class Drawn(Protocol):
    """The part of a score that its curves need; a running experiment has no more than this."""

    @property
    def label(self) -> str: ...
    @property
    def look(self) -> Look: ...
    @property
    def record(self) -> ScoreRecord: ...
    @property
    def clients(self) -> Clients | None: ...
    @property
    def diverged(self) -> str: ...


def axes_of(scores: Sequence[Drawn]) -> list[str]:
    """Return the axes that all curves have: bytes only where they were counted."""
    counted = all(one.bytes_up for score in scores for one in score.record.evaluations)
    return [axis for axis in AXES if axis != "bytes" or counted]


class CurveView(NamedTuple):
    """Curves of one metric along one axis; `outside` names those outside the initial zoom, if there is one."""

    drawn: go.Figure
    outside: list[str] | None
    logarithmic: bool


def learning_curves(scores: Sequence[Drawn], metrics: Sequence[str]) -> Figure:
    """Draw means over clients during training, with bands over seeds, zoomed to the part where methods differ."""
    axes = axes_of(scores)
    views = [_curves(scores, metric, axis) for metric, axis in product(metrics, axes)]
    words = (
        "Mean over clients. Lines are means over seeds, bands their 95 % t-intervals; a single seed has no band. One "
        "round of an asynchronous algorithm is a cohort's worth of updates. Virtual time is the simulated clock, "
        "averaged over seeds. Wall-clock seconds cover all seeds together, without compilation."
    )
    if any(view.logarithmic for view in views):
        words += f" {WHY_LOGARITHMIC}"
    if any(view.outside is not None for view in views):
        words += " The figure is zoomed to the last third of the curves; `Show all` shows the rest."
    outside = dict.fromkeys(name for view in views for name in view.outside or ())
    if outside:
        words += f" Far outside this part in at least one view: {', '.join(outside)}."
    if any(score.diverged for score in scores):
        words += " Seeds that diverged are left out; if all diverged, the line shows those that lasted longest."
    alt = f"Learning curves of {_many(scores)}: mean {metrics[0]} over rounds, virtual time, seconds or bytes."
    choices = {"metric": list(metrics), "against": axes}
    return Figure("curves", "Learning curves", words, alt, [view.drawn for view in views], choices)


def _curves(scores: Sequence[Drawn], metric: str, axis: str) -> CurveView:
    """Draw the curves of one metric."""
    (title, at), traces = AXES[axis], []
    for score in scores:
        texts = [e for e in score.record.evaluations if metric in e.mean]
        texts = [texts[i] for i in thinned(len(texts))]
        x, y = [at(e) for e in texts], [e.mean[metric] for e in texts]
        traces += band_and_line(score.look, score.label, x, y, metric) if texts else []
    view = figure(traces, title, f"mean {metric}{_percent(metric)}")
    lines = [trace for trace in traces if trace.hoverinfo != "skip"]
    found = focus(lines, metric)
    if found is not None:
        view.update_yaxes(range=[found.low, found.high])
    logarithmic = axis != "rounds" and _shorten(view, lines)
    return CurveView(view, None if found is None else [unescape(name) for name in found.outside], logarithmic)


def _shorten(view: go.Figure, lines: Sequence[Any]) -> bool:
    """Make the time axis logarithmic if a linear one would hide short runs, such as asynchronous ones."""
    logarithmic = is_logarithmic([line.x[-1] or 0.0 for line in lines])
    if logarithmic:
        layout: Any = view.layout
        view.update_xaxes(type="log", title={"text": f"{layout.xaxis.title.text}, logarithmic"})
    return logarithmic


def distribution(scores: Sequence[Drawn], metrics: Sequence[str]) -> Figure:
    """Draw the sorted values of single clients."""
    views = []
    for metric in metrics:
        having = ((score, score.clients) for score in scores)
        found = [(score, clients.sorted(metric, _points(scores))) for score, clients in having if clients is not None]
        traces = [sorted_line(score.look, score.label, numbers, metric) for score, numbers in found if numbers]
        views.append(figure(traces, IN_ORDER, f"{metric}{_percent(metric)}").update_xaxes(range=IN_FULL))
    words = (
        "Each client's mean over seeds at the end of the run, in ascending order: a tenth of the clients are at or "
        "below the value at 10 %."
    )
    alt = f"Sorted {metrics[0]} of every client, one curve for each of {_many(scores)}."
    return Figure("clients", "How clients differ", words, alt, views, {"metric": list(metrics)})


def deciles(scores: Sequence[Drawn], metrics: Sequence[str]) -> Figure:
    """Draw the spread of the clients during training, one score at a time."""
    views = []
    for metric, score in product(metrics, scores):
        found = [one for one in score.record.evaluations if metric in one.mean]
        found = [found[i] for i in thinned(len(found))]
        ends = {"mean": "mean", "worst tenth": "worst_decile", "best tenth": "best_decile"}
        numbers = {name: [getattr(one, end)[metric] for one in found] for name, end in ends.items()}
        traces = spread_lines(score.look, score.label, [one.round for one in found], numbers, metric) if found else []
        views.append(figure(traces, "round", f"{metric}{_percent(metric)}"))
    words = "The mean over all clients, the worst tenth and the best tenth, averaged over seeds."
    alt = f"Means over all clients, the worst tenth and the best tenth over rounds, for {_many(scores)}."
    choices = {"metric": list(metrics), "score": [score.label for score in scores]}
    return Figure("deciles", "How far apart clients are", words, alt, views, choices)


def changes(scores: Sequence[Score], metrics: Sequence[str]) -> Figure | None:
    """Draw each client's gain or loss against the baselines of its run; None without baselines."""
    found: dict[tuple[str, str], list[tuple[Score, Sorted]]] = {}
    for metric, role, score in product(metrics, ("global", "local"), scores):
        pairs = _change(score, role, scores, metric)
        if pairs is not None:
            found.setdefault((metric, role), []).append((score, pairs))
    metrics = [metric for metric in metrics if any(metric == has for has, _ in found)]
    roles = [role for role in ("global", "local") if any(role == has for _, has in found)]
    shown = [score for score in scores if any(score is has for pairs in found.values() for has, _ in pairs)]
    if not shown:
        return None
    views = []
    for metric, role, only in product(metrics, roles, (None, *shown)):
        pairs = found.get((metric, role), [])
        if only is None:
            traces = [sorted_line(score.look, score.label, numbers, metric) for score, numbers in pairs]
        else:
            traces = [bar for score, numbers in pairs if score is only for bar in signed_bars(numbers, metric)]
        points, better = ", points" if is_share(metric) else "", "↑" if higher_is_better(metric) else "↓"
        title = f"change of {metric}{points} ({better} better)"
        views.append(figure(traces, IN_ORDER, title, zeroline=True).update_xaxes(range=IN_FULL))
    choices = {
        "metric": list(metrics),
        "against": [ROLES[role] for role in roles],
        "score": ["all scores", *(score.label for score in shown)],
    }
    words = (
        "Each client's difference from the baseline, averaged over the same seeds, in ascending order. Choose one "
        "score to see its clients individually."
    )
    alt = f"Sorted change of each client's {metrics[0]} against {ROLES[roles[0]]}, for {_many(shown)}."
    return Figure("changes", "Who gains and who loses", words, alt, views, choices)


def mixing(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Iterator[Figure]:
    """Draw the personal number that an algorithm shows (APFL's mixing weight), at the end and during training."""
    at_end, along = [], []
    for label, score in _of_algorithms(runs, scores):
        weights = score.clients.numbers("personal_number")
        if weights is not None:
            num, edges = np.histogram(weights[np.isfinite(weights)], 20, (0, 1))
            middle, part = (edges[1:] + edges[:-1]) / 2, 100 * num / max(num.sum(), 1)
            texts = [f"{low:.2f} to {high:.2f}" for low, high in pairwise(edges)]
            at_end.append(bars(score.look, label, middle, part, "%{y:.1f} % of clients, %{customdata}", texts))
        texts = [(e.round, e.personal_number) for e in score.record.evaluations if e.personal_number]
        if texts:
            along += band_and_line(score.look, label, [at for at, _ in texts], [mix for _, mix in texts], "")
    if at_end:
        view = figure(at_end, "mixing weight (1: only the client's own model)", "clients, %", rangemode="tozero")
        view.update_xaxes(range=[0, 1])
        words = "All clients and seeds at the end of the run."
        yield Figure("mix", "Mixing weights at the end", words, "Histogram of the clients' mixing weights.", [view])
    if along:
        view = figure(along, "round", "mean mixing weight")
        words = "Mean over clients, with a 95 % t-interval over seeds."
        alt = "Mean mixing weight of the clients over rounds."
        yield Figure("mix-curve", "Mixing weights during training", words, alt, [view])


def activity(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Iterator[Figure]:
    """Draw the staleness of updates and the share of active clients, for the first seed."""
    of_algorithms = list(_of_algorithms(runs, scores))
    stale = _staleness([(label, score) for label, score in of_algorithms if score.algorithm.staleness.get("count")])
    if stale:
        view = figure(stale, "staleness, in versions of the shared model", "updates, %", rangemode="tozero")
        words = "The number of versions by which the shared model advanced before an update arrived; first seed."
        yield Figure("staleness", "Staleness", words, "Histogram of the staleness of updates.", [view])
    alike: dict[tuple[float, ...], list[tuple[str, Score]]] = {}
    for label, score in of_algorithms:
        active = score.algorithm.active
        if active.get("time"):
            alike.setdefault((*active["time"], *active["share"]), []).append((label, score))
    if alike:
        lines = list(map(_active, alike.values()))
        view = figure(lines, "virtual time", "active clients, %", rangemode="tozero")
        words = "The share of clients that are training; first seed. Algorithms with the same schedule share a line."
        words += f" {WHY_LOGARITHMIC}" if _shorten(view, lines) else ""
        yield Figure("active", "Active clients", words, "Share of active clients over virtual time.", [view])


def _staleness(found: Sequence[tuple[str, Score]]) -> list[go.Bar]:
    """Draw the share of updates by staleness, in ranges if staleness is large."""
    largest = max((max(score.algorithm.staleness["staleness"]) for _, score in found), default=0)
    width = largest // MOST_BARS + 1
    made = []
    for label, score in found:
        at = np.asarray(score.algorithm.staleness["staleness"]) // width
        num = np.bincount(at, score.algorithm.staleness["count"])
        first = width * np.arange(len(num))
        texts = [str(low) if width == 1 else f"{low} to {low + width - 1}" for low in first]
        part, middle = 100 * num / max(num.sum(), 1), first + (width - 1) / 2
        made.append(bars(score.look, label, middle, part, "%{y:.1f} % of updates, staleness %{customdata}", texts))
    return made


def _active(alike: Sequence[tuple[str, Score]]) -> go.Scatter:
    """Draw the active clients of algorithms with the same schedule."""
    label, score = alike[0]
    time, part = (np.asarray(score.algorithm.active[name]) for name in ("time", "share"))
    at, more = thinned(len(time)), f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    return steps(score.look, f"{label}{more}", time[at], 100 * part[at], "%{y:.1f} % at time %{x:.4~g}")


def stationarity(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Figure | None:
    """Draw squared gradient norms during training with the theorems' bounds; None if they were not measured."""
    traces, texts = [], []
    for label, score in _of_algorithms(runs, scores):
        bound = score.algorithm.bound
        evaluations = [one for one in score.record.evaluations if one.stationarity is not None]
        x = [one.round for one in evaluations]
        values = [one.stationarity for one in evaluations]
        traces += band_and_line(score.look, label, x, values, "squared norm") if values else []
        iterates = [one.iterate_stationarity for one in evaluations]
        if iterates and None not in iterates:
            means = [float(np.nanmean(one)) for one in iterates if one is not None]
            traces.append(thin_line(score.look, f"{label}: random iterates", x, means, "dot"))
        if bound is not None:
            texts.append(f"{label}: {bound.words}.")
            traces.append(thin_line(score.look, f"{label}: the bound", bound.rounds, bound.values, "dash"))
    if not traces:
        return None
    words = (
        "The squared gradient norm of the clients' mean objective, at the server's models (solid) and at an iterate "
        "drawn at random in each round (dotted), whose average the theorems bound (Fallah Remark 4.7). "
        f"{' '.join(texts)}"
    )
    alt = "Squared gradient norms over rounds, on a logarithmic scale."
    drawn = figure(traces, "round", "squared gradient norm", type="log")
    return Figure("stationarity", "Stationarity", words, alt, [drawn])


def newcomers(scores: Sequence[Score], metrics: Sequence[str]) -> Figure | None:
    """Draw the scores of held-out clients over adaptation steps; None without held-out clients."""
    having = [(score, score.record.newcomers) for score in scores if score.record.newcomers is not None]
    metrics = [metric for metric in metrics if any(metric in record.mean for _, record in having)]
    if not metrics:
        return None
    views, ticks = [], sorted({step for _, record in having for step in record.steps})
    for metric in metrics:
        traces = []
        for score, record in having:
            if metric in record.mean:
                traces += band_and_line(score.look, score.label, record.steps, record.mean[metric], metric)
        view = figure(traces, "adaptation steps", f"mean {metric}{_percent(metric)}")
        views.append(view.update_xaxes(tickvals=ticks) if len(ticks) <= 12 else view)
    texts: dict[str, list[str]] = {}
    for score, record in having:
        texts.setdefault(record.words.rstrip("."), []).append(score.label)
    words = " ".join(f"{' · '.join(who)}: {what}." for what, who in texts.items())
    alt = f"Mean {metrics[0]} of held-out clients over adaptation steps, for {_many([s for s, _ in having])}."
    return Figure("newcomers", "New clients", words, alt, views, {"metric": metrics})


def _change(score: Score, role: str, scores: Sequence[Score], metric: str) -> Sorted | None:
    """Return the change of a score's clients from a baseline of the same run, if both score the same clients."""
    other = next((s for s in scores if s.run is score.run and s.role == role and s.group == score.group), None)
    return (
        None if other is None or other is score else score.clients.sorted_change(other.clients, metric, _points(scores))
    )


def _points(scores: Sequence[Drawn]) -> int:
    """Return the number of clients to draw per score, which falls with the number of scores to keep pages small."""
    return min(MOST_POINTS, max(LEAST_POINTS, ALL_POINTS // len(scores)))


def _of_algorithms(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Iterator[tuple[str, Score]]:
    """Yield each algorithm's label and its first score, whose look represents the algorithm."""
    for label, _, algorithm in algorithm_labels(runs):
        first = next((score for score in scores if score.algorithm is algorithm), None)
        if first is not None:
            yield label, first


def _percent(metric: str) -> str:
    return ", %" if is_share(metric) else ""


def _many(scores: Sequence[Drawn]) -> str:
    return f"{len(scores)} score{'' if len(scores) == 1 else 's'}"
