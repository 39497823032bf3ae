"""From evaluations to records: what `results.json`, `metrics.jsonl` and `clients.parquet` say."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from personax.algorithms import Algorithm
from personax.build import option_names
from personax.catalogue import ALGORITHMS, DATASETS, OBJECTIVES, PARTITIONS
from personax.config import Config
from personax.federation import Federation
from personax.objectives import Meta, Mixture
from personax.protocol import Protocol
from personax.records import (
    AdaptationRecord,
    BestRecord,
    EvaluationRecord,
    FederationRecord,
    ScoreRecord,
    TableRow,
)
from personax.results import Snapshot
from personax.schedules import Schedule
from personax.scores import Evaluation, Interval, Row, higher_is_better, row_of
from personax.store import Kept
from personax.values import to_dict

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


def mean_mix(algorithm: Algorithm, snapshot: Snapshot) -> list[float] | None:
    """APFL's mean mixing weight over clients, for each seed."""
    mix = mixes(algorithm, snapshot)
    return None if mix is None else _numbers(np.mean(mix, axis=-1))


def mixes(algorithm: Algorithm, snapshot: Snapshot) -> np.ndarray | None:
    """APFL's mixing weights, [seeds, clients]; None for others, and where states are not on the device but many."""
    streamed = isinstance(snapshot.state.personal, Kept)
    return None if streamed or not isinstance(algorithm.objective, Mixture) else np.asarray(snapshot.personal.mix)


def score_record(
    name: str, protocol: Protocol, history: list[EvaluationRecord], newcomers: AdaptationRecord | None
) -> ScoreRecord:
    """All evaluations under one protocol, the best of each metric beside the last."""
    best = {}
    for metric in history[-1].mean:
        means = np.array([one.mean[metric] for one in history])
        at = np.nan_to_num(means if higher_is_better(metric) else -means, nan=-np.inf).argmax(axis=0)
        seeds = range(means.shape[1])
        best[metric] = BestRecord([history[at[s]].events[s] for s in seeds], [float(means[at[s], s]) for s in seeds])
    return ScoreRecord(name, to_dict(protocol), protocol.describe(), protocol.flag, history, best, newcomers)


def adaptation_record(protocol: Protocol, curve: dict[int, Evaluation]) -> AdaptationRecord:
    """Newcomers' mean metrics against the number of adaptation steps."""
    metrics = next(iter(curve.values())).metrics
    means = {name: [_numbers(found.mean(name)) for found in curve.values()] for name in metrics}
    return AdaptationRecord(protocol.describe(), list(curve), means)


def newcomer_protocol(protocol: Protocol) -> Protocol | None:
    """How clients that nobody has seen get the model that this protocol scores; None where they do not adapt."""
    how = {"adapted": "adapted", "recomputed": "recomputed", "personal": "recomputed"}.get(protocol.model)
    if how is None or protocol.flag:
        return None
    return Protocol(how, max(protocol.num_steps, 1), protocol.lr, protocol.batch_size, clients="held_out")  # pyright: ignore[reportArgumentType]


def staleness_of(algorithm: Algorithm, schedule: Schedule) -> dict[str, list[int]]:
    """A histogram of how many server versions old the updates of an asynchronous run were."""
    if algorithm.server.buffer_size is None:
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
    algorithm: str, score: str, seeds: Sequence[int], federation: Federation, found: Evaluation, mix: np.ndarray | None
) -> pa.Table:
    """One row for each client and seed."""
    shape = found.clients.shape
    whose = federation.newcomers if found.protocol.clients == "held_out" else federation
    assert whose is not None  # or there would be no scores of theirs
    order = np.argsort(whose.ids)
    positions = order[np.searchsorted(whose.ids, found.clients, sorter=order)]
    at = positions.ravel()
    num = len(at)
    seen = mix is not None and whose is federation  # newcomers have no weight of their own
    own = np.take_along_axis(mix, positions, axis=-1).ravel() if seen else None
    columns = {
        "algorithm": pa.array([algorithm] * num).dictionary_encode(),
        "score": pa.array([score] * num).dictionary_encode(),
        "seed": np.repeat(np.asarray(seeds), shape[-1]),
        "client": found.clients.ravel(),
        "name": [whose.names[int(i)] for i in at],
        "num_samples": found.num_samples.ravel(),
        "num_train_samples": found.num_train_samples.ravel(),
        **{name: np.asarray(values, float).ravel() for name, values in found.metrics.items()},
        "mix": pa.nulls(num, pa.float64()) if own is None else pa.array(np.asarray(own, float)),
    }
    return pa.table(columns)


def evaluation_of(rows: pa.Table, score: str, protocol: Protocol, num_seeds: int) -> Evaluation:
    """The evaluation whose clients' numbers these rows are; its `clients` are their stable ids."""
    own = rows.filter(np.asarray(rows["score"].cast(pa.string())) == score)
    column = lambda name: own[name].to_numpy().reshape(num_seeds, -1)
    known = ("algorithm", "score", "seed", "client", "name", "num_samples", "num_train_samples", "mix")
    metrics = {name: column(name) for name in own.column_names if name not in known and not own[name].null_count}
    counts = (column("num_samples"), column("num_train_samples"))
    return Evaluation(protocol, metrics, column("client"), *counts, 0, 0.0)


def table_rows(
    algorithm_of: dict[str, str], found: dict[str, Evaluation], local: str | None, together: str | None
) -> list[TableRow]:
    """The headline table, for each metric the scores that have it."""
    metrics = dict.fromkeys(name for one in found.values() for name in one.metrics)
    having = lambda metric: {name: one for name, one in found.items() if metric in one.metrics}
    rows = ((metric, row) for metric in metrics for row in _rows(having(metric), local, together, metric))
    return [_table_row(algorithm_of[row.name], metric, row) for metric, row in rows]


def _rows(found: dict[str, Evaluation], local: str | None, together: str | None, metric: str) -> list[Row]:
    pick = lambda name, one: found[name] if name in found and np.array_equal(found[name].clients, one.clients) else None
    return [row_of(name, one, pick(local, one), pick(together, one), metric) for name, one in found.items()]


def _table_row(algorithm: str, metric: str, row: Row) -> TableRow:
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
    """The keys of what to cite for an algorithm: its recipe, and the objective where it was given one."""
    given = [(OBJECTIVES, type(algorithm.objective).__name__)] if "objective" in option_names(recipe) else []
    keys = _cited((ALGORITHMS, recipe), *given)
    one_step = isinstance(algorithm.objective, Meta) and algorithm.objective.num_adapt_steps == 1
    return [key for key in keys if not (one_step and key == "jamali2025")]  # gMeta is about several steps


def data_citations(config: Config) -> list[str]:
    """The keys of what to cite for the data and its partition."""
    section = config.partition
    return _cited((DATASETS, config.data.kind), *([] if section is None else [(PARTITIONS, section.kind)]))


def _cited(*places: tuple[Sequence[Any], str]) -> list[str]:
    keys = [key for entries, name in places for entry in entries if entry.name == name for key in entry.citations]
    return list(dict.fromkeys(keys))


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
    """What the run ran on."""
    device = jax.devices()[0]
    return {
        "backend": jax.default_backend(),
        "device": f"{device.device_kind}, {jax.device_count()} of them"
        if jax.device_count() > 1
        else device.device_kind,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "jax": version("jax"),
    }


def _numbers(values: Any) -> list[float]:
    return [float(number) for number in np.atleast_1d(values)]
