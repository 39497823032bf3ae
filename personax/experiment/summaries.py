"""Turn evaluations into the records of `results.json`, `metrics.jsonl` and `clients.parquet`."""

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.evaluation.classes import ClassCounts
from personax.evaluation.scores import Evaluation, best_evaluations, interval
from personax.evaluation.scoring import Scoring
from personax.experiment.config import Config
from personax.experiment.records import (
    AdaptationRecord,
    BestRecord,
    ClassesRecord,
    EvaluationRecord,
    FederationRecord,
    ScoreRecord,
)
from personax.fast.backends import backend
from personax.objectives.divided import Divided, split
from personax.schedules import Schedule
from personax.simulation.results import Snapshot
from personax.simulation.store import Kept
from personax.typing import Params
from personax.values import DATASETS, DELAYS, PARTITIONS, RECIPES, imported, to_dict

_STATISTICS = ("mean", "std", "worst_decile", "best_decile")


def headline_of(metrics: Sequence[str]) -> str:
    """Return the metric of the headline table: the accuracy if there is one, otherwise the error."""
    return next((name for name in ("accuracy", "error") if name in metrics), metrics[0])


def evaluation_record(found: Evaluation, round: int, seconds: float, **of_run: Any) -> EvaluationRecord:
    """Make the record of an evaluation's statistics over clients; `of_run` are fields that no score determines."""
    of_metrics = lambda statistic: {name: _numbers(getattr(found, statistic)(name)) for name in found.metrics}
    return EvaluationRecord(
        round=round,
        events=[int(num) for num in np.atleast_1d(found.num_events)],
        time=_numbers(found.time),
        seconds=seconds,
        **{**of_run, **{statistic: of_metrics(statistic) for statistic in _STATISTICS}},
    )


def personal_numbers(algorithm: Algorithm, snapshot: Snapshot) -> np.ndarray | None:
    """Return the personal number that the objective shows, [seeds, clients].

    Returns None if it shows none, or if the states of many clients are on the host.
    """
    if isinstance(snapshot.state.personal, Kept):
        return None
    found = algorithm.objective.personal_number(split(snapshot.personal)[1])
    return None if found is None else np.asarray(found[1])


def name_of_personal_number(algorithm: Algorithm, params: Params) -> str:
    """Return the name of the personal number that an objective shows; empty if it shows none."""
    objective = algorithm.objective
    names: list[str] = []

    def ask(params: Params) -> None:
        found = objective.personal_number(objective.init_personal(algorithm.sharing.trained(params)))
        names.append("" if found is None else found[0])

    jax.eval_shape(ask, params)
    return names[0]


def score_record(
    name: str,
    scoring: Scoring,
    history: list[EvaluationRecord],
    newcomers: AdaptationRecord | None,
    diverged: Sequence[int] = (),
    classes: ClassesRecord | None = None,
    of: Divided | None = None,
) -> ScoreRecord:
    """Make the record of all evaluations with one scoring, with the best of each metric.

    The best is over the remaining seeds: `diverged` are the positions of the others. `of` is the scored objective.
    """
    best = {}
    for metric in history[-1].mean:
        means = np.delete([one.mean[metric] for one in history], diverged, axis=1)
        if not means.size:
            continue
        at = best_evaluations(means, metric)
        of_seeds = means[at, np.arange(means.shape[1])]
        best[metric] = BestRecord(interval(of_seeds), [history[position].round for position in at])
    described = (name, to_dict(scoring), scoring.describe(of), scoring.flag)
    return ScoreRecord(*described, history, best, newcomers, classes)


def classes_record(counts: ClassCounts, diverged: Sequence[int]) -> ClassesRecord:
    """Make the record of the results per class, with NaN for seeds that diverged."""
    lost = np.isin(np.arange(len(counts.hits)), diverged)
    of_seeds = lambda shares: [_numbers(shares_of) for shares_of in np.where(lost[:, None], np.nan, shares).T]
    num_samples = counts.actual[np.argmin(lost)].astype(int).tolist()
    return ClassesRecord(num_samples, of_seeds(counts.recall), of_seeds(counts.precision))


def adaptation_record(scoring: Scoring, curve: dict[int, Evaluation], of: Divided) -> AdaptationRecord:
    """Make the record of newcomers' mean metrics by number of adaptation steps."""
    metrics = next(iter(curve.values())).metrics
    means = {name: [_numbers(found.mean(name)) for found in curve.values()] for name in metrics}
    return AdaptationRecord(scoring.describe(of), list(curve), means)


def newcomer_scoring(algorithm: Algorithm, scoring: Scoring) -> Scoring | None:
    """Return the scoring that gives newcomers the model of `scoring`; None if they cannot have it."""
    how = algorithm.divided.newcomer_model(scoring.model)
    if how is None or scoring.flag:
        return None
    num_steps, lr, sharing = max(scoring.num_steps, 1), scoring.lr, algorithm.sharing
    if sharing.personal or (sharing.tuned and scoring.model != "adapted"):  # train for as long as a visit
        usual, lr = algorithm.local.usual_steps(sharing.personal)
        num_steps = max(num_steps, usual)
    tunes = scoring.tunes if how == "adapted" else ()
    return Scoring(how, num_steps, lr, scoring.batch_size, clients="held_out", tunes=tunes)  # pyright: ignore[reportArgumentType]


def staleness_of(algorithm: Algorithm, schedule: Schedule) -> dict[str, list[int]]:
    """Return a histogram of the updates' staleness in an asynchronous run, in server versions."""
    if algorithm.server.is_synchronous:
        return {}
    values, counts = np.unique(schedule.staleness(algorithm.server.buffer_size), return_counts=True)
    return {"staleness": values.tolist(), "count": counts.tolist()}


def activity_of(schedule: Schedule, num_times: int = 200) -> dict[str, list[float]]:
    """Return the share of active clients over virtual time, if there is any."""
    end = float(schedule.time.max())
    if end <= 0:
        return {}
    times = np.linspace(0, end, num_times, endpoint=False)
    return {"time": times.tolist(), "share": schedule.active_share(times).tolist()}


def citations_of(recipe: str, algorithm: Algorithm) -> list[str]:
    """Return the citation keys of an algorithm, or BibTeX entries of imported code."""
    kind = RECIPES.kinds.get(recipe)
    of_recipe = kind.citations if kind is not None else _own_citation(imported(recipe, "recipe"))
    return list(dict.fromkeys([*of_recipe, *algorithm.objective.citations(), *_own_citation(algorithm.objective)]))


def data_citations(config: Config) -> list[str]:
    """Return the citation keys of the data, its partition and the delays."""
    delays, keys = config.schedule.delays, []
    tables = [(DATASETS, config.data.table), (DELAYS, {"kind": delays} if isinstance(delays, str) else delays)]
    for axis, table in [*tables, *([] if config.partition is None else [(PARTITIONS, config.partition.table)])]:
        kind = axis.kind_of(table, "data")
        keys += [*kind.citations, *_own_citation(kind.make)]
    return list(dict.fromkeys(keys))


def _own_citation(item: Any) -> list[str]:
    """Return the BibTeX in `__citation__` of an imported object or its module."""
    module = sys.modules.get(getattr(item, "__module__", ""))
    found = getattr(item, "__citation__", None) or getattr(module, "__citation__", None)
    return [found] if isinstance(found, str) else []


def federation_record(federation: Federation, citations: list[str]) -> FederationRecord:
    """Summarize the data."""
    return FederationRecord(
        num_clients=federation.num_clients,
        num_held_out=0 if federation.newcomers is None else federation.newcomers.num_clients,
        num_samples=len(federation.x),
        num_test_samples=0 if federation.test_x is None else len(federation.test_x),
        summary=str(federation),
        citations=citations,
        schema=federation.schema,
    )


def machine() -> dict[str, str]:
    """Describe the machine of a run."""
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
