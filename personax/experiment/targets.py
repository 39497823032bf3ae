"""The cost of reaching a target: rounds, virtual time and bytes until each score reaches it."""

from collections.abc import Callable, Sequence

import numpy as np

from personax.evaluation.scores import Interval, higher_is_better, interval, is_share, show
from personax.experiment.records import AlgorithmRecord, EvaluationRecord, ReachedRecord, ScoreRecord, TargetRecord

CHOSEN = "the best that all scores reach in this run"


def target_of(algorithms: Sequence[AlgorithmRecord], metric: str, given: float | None) -> TargetRecord | None:
    """Record the cost at which each score reached a target by one metric; by default the best that all scores reach.

    Flagged scores, and those whose seeds all diverged, do not count for the default. Return None without any score.
    """
    scores = [(algorithm, score) for algorithm in algorithms for score in algorithm.scores]
    value = _common([score for _, score in scores if not score.flag], metric) if given is None else given
    if value is None:
        return None
    words = CHOSEN if given is None else "the target of the configuration"
    return TargetRecord(metric, value, words, [_reached(*one, metric, value) for one in scores])


def _common(scores: Sequence[ScoreRecord], metric: str) -> float | None:
    """The best value that the mean over seeds of every score reaches."""
    best = max if higher_is_better(metric) else min
    means = [[_mean(one.mean[metric]) for one in score.evaluations if metric in one.mean] for score in scores]
    reached = [best(finite) for own in means if (finite := [mean for mean in own if np.isfinite(mean)])]
    return (min if best is max else max)(reached) if reached else None


def _mean(of_seeds: Sequence[float]) -> float:
    """The mean over the seeds that have not diverged."""
    finite = [number for number in of_seeds if np.isfinite(number)]
    return float(np.mean(finite)) if finite else np.nan


def _reached(algorithm: AlgorithmRecord, score: ScoreRecord, metric: str, value: float) -> ReachedRecord:
    """The first evaluation of each seed at or above the target, or at or below it if lower is better."""
    evaluations = [one for one in score.evaluations if metric in one.mean]
    sign = 1 if higher_is_better(metric) else -1
    firsts: list[tuple[int, EvaluationRecord]] = []
    for seed in range(len(evaluations[0].mean[metric]) if evaluations else 0):
        good = (one for one in evaluations if sign * one.mean[metric][seed] >= sign * value)
        first = next(good, None)
        firsts += [] if first is None else [(seed, first)]
    over: Callable[[Callable[[int, EvaluationRecord], float]], Interval | None] = lambda of: (
        interval(np.asarray([of(*one) for one in firsts], float)) if firsts else None
    )
    counted = all(one.bytes_up for _, one in firsts)
    return ReachedRecord(
        algorithm=algorithm.name,
        score=score.name,
        num_reached=len(firsts),
        rounds=over(lambda seed, one: one.round),
        time=over(lambda seed, one: one.time[seed]),
        bytes=over(lambda seed, one: one.bytes_up[seed] + one.bytes_down[seed]) if counted else None,
    )


def describe(target: TargetRecord) -> str:
    """Describe the target.

    >>> describe(TargetRecord("accuracy", 0.8125, "the target of the configuration", []))
    'accuracy of 81.2 %, the target of the configuration'
    """
    value = f"{show(target.value, target.metric)} %" if is_share(target.metric) else f"{target.value:.4g}"
    return f"{target.metric} of {value}, {target.words}"
