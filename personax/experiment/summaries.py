"""Turn evaluations into the records of `results.json`, `metrics.jsonl` and `clients.parquet`."""

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.evaluation.scores import Evaluation, Interval, ScoreRow, higher_is_better, row_of
from personax.evaluation.scoring import Scoring
from personax.experiment.config import Config
from personax.experiment.records import (
    AdaptationRecord,
    BestRecord,
    EvaluationRecord,
    FederationRecord,
    ScoreRecord,
    TableRow,
)
from personax.fast.backends import backend
from personax.schedules import Schedule
from personax.simulation.results import Snapshot
from personax.simulation.store import Kept
from personax.typing import Params
from personax.values import DATASETS, PARTITIONS, RECIPES, imported, to_dict

_STATISTICS = ("mean", "std", "worst_decile", "best_decile")


def headline_of(metrics: Sequence[str]) -> str:
    """The metric of the headline table: accuracy where there is one, or the error."""
    return next((name for name in ("accuracy", "error") if name in metrics), metrics[0])


def evaluation_record(
    found: Evaluation, snapshot: Snapshot, cohort: int, seconds: float, **of_run: Any
) -> EvaluationRecord:
    """One evaluation's statistics over clients, and what is known of the run beside them."""
    events = _numbers(found.num_events)
    of_metrics = lambda statistic: {name: _numbers(getattr(found, statistic)(name)) for name in found.metrics}
    return EvaluationRecord(
        round=int(events[0]) // cohort,
        events=[int(num) for num in events],
        time=_numbers(snapshot.time),
        seconds=seconds,
        **{**of_run, **{statistic: of_metrics(statistic) for statistic in _STATISTICS}},
    )


def personal_numbers(algorithm: Algorithm, snapshot: Snapshot) -> np.ndarray | None:
    """The personal number that the objective shows, [seeds, clients].

    None where it shows none, and where the states of many clients are on the host.
    """
    if isinstance(snapshot.state.personal, Kept):
        return None
    found = algorithm.objective.personal_number(snapshot.personal)
    return None if found is None else np.asarray(found[1])


def name_of_personal_number(algorithm: Algorithm, params: Params) -> str:
    """The name of the personal number that an objective shows; empty if it shows none."""
    objective = algorithm.objective
    names: list[str] = []

    def ask(params: Params) -> None:
        found = objective.personal_number(objective.init_personal(params))
        names.append("" if found is None else found[0])

    jax.eval_shape(ask, params)
    return names[0]


def score_record(
    name: str, scoring: Scoring, history: list[EvaluationRecord], newcomers: AdaptationRecord | None
) -> ScoreRecord:
    """All evaluations under one scoring, the best of each metric beside the last."""
    best = {}
    for metric in history[-1].mean:
        means = np.array([one.mean[metric] for one in history])
        at = np.nan_to_num(means if higher_is_better(metric) else -means, nan=-np.inf).argmax(axis=0)
        seeds = range(means.shape[1])
        best[metric] = BestRecord([history[at[s]].events[s] for s in seeds], [float(means[at[s], s]) for s in seeds])
    return ScoreRecord(name, to_dict(scoring), scoring.describe(), scoring.flag, history, best, newcomers)


def adaptation_record(scoring: Scoring, curve: dict[int, Evaluation]) -> AdaptationRecord:
    """Newcomers' mean metrics against the number of adaptation steps."""
    metrics = next(iter(curve.values())).metrics
    means = {name: [_numbers(found.mean(name)) for found in curve.values()] for name in metrics}
    return AdaptationRecord(scoring.describe(), list(curve), means)


def newcomer_scoring(algorithm: Algorithm, scoring: Scoring) -> Scoring | None:
    """The scoring by which a newcomer gets the model that `scoring` scores; None where it gets none."""
    how = algorithm.objective.newcomer_model(scoring.model)
    if how is None or scoring.flag:
        return None
    return Scoring(how, max(scoring.num_steps, 1), scoring.lr, scoring.batch_size, clients="held_out")  # pyright: ignore[reportArgumentType]


def staleness_of(algorithm: Algorithm, schedule: Schedule) -> dict[str, list[int]]:
    """A histogram of how many server versions old the updates of an asynchronous run were."""
    if algorithm.server.is_synchronous:
        return {}
    values, counts = np.unique(schedule.staleness(algorithm.server.buffer_size), return_counts=True)
    return {"staleness": values.tolist(), "count": counts.tolist()}


def activity_of(schedule: Schedule, num_times: int = 200) -> dict[str, list[float]]:
    """The share of active clients over virtual time, where there is any."""
    end = float(schedule.time.max())
    if end <= 0:
        return {}
    times = np.linspace(0, end, num_times, endpoint=False)
    return {"time": times.tolist(), "share": schedule.active_share(times).tolist()}


def client_rows(
    algorithm: str, score: str, seeds: Sequence[int], federation: Federation, found: Evaluation, own: np.ndarray | None
) -> pa.Table:
    """One row for each client and seed."""
    shape = found.clients.shape
    whose = federation.newcomers if found.scoring.clients == "held_out" else federation
    assert whose is not None  # or there would be no scores of theirs
    order = np.argsort(whose.ids)
    positions = order[np.searchsorted(whose.ids, found.clients, sorter=order)]
    at = positions.ravel()
    num = len(at)
    seen = own is not None and whose is federation  # newcomers have no state of their own
    numbers = np.take_along_axis(own, positions, axis=-1).ravel() if seen else None
    columns = {
        "algorithm": pa.array([algorithm] * num).dictionary_encode(),
        "score": pa.array([score] * num).dictionary_encode(),
        "seed": np.repeat(np.asarray(seeds), shape[-1]),
        "client": found.clients.ravel(),
        "name": [whose.names[int(i)] for i in at],
        "num_samples": found.num_samples.ravel(),
        "num_train_samples": found.num_train_samples.ravel(),
        **{name: np.asarray(values, float).ravel() for name, values in found.metrics.items()},
        "personal_number": pa.nulls(num, pa.float64()) if numbers is None else pa.array(np.asarray(numbers, float)),
    }
    return pa.table(columns)


def evaluation_of(rows: pa.Table, score: str, scoring: Scoring, num_seeds: int) -> Evaluation:
    """The evaluation whose clients' numbers these rows are; its `clients` are their stable ids."""
    own = rows.filter(np.asarray(rows["score"].cast(pa.string())) == score)
    column = lambda name: own[name].to_numpy().reshape(num_seeds, -1)
    known = ("algorithm", "score", "seed", "client", "name", "num_samples", "num_train_samples", "personal_number")
    metrics = {name: column(name) for name in own.column_names if name not in known and not own[name].null_count}
    counts = (column("num_samples"), column("num_train_samples"))
    return Evaluation(scoring, metrics, column("client"), *counts, 0, 0.0)


def table_rows(
    algorithm_of: dict[str, str], found: dict[str, Evaluation], local: str | None, global_: str | None
) -> list[TableRow]:
    """The headline table, for each metric the scores that have it."""
    metrics = dict.fromkeys(name for one in found.values() for name in one.metrics)
    having = lambda metric: {name: one for name, one in found.items() if metric in one.metrics}
    rows = ((metric, row) for metric in metrics for row in _rows(having(metric), local, global_, metric))
    return [_table_row(algorithm_of[row.name], metric, row) for metric, row in rows]


def _rows(found: dict[str, Evaluation], local: str | None, global_: str | None, metric: str) -> list[ScoreRow]:
    pick = lambda name, one: found[name] if name in found and np.array_equal(found[name].clients, one.clients) else None
    return [row_of(name, one, pick(local, one), pick(global_, one), metric) for name, one in found.items()]


def _table_row(algorithm: str, metric: str, row: ScoreRow) -> TableRow:
    ends = lambda found, name: {
        name: found.mean,
        f"{name}_low": _or_none(found.low),
        f"{name}_high": _or_none(found.high),
    }
    nothing = Interval(None, None, None, 0)  # pyright: ignore[reportArgumentType]
    return TableRow(
        algorithm=algorithm,
        score=row.name,
        metric=metric,
        mean=row.mean.mean,
        low=_or_none(row.mean.low),
        high=_or_none(row.mean.high),
        std=row.std,
        worst_decile=row.worst_decile,
        best_decile=row.best_decile,
        **ends(row.over_local or nothing, "over_local"),
        **ends(row.over_global or nothing, "over_global"),
        better_than_local=row.better_than_local,
        better_than_global=row.better_than_global,
        flag=row.flag,
    )


def citations_of(recipe: str, algorithm: Algorithm) -> list[str]:
    """The keys of what to cite for an algorithm, or BibTeX itself where something imported carries its own."""
    kind = RECIPES.kinds.get(recipe)
    of_recipe = kind.citations if kind is not None else _own_citation(imported(recipe, "recipe"))
    return list(dict.fromkeys([*of_recipe, *algorithm.objective.citations(), *_own_citation(algorithm.objective)]))


def data_citations(config: Config) -> list[str]:
    """The same for the data and its partition."""
    keys = []
    for axis, section in ((DATASETS, config.data), (PARTITIONS, config.partition)):
        if section is not None:
            kind = axis.kind_of(section.table, "data")
            keys += [*kind.citations, *_own_citation(kind.make)]
    return list(dict.fromkeys(keys))


def _own_citation(item: Any) -> list[str]:
    """The BibTeX that the author of something outside personax gives in `__citation__`, of it or of its module."""
    module = sys.modules.get(getattr(item, "__module__", ""))
    found = getattr(item, "__citation__", None) or getattr(module, "__citation__", None)
    return [found] if isinstance(found, str) else []


def _or_none(number: float | None) -> float | None:
    return None if number is None or np.isnan(number) else number


def federation_record(federation: Federation, citations: list[str]) -> FederationRecord:
    """The data in words and numbers."""
    return FederationRecord(
        num_clients=federation.num_clients,
        num_held_out=0 if federation.newcomers is None else federation.newcomers.num_clients,
        num_samples=len(federation.x),
        num_test_samples=0 if federation.test_x is None else len(federation.test_x),
        summary=str(federation),
        citations=citations,
    )


def machine() -> dict[str, str]:
    """The machine of a run."""
    device = jax.devices()[0]
    return {
        "backend": backend(),
        "device": f"{device.device_kind}, {jax.device_count()} of them"
        if jax.device_count() > 1
        else device.device_kind,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "jax": version("jax"),
    }


def _numbers(values: Any) -> list[float]:
    return [float(number) for number in np.atleast_1d(values)]
