"""Tune options on validation data cut from the clients' training data, never on the data that is reported."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.evaluation.evaluate import evaluate
from personax.evaluation.scores import higher_is_better
from personax.experiment.build import Study, build, make_schedules, make_training, option_names, with_scores
from personax.experiment.config import AlgorithmSection, Config, ConfigError
from personax.experiment.summaries import headline_of
from personax.fast.backends import runs_side_by_side
from personax.schedules import Schedule
from personax.simulation.execution import Execution, Monitor
from personax.simulation.results import Snapshot
from personax.simulation.simulate import simulate
from personax.typing import Array, Task

VALIDATION_SHARE = 0.2


class Trial(NamedTuple):
    """One choice of options for one algorithm, and its mean score on validation data: none where it diverged."""

    algorithm: str
    options: dict[str, Any]
    metric: str
    score: float | None


def tune(config: Config, notify: Callable[[str], None] = lambda text: None) -> tuple[Config, list[Trial]]:
    """A resolved configuration with the best options of its `[tune]` table for each algorithm, and all that was tried.

    Each algorithm is trained, with all seeds, on 80 % of every client's training data and scored on the rest by its
    first scoring. Test data and newcomers are not looked at.
    """
    _check(config)
    plan = build(config)
    plan = plan._replace(federation=validation_of(plan.federation, jax.random.key(config.split.seed)))
    trials: list[Trial] = []
    entries = {}
    for name, entry in config.algorithms.items():
        found = _try_all(config, plan, name, entry)
        entries[name] = with_best_options(name, entry, found, notify, may_diverge=config.on_nonfinite != "raise")
        trials += found
    return dataclasses.replace(config, algorithms=entries, tune={}), trials


def _check(config: Config) -> None:
    if not config.tune:
        raise ConfigError("There is nothing to tune. Add a table `[tune]` with lists, such as `lr = [0.01, 0.1]`.")
    for option in config.tune:
        if not any(option in option_names(name, entry) for name, entry in config.algorithms.items()):
            raise ConfigError(f"`tune.{option}` is an option of none of {', '.join(config.algorithms)}. Remove it.")
    for name, entry in config.algorithms.items():  # all combinations must make sense before the first is tried
        for options in _grid(config, name, entry):
            make_training(name, with_options(name, entry, options))


def validation_of(federation: Federation, key: Array) -> Federation:
    """The same clients, without their tests: a part of their training data takes the place."""
    train = Federation(federation.x, federation.y, federation.offsets, ids=federation.ids, names=federation.names)
    return train.split_tests(VALIDATION_SHARE, key=key)


def _grid(config: Config, name: str, entry: AlgorithmSection) -> list[dict[str, Any]]:
    """Every combination of the options that this recipe takes."""
    names = [option for option in config.tune if option in option_names(name, entry)]
    values = itertools.product(*(config.tune[name] for name in names))
    return [dict(zip(names, chosen, strict=True)) for chosen in values] if names else []


def with_options(name: str, entry: AlgorithmSection, options: dict[str, Any]) -> AlgorithmSection:
    """The entry with other options, which scores that its own ones implied follow."""
    implied = entry == with_scores(name, dataclasses.replace(entry, scores={}))
    chosen = dataclasses.replace(entry, options={**entry.options, **options})
    return with_scores(name, dataclasses.replace(chosen, scores={})) if implied else chosen


def _try_all(config: Config, plan: Study, name: str, entry: AlgorithmSection) -> list[Trial]:
    """Every choice of the options, trained and scored."""
    choices = _grid(config, name, entry)
    trainings = [make_training(name, with_options(name, entry, options)) for options in choices]
    schedules = lambda algorithm: make_schedules(config, algorithm, plan.federation.num_clients)
    run = (plan.task, plan.federation)
    ends = run_all([training.algorithm for training in trainings], *run, schedules, plan.keys)
    trials = []
    for options, training, end in zip(choices, trainings, ends, strict=True):
        metric, score = "", None
        if end is not None:
            scoring = dataclasses.replace(next(iter(training.scorings.values())), clients="all", score_on="test")
            found = evaluate(training.algorithm, *run, end, scoring, key=plan.keys)
            metric = headline_of(list(found.metrics))
            score = float(np.mean(found.mean(metric)))
        trials.append(Trial(name, options, metric, score if score is not None and np.isfinite(score) else None))
    return trials


def run_all(
    algorithms: Sequence[Algorithm],
    task: Task,
    federation: Federation,
    schedules: Callable[[Algorithm], list[Schedule]],
    keys: Array,
    side_by_side: bool | None = None,
    monitor: Monitor = Monitor(),
) -> list[Snapshot | None]:
    """The end of each algorithm's run with all seeds; none where it diverged.

    Those that differ in numbers alone are trained together, by default on accelerators: a CPU has no room for more.
    """
    side_by_side = runs_side_by_side() if side_by_side is None else side_by_side
    alike: dict[Any, list[int]] = {}
    for place, algorithm in enumerate(algorithms):
        alike.setdefault(jax.tree.structure(algorithm) if side_by_side else place, []).append(place)
    skips = Execution(on_nonfinite="skip")
    ends: list[Snapshot | None] = [None] * len(algorithms)
    for places in alike.values():
        swept = [algorithms[place] for place in places for _ in keys]
        run = (swept if len(places) > 1 else swept[0], task, federation, schedules(swept[0]) * len(places))
        end = simulate(*run, key=jnp.tile(keys, len(places)), monitor=monitor, execution=skips).snapshot
        for number, place in enumerate(places):
            own = end.of_seeds(number * len(keys), (number + 1) * len(keys))
            ends[place] = None if np.any(own.state.faults.num) else own
    return ends


def with_best_options(
    name: str, entry: AlgorithmSection, found: list[Trial], notify: Callable[[str], None], may_diverge: bool = False
) -> AlgorithmSection:
    """Return the entry with the options of its best trial; of several equally good ones, those of the first.

    If all trials diverged, that is an error; with `may_diverge` the entry keeps its own options.
    """
    finite = [trial for trial in found if trial.score is not None]
    if not found:
        return entry
    if not finite:
        problem = f"`{name}` diverged with every choice of `[tune]`. Add smaller step sizes."
        if not may_diverge:
            raise ConfigError(problem)
        notify(f"{problem} It keeps its own options.")
        return entry
    sign = 1 if higher_is_better(finite[0].metric) else -1
    best = max(finite, key=lambda trial: sign * trial.score)  # pyright: ignore[reportOperatorIssue]
    notify(f"{name}: {', '.join(f'{key} = {item}' for key, item in best.options.items())}")
    return with_options(name, entry, best.options)
