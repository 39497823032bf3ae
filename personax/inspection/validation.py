"""Short runs that compare the advice with the inspected configuration on held-out data."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from personax.evaluation.scores import Evaluation, higher_is_better, show
from personax.evaluation.validation import validation_of
from personax.experiment.build import Study, make_schedules, make_task, make_training, outputs_of, resolve
from personax.experiment.config import AlgorithmSection, Config, dump, parse
from personax.experiment.summaries import headline_of
from personax.experiment.tuning import evaluations
from personax.inspection.advice import advise, starter_name
from personax.inspection.findings import Advice, Measurements, RunSource, ShortRun, Validation
from personax.inspection.measure import with_two_samples
from personax.simulation.checks import find_statistics
from personax.simulation.work import work_of
from personax.values import ConfigError

MOST_ROUNDS, MOST_SEEDS = 60, 3  # in a short run
FACTORS = (1, 3, 10)  # steps of 1 / L are safe, but often too small


class Setting(NamedTuple):
    """A resolved configuration and its built parts."""

    config: Config
    plan: Study


@dataclass(frozen=True, eq=False)
class Contender:
    """An algorithm in a short run: its evaluation (None if it diverged), and the advice to give if it is the best."""

    source: RunSource
    algorithm: str
    options: dict[str, Any]
    found: Evaluation | None
    advice: Advice

    def of_clients(self, metric: str) -> np.ndarray | None:
        """Return each client's score, averaged over seeds; None if one is not finite."""
        scores = None if self.found is None else np.atleast_2d(self.found.of(metric)).mean(axis=0)
        return scores if scores is not None and np.isfinite(scores).all() else None

    def short_run(self, metric: str) -> ShortRun:
        """Return the record of the run."""
        scores = self.of_clients(metric)
        if scores is None:
            return ShortRun(self.source, self.algorithm, self.options, None, None)
        return ShortRun(self.source, self.algorithm, self.options, float(scores.mean()), _standard_error(scores))


def standardized(given: Setting) -> Setting:
    """Standardize the features, if they are numeric columns that are not standardized yet."""
    config, plan = given
    federation = plan.federation
    is_scaled = federation.schema.feature_scaling is not None
    is_table = len(federation.schema.shape) == 1 and federation.x.dtype.kind == "f"
    if is_scaled or federation.is_mapped or not is_table:
        return given
    federation, task = federation.standardize(), plan.task
    if not federation.schema.classes:
        task = make_task(config, outputs_of(config, federation), federation.schema.target_scaling)
    scaled = replace(config, data=replace(config.data, standardize=True))
    return Setting(scaled, plan._replace(federation=federation, task=task))


def shortened(setting: Setting) -> Setting:
    """Return a short run on a part of the training data, with the rest as test data."""
    config, plan = setting
    federation = validation_of(with_two_samples(plan.federation), jax.random.key(config.seed_list[0]))
    cohort = config.schedule.cohort_size
    schedule = replace(
        config.schedule,
        num_rounds=min(MOST_ROUNDS, config.schedule.num_rounds),
        cohort_size=cohort if cohort == "all" or cohort <= federation.num_clients else "all",
        num_aggregated=None,
    )
    entries = {name: replace(entry, schedule=None) for name, entry in config.algorithms.items()}
    short = replace(config, seeds=config.seed_list[:MOST_SEEDS], schedule=schedule, algorithms=entries)
    return Setting(short, plan._replace(federation=federation, keys=plan.keys[:MOST_SEEDS]))


def check(given: Setting) -> None:
    """Raise unless the configuration's algorithms can be run, before anything is measured."""
    config, plan = shortened(given)
    for training in plan.trainings:
        if training.algorithm.sharing.divides:
            raise ConfigError(
                f"`algorithms.{training.name}` divides the model ({training.algorithm.sharing.describe()}). The "
                "constants and the advice are for models that are shared as a whole: inspect without this algorithm."
            )
        if find_statistics(plan.task, *plan.federation.first_sample) is not None:
            raise ConfigError(
                "The model has batch normalization, whose loss depends on the batch. The constants and the advice "
                "are for losses that are means over samples: inspect with a model without it."
            )
        work = work_of(training.algorithm, plan.task, plan.federation)
        make_schedules(config, training.algorithm, plan.federation.num_clients, work)


def validated(
    given: Setting, scaled: Setting, found: Measurements, notify: Callable[[str], None] = lambda text: None
) -> Advice:
    """Return the advice that scores best in a short run, or the given configuration if no advice beats it.

    The contenders are the recommended recipe with steps of 1 / L, 3 / L and 10 / L, and the algorithms of the
    configuration, also with standardized features.
    """
    notify("Short runs of your configuration and of the advice on validation data")
    advices = [advise(scaled.config, found, factor) for factor in FACTORS]
    own = _of_configuration("your configuration", given, advices[0])
    others = _of_advices(scaled, advices)
    if scaled is not given:
        others += _of_configuration("your configuration, standardized", scaled, advices[0])
    return choose(own, others, min(MOST_ROUNDS, found.num_rounds))


def choose(own: Sequence[Contender], others: Sequence[Contender], num_rounds: int) -> Advice:
    """Return the advice of the best of `others` if it beats the best of `own`, otherwise that of the latter.

    To beat it, its mean must be better by more than the standard error of the difference over clients.
    """
    evaluated = [one.found for one in (*own, *others) if one.found is not None]
    if not evaluated:
        advice = others[0].advice
        return replace(advice, sure=["All short runs diverged: use smaller steps.", *advice.sure])
    metric = headline_of(list(evaluated[0].metrics))
    mine, other = _best(own, metric), _best(others, metric)
    winner, verdict = _compare(mine, other, metric)
    runs = [one.short_run(metric) for one in (*own, *others)]
    num_seeds = len(np.atleast_2d(evaluated[0].of(metric)))
    validation = Validation(metric, num_rounds, num_seeds, runs, verdict)
    return replace(winner.advice, why=[verdict, *winner.advice.why], validation=validation)


def _compare(mine: Contender | None, other: Contender | None, metric: str) -> tuple[Contender, str]:
    """Return the winner and a sentence about it; at least one of the two did not diverge."""
    if mine is None or other is None:
        winner = mine or other
        assert winner is not None
        loser = "the advice" if winner is mine else "your configuration"
        return winner, f"In short runs on validation data, {loser} diverged, and {_name(winner, metric)}."
    scores, theirs = other.of_clients(metric), mine.of_clients(metric)
    assert scores is not None and theirs is not None  # otherwise it would not be the best
    gains = (scores - theirs) * (1 if higher_is_better(metric) else -1)
    error = _standard_error(gains)
    beats = bool(gains.mean() > error)
    verdict = (
        f"In short runs on validation data, {_name(other, metric)}, and {_name(mine, metric)}. The former is "
        f"{'better' if beats else 'not better'} by more than the standard error over clients: "
        f"{show(float(gains.mean()), metric)} ± {show(error, metric)}."
    )
    return (other, verdict) if beats else (mine, f"{verdict} Keep your configuration.")


def _name(one: Contender, metric: str) -> str:
    scores = one.of_clients(metric)
    assert scores is not None
    unit = " %" if show(1.0, metric) == "100.0" else ""
    return f"{one.algorithm} ({one.source}) has a mean {metric} of {show(float(scores.mean()), metric)}{unit}"


def _best(contenders: Sequence[Contender], metric: str) -> Contender | None:
    """Return the contender with the best mean, the first of equal ones; None if all diverged."""
    sign = 1 if higher_is_better(metric) else -1
    means = [(one, scores.mean()) for one in contenders if (scores := one.of_clients(metric)) is not None]
    return max(means, key=lambda pair: sign * pair[1])[0] if means else None


def _standard_error(of_clients: np.ndarray) -> float:
    num = len(of_clients)
    return float(of_clients.std(ddof=1) / np.sqrt(num)) if num > 1 else float("inf")


def _of_configuration(source: RunSource, setting: Setting, measured: Advice) -> list[Contender]:
    """Try the algorithms of a configuration; if one of them is the best, the advice is the configuration itself."""
    config = setting.config
    starter = dump(replace(config, name=starter_name(config)))
    how = " unchanged" if source == "your configuration" else " with standardized features"
    advices = [
        replace(
            measured,
            recipe=entry.recipe if isinstance(entry.recipe, str) else str(entry.recipe.get("path")),
            algorithm=name,
            summary=f"Start with your configuration{how}. Its best algorithm in short runs is {name}.",
            why=measured.why[:1],
            starter=starter,
        )
        for name, entry in config.algorithms.items()
    ]
    return _tried(source, setting, list(config.algorithms.items()), advices)


def _of_advices(setting: Setting, advices: Sequence[Advice]) -> list[Contender]:
    """Try the recommended recipe with each step size."""
    starters = [resolve(parse(tomllib.loads(advice.starter)), baselines=False) for advice in advices]
    entries = [
        (advice.algorithm, starter.algorithms[advice.algorithm])
        for advice, starter in zip(advices, starters, strict=True)
    ]
    return _tried("advice", setting, entries, advices)


def _tried(
    source: RunSource, setting: Setting, entries: Sequence[tuple[str, AlgorithmSection]], advices: Sequence[Advice]
) -> list[Contender]:
    """Train and score algorithms briefly on a part of the training data."""
    short = shortened(setting)
    trainings = [make_training(name, entry) for name, entry in entries]
    found = evaluations(*short, trainings)
    return [
        Contender(source, name, entry.options, one, advice)
        for (name, entry), one, advice in zip(entries, found, advices, strict=True)
    ]
