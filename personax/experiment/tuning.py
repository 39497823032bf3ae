"""Tune options on validation data that is split off the clients' training data, never on test data."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.evaluation.evaluate import evaluate
from personax.evaluation.scores import Evaluation, higher_is_better, interval, show
from personax.evaluation.scoring import Scoring
from personax.evaluation.validation import validation_of
from personax.experiment.build import Study, Training, build, implies_scores, make_schedules, make_training, with_scores
from personax.experiment.config import AlgorithmSection, Config, ConfigError, TuneSection
from personax.experiment.records import TrialRecord, TunedAlgorithm, TuningRecord
from personax.experiment.search import SCORES, Options, OptionSearch, first_score, has_option, put, search_of, values_of
from personax.experiment.summaries import headline_of
from personax.schedules import Schedule
from personax.simulation.execution import Execution, Monitor
from personax.simulation.results import Snapshot
from personax.simulation.simulate import initial_params, simulate
from personax.simulation.work import work_of
from personax.typing import Array, Task

MOST_BYTES = 1 << 30  # limit on the clients' personal states in one sweep

Notify = Callable[[str], None]


def silent(text: str) -> None:
    """Ignore a message."""


def tune(config: Config, notify: Notify = silent, progress: Notify = silent) -> tuple[Config, TuningRecord]:
    """Return a resolved configuration with the best options found for each algorithm, and the record of the search.

    Each algorithm is trained with all seeds on a part of every client's training data (by default 80 %) and scored on
    the rest with its first scoring. Test data and newcomers are not used. `notify` is called with one line for each
    algorithm and with warnings; `progress` with the current training.
    """
    study = prepare_tuning(config)
    names = [name for name, search in study.searches.items() if search.choices]
    found = []
    for number, name in enumerate(names, 1):
        report = lambda text, name=name, number=number: progress(f"Tuning {number}/{len(names)} {name}: {text}")
        found.append(tune_algorithm(study, name, progress=report))
        announce(config, found[-1], notify)
    return tuned_config(config, found)


class TuningStudy(NamedTuple):
    """A resolved configuration, the clients without their tests, and the search for each algorithm's options."""

    config: Config
    plan: Study
    searches: dict[str, OptionSearch]


def prepare_tuning(config: Config) -> TuningStudy:
    """Build and check everything that a search for options needs."""
    key = jax.random.key(split_seed(config))
    searches = {name: search_of(config.tune, name, entry, key) for name, entry in config.algorithms.items()}
    _check(config, searches)
    plan = build(config)
    plan = plan._replace(federation=validation_of(plan.federation, key, config.tune.share))
    return TuningStudy(config, plan, searches)


def announce(config: Config, tuned: TunedAlgorithm, notify: Notify) -> None:
    """Notify about the result of one algorithm's search; raise if all options diverged and that is an error."""
    if all(trial.score is None for trial in tuned.trials) and config.on_nonfinite == "raise":
        raise ConfigError(tuned.warnings[0])
    notify(describe(tuned))
    for text in tuned.warnings:
        notify(f"Warning: {text}")


def tuned_config(config: Config, found: list[TunedAlgorithm]) -> tuple[Config, TuningRecord]:
    """Return the configuration with the options found, and the record of the search."""
    chosen = {one.algorithm: with_options(one.algorithm, config.algorithms[one.algorithm], one.chosen) for one in found}
    record = TuningRecord(config.tune.share, split_seed(config), config.seed_list, found)
    return dataclasses.replace(config, algorithms={**config.algorithms, **chosen}, tune=TuneSection()), record


def split_seed(config: Config) -> int:
    """Return the seed of the validation split."""
    return config.split.seed if config.tune.seed is None else config.tune.seed


def describe(tuned: TunedAlgorithm) -> str:
    """Describe the chosen options, their score, and the score of the algorithm's own options in one line."""
    chosen, own = tuned.of(tuned.chosen), tuned.of(tuned.before)
    options = show_options(tuned.chosen)
    if chosen is None or chosen.score is None:
        return f"{tuned.algorithm}: {options}"
    before = "" if own is None or own is chosen else f"; {show_score(own, tuned.metric)} with its own options"
    return f"{tuned.algorithm}: {options} ({tuned.metric} {show_score(chosen, tuned.metric)}{before})"


def best_trials(tuned: TunedAlgorithm, num: int = 5) -> list[tuple[TrialRecord, str]]:
    """Return the best trials, best first, and the algorithm's own, with labels for the chosen and own options."""
    own = tuned.of(tuned.before)
    words = lambda trial: [
        *(["chosen"] if trial.options == tuned.chosen and trial.score is not None else []),
        *(["own options"] if trial is own else []),
    ]
    return [
        (trial, ", ".join(words(trial)))
        for at, trial in enumerate(ranked(tuned.trials, tuned.metric))
        if at < num or trial is own
    ]


def show_options(options: Options) -> str:
    """Format options.

    >>> show_options({"lr": 0.1, "objective.strength": 3})
    'lr = 0.1, objective.strength = 3'
    """
    return ", ".join(f"{name} = {item}" for name, item in options.items())


def show_score(trial: TrialRecord, metric: str) -> str:
    """Format the score of a trial."""
    return "diverged" if trial.score is None else show(interval(trial.of_seeds), metric)


def _check(config: Config, searches: dict[str, OptionSearch]) -> None:
    for option in config.tune.options:
        if not any(has_option(name, entry, option) for name, entry in config.algorithms.items()):
            raise ConfigError(f"None of {', '.join(config.algorithms)} has the option `tune.{option}`. Remove it.")
    if not any(search.choices for search in searches.values()):
        raise ConfigError(
            "There is nothing to tune: the recipes do not declare any options to vary. Add lists to `[tune]`, such as "
            "`lr = [0.01, 0.1]`."
        )
    for name, search in searches.items():  # check all combinations before the first is tried
        for options in search.choices:
            make_training(name, with_options(name, config.algorithms[name], options))


def with_options(name: str, entry: AlgorithmSection, options: Options) -> AlgorithmSection:
    """Return the entry with other options, and with scores that are derived from them."""
    changed: dict[str, Any] = {**entry.options, SCORES: first_score(entry)}
    for option, item in options.items():
        changed = put(changed, option, item)
    score = changed.pop(SCORES)
    if implies_scores(name, entry):
        return with_scores(name, dataclasses.replace(entry, options=changed, scores={}))
    scores = {key: score if at == 0 else table for at, (key, table) in enumerate(entry.scores.items())}
    return dataclasses.replace(entry, options=changed, scores=scores)


Trials = tuple[str, list[TrialRecord]]  # the metric (empty if all diverged) and the trials
Try = Callable[[Sequence[Options]], Trials]


def tune_algorithm(
    study: TuningStudy,
    name: str,
    progress: Notify = silent,
    keep: Callable[[Try], Try] = lambda attempt: attempt,
) -> TunedAlgorithm:
    """Try the combinations of a search, then extend its ranges as long as the best value is at an edge.

    `keep` wraps the function that trains and scores choices of options, for example with one that keeps its results.
    """
    config, plan, search = study.config, study.plan, study.searches[name]
    before = values_of(config.algorithms[name], name, list(search.ranges))
    num_combinations = search.num_combinations
    attempt = keep(lambda choices: _try_all(config, plan, name, choices))
    progress(f"{len(search.choices)} combinations")
    metric, trials = attempt(search.choices)
    for _ in range(config.tune.num_extensions):
        best = best_trial(trials, metric)
        wider = search.extended(search.smallest if best is None else best.options)
        if not wider.choices:
            break
        search = wider
        progress(f"{len(search.choices)} combinations beyond the edge")
        found, more = attempt(search.choices)
        metric, trials = metric or found, [*trials, *more]
    best = best_trial(trials, metric)
    chosen = before if best is None else best.options
    return TunedAlgorithm(
        algorithm=name,
        search=search.how,
        num_combinations=num_combinations,
        metric=metric,
        words=_describe_scoring(make_training(name, with_options(name, config.algorithms[name], chosen))),
        before=before,
        chosen=chosen,
        trials=trials,
        warnings=_warnings(name, search, best),
    )


def _warnings(name: str, search: OptionSearch, best: TrialRecord | None) -> list[str]:
    """Return warnings about best values at an edge, or about a search without a result."""
    if best is None:
        problem = f"`{name}` diverged with all options. Add smaller step sizes to `[tune]`."
        return [f"{problem} It keeps its own options."]
    edges = {option: one.edge(best.options[option]) for option, one in search.ranges.items()}
    return [
        f"{name}: the best `{option}`, {best.options[option]}, is the {edge} value tried. A "
        f"{'larger' if edge == 'largest' else 'smaller'} one may be better: add some to `[tune]`."
        for option, edge in edges.items()
        if edge
    ]


def _try_all(config: Config, plan: Study, name: str, choices: Sequence[Options]) -> Trials:
    """Train and score all choices of options, and return the metric and the trials."""
    entry = config.algorithms[name]
    trainings = [make_training(name, with_options(name, entry, options)) for options in choices]
    found = evaluations(config.scheduled_for(name), plan, trainings)
    metric = next((headline_of(list(one.metrics)) for one in found if one is not None), "")
    trials = [
        TrialRecord(options, None, [], None) if one is None else _trial(options, one, metric)
        for options, one in zip(choices, found, strict=True)
    ]
    return metric, trials


def evaluations(config: Config, plan: Study, trainings: Sequence[Training]) -> list[Evaluation | None]:
    """Train algorithms on a federation of `validation_of` and score each with its first scoring; None if diverged."""
    run = (plan.task, plan.federation)
    work = lambda algorithm: work_of(algorithm, *run)
    schedules = lambda algorithm: make_schedules(config, algorithm, plan.federation.num_clients, work(algorithm))
    execution = Execution(config.schedule.cohort_chunk, on_nonfinite="skip", precision=config.precision)
    each = [_identity(training.algorithm) for training in trainings]
    different = {one: training.algorithm for one, training in zip(each, trainings, strict=True)}
    runs = run_all(list(different.values()), *run, schedules, plan.keys, execution=execution)
    ends = dict(zip(different, runs, strict=True))  # trainings that differ only in their scoring share a run
    return [
        None
        if (end := ends[one]) is None
        else evaluate(training.algorithm, *run, end, _scoring(training), key=plan.keys)
        for one, training in zip(each, trainings, strict=True)
    ]


def _identity(algorithm: Algorithm) -> tuple:
    """Return a key that is the same for equal algorithms, also if their numbers are arrays."""
    return jax.tree.structure(algorithm), *(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(algorithm))


def _describe_scoring(training: Training) -> str:
    return _scoring(training).describe(training.algorithm.divided).replace("test data", "validation data")


def _scoring(training: Training) -> Scoring:
    """Return the first scoring of an algorithm, for the validation data of all clients."""
    return dataclasses.replace(next(iter(training.scorings.values())), clients="all", score_on="test")


def _trial(options: Options, found: Evaluation, metric: str) -> TrialRecord:
    """Make the record of a run that did not diverge."""
    of_seeds = np.asarray(found.mean(metric), float)
    if not np.isfinite(of_seeds).all():
        return TrialRecord(options, None, [], None)
    loss = float(np.mean(found.mean("loss"))) if "loss" in found.metrics else np.inf
    return TrialRecord(options, float(of_seeds.mean()), of_seeds.tolist(), loss if np.isfinite(loss) else None)


def best_trial(trials: Sequence[TrialRecord], metric: str) -> TrialRecord | None:
    """Return the trial with the best score, then the lowest loss, then the first; None if all diverged."""
    return next((trial for trial in ranked(trials, metric) if trial.score is not None), None)


def ranked(trials: Sequence[TrialRecord], metric: str) -> list[TrialRecord]:
    """Sort the trials from best to worst, with those that diverged last."""
    sign = -1 if higher_is_better(metric) else 1
    last = lambda number: np.inf if number is None else number
    place = lambda trial: (np.inf if trial.score is None else sign * trial.score, last(trial.loss))
    return sorted(trials, key=place)


def run_all(
    algorithms: Sequence[Algorithm],
    task: Task,
    federation: Federation,
    schedules: Callable[[Algorithm], list[Schedule]],
    keys: Array,
    side_by_side: bool = True,
    monitor: Monitor = Monitor(),
    execution: Execution = Execution(on_nonfinite="skip"),
) -> list[Snapshot | None]:
    """Return the final snapshot of each algorithm's run with all seeds; None if it diverged.

    Algorithms that differ only in numbers form one sweep: one program, compiled once, with a lane for each algorithm
    and seed. As many run together as fit into memory.
    """
    alike: dict[Any, list[int]] = {}
    for place, algorithm in enumerate(algorithms):
        alike.setdefault(jax.tree.structure(algorithm) if side_by_side else place, []).append(place)
    ends: list[Snapshot | None] = [None] * len(algorithms)
    for places in alike.values():
        most = _most_lanes(algorithms[places[0]], task, federation, len(keys))
        for begin in range(0, len(places), most):
            here = places[begin : begin + most]
            swept = [algorithms[place] for place in here for _ in keys]
            run = (swept if len(here) > 1 else swept[0], task, federation, schedules(swept[0]) * len(here))
            end = simulate(*run, key=jnp.tile(keys, len(here)), monitor=monitor, execution=execution).snapshot
            for number, place in enumerate(here):
                own = end.of_seeds(number * len(keys), (number + 1) * len(keys))
                ends[place] = None if np.any(own.state.faults.num) else own
    return ends


def _most_lanes(algorithm: Algorithm, task: Task, federation: Federation, num_seeds: int) -> int:
    """Return the number of algorithms that run together, limited by the memory for personal states."""

    def states(key: Array) -> Any:
        params = initial_params(task, federation, key=key)
        return params, algorithm.divided.init_personal(params)

    leaves = jax.tree.leaves(jax.eval_shape(states, jax.random.key(0)))
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) * federation.num_clients * num_seeds
    return max(1, MOST_BYTES // max(each, 1))
