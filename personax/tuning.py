"""Options picked on validation data that is cut from the clients' training data, never on what is reported."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.build import Plan, build, make_schedules, make_training, option_names, with_scores
from personax.config import Config, ConfigError, Entry
from personax.evaluate import evaluate
from personax.federation import Federation
from personax.results import Snapshot
from personax.schedules import Schedule
from personax.scores import higher_is_better
from personax.simulate import simulate
from personax.summarise import headline_of
from personax.typing import Array, Task

VALIDATION_SHARE = 0.2


class Trial(NamedTuple):
    """One choice of options for one algorithm, and its mean score on validation data: none where it diverged."""

    algorithm: str
    options: dict[str, Any]
    metric: str
    score: float | None


def tune(config: Config, told: Callable[[str], None] = lambda text: None) -> tuple[Config, list[Trial]]:
    """A resolved configuration with the best options of its `[tune]` table for each algorithm, and all that was tried.

    Each algorithm is trained, with all seeds, on 80 % of every client's training data and scored on the rest by its
    first protocol. Test data and newcomers are not looked at.
    """
    _check(config)
    plan = build(config)
    plan = plan._replace(federation=validation_of(plan.federation, jax.random.key(config.split.seed)))
    trials: list[Trial] = []
    entries = {}
    for name, entry in config.algorithms.items():
        found = _try_all(config, plan, name, entry)
        entries[name] = _with_best(name, entry, found, told)
        trials += found
    return dataclasses.replace(config, algorithms=entries, tune={}), trials


def _check(config: Config) -> None:
    if not config.tune:
        raise ConfigError("There is nothing to tune. Add a table `[tune]` with lists, such as `lr = [0.01, 0.1]`.")
    for name in config.tune:
        recipes = sorted({entry.recipe for entry in config.algorithms.values()})
        if not any(name in option_names(recipe) for recipe in recipes):
            raise ConfigError(f"`tune.{name}` is an option of none of {', '.join(recipes)}. Remove it.")
    for name, entry in config.algorithms.items():  # all combinations must make sense before the first is tried
        for options in _grid(config, entry):
            make_training(name, _with(name, entry, options))


def validation_of(federation: Federation, key: Array) -> Federation:
    """The same clients, without their tests: a part of their training data takes the place."""
    train = Federation(federation.x, federation.y, federation.offsets, ids=federation.ids, names=federation.names)
    return train.split_tests(VALIDATION_SHARE, key=key)


def _grid(config: Config, entry: Entry) -> list[dict[str, Any]]:
    """Every combination of the options that this recipe takes."""
    names = [name for name in config.tune if name in option_names(entry.recipe)]
    values = itertools.product(*(config.tune[name] for name in names))
    return [dict(zip(names, chosen, strict=True)) for chosen in values] if names else []


def _with(name: str, entry: Entry, options: dict[str, Any]) -> Entry:
    """The entry with other options, which scores that its own ones implied follow."""
    implied = entry == with_scores(name, dataclasses.replace(entry, scores={}))
    chosen = dataclasses.replace(entry, options={**entry.options, **options})
    return with_scores(name, dataclasses.replace(chosen, scores={})) if implied else chosen


def _try_all(config: Config, plan: Plan, name: str, entry: Entry) -> list[Trial]:
    """Every choice of the options, trained and scored."""
    choices = _grid(config, entry)
    trainings = [make_training(name, _with(name, entry, options)) for options in choices]
    schedules = lambda algorithm: make_schedules(config, algorithm, plan.federation.num_clients)
    run = (plan.task, plan.federation)
    ends = run_all([training.algorithm for training in trainings], *run, schedules, plan.keys)
    trials = []
    for options, training, end in zip(choices, trainings, ends, strict=True):
        metric, score = "", None
        if end is not None:
            protocol = dataclasses.replace(next(iter(training.protocols.values())), clients="all", score_on="test")
            found = evaluate(training.algorithm, *run, end, protocol, key=plan.keys)
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
    together: bool | None = None,
    **options: Any,
) -> list[Snapshot | None]:
    """The end of each algorithm's run with all seeds; none where it diverged.

    Those that differ in numbers alone are trained together, by default on accelerators: a CPU has no room for more.
    """
    together = jax.default_backend() != "cpu" if together is None else together
    alike: dict[Any, list[int]] = {}
    for place, algorithm in enumerate(algorithms):
        alike.setdefault(jax.tree.structure(algorithm) if together else place, []).append(place)
    ends: list[Snapshot | None] = [None] * len(algorithms)
    for places in alike.values():
        swept = [algorithms[place] for place in places for _ in keys]
        run = (swept if len(places) > 1 else swept[0], task, federation, schedules(swept[0]) * len(places))
        end = simulate(*run, key=jnp.tile(keys, len(places)), on_nonfinite="skip", **options).snapshot
        for number, place in enumerate(places):
            own = end.of_seeds(number * len(keys), (number + 1) * len(keys))
            ends[place] = None if np.any(own.state.faults.num) else own
    return ends


def _with_best(name: str, entry: Entry, found: list[Trial], told: Callable[[str], None]) -> Entry:
    finite = [trial for trial in found if trial.score is not None]
    if not found:
        return entry
    if not finite:
        raise ConfigError(f"`{name}` diverged with every choice of `[tune]`. Add smaller step sizes.")
    sign = 1 if higher_is_better(finite[0].metric) else -1
    best = max(finite, key=lambda trial: sign * trial.score)  # pyright: ignore[reportOperatorIssue]
    told(f"{name}: {', '.join(f'{key} = {item}' for key, item in best.options.items())}")
    return _with(name, entry, best.options)
