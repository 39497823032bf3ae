"""Suggested commands after a run: to make its findings more certain, and to use its models."""

import shlex
from collections.abc import Iterator, Sequence

import numpy as np

from personax.evaluation.scores import higher_is_better
from personax.report.document import Bullets
from personax.report.runs import ReportedRun, Score

ENOUGH_SEEDS = 3
STILL_LEARNING = 0.05  # the share of a curve's total gain that the last quarter must exceed
Step = tuple[str, str]  # a command, which may be empty, and its purpose


def steps(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Bullets:
    """List the next steps for all runs."""
    found = [step for run in runs for step in _of_run(run, [score for score in scores if score.run is run])]
    first = shlex.quote(str(runs[0].folder))
    if len(runs) == 1:
        found.append((f"personax report {first} OTHER_RUN --out both.html", "Show this run beside another."))
    return Bullets(
        [*dict.fromkeys(found), (f"personax cite {first}", "Print BibTeX entries for everything that the run used.")]
    )


def _of_run(run: ReportedRun, scores: Sequence[Score]) -> Iterator[Step]:
    """Yield the steps that the numbers of a run suggest."""
    if not run.is_live:
        yield from _firmer(run, scores)
    able = [score for score in scores if not score.record.flag and score.algorithm.bytes_up]
    if able:
        words = "Make a personal model for a new client from its own samples."
        yield f"personax personalize {shlex.quote(str(run.folder))} --data NEW.csv", words


def _firmer(run: ReportedRun, scores: Sequence[Score]) -> Iterator[Step]:
    """Yield steps for a simulated run: more seeds, more rounds, other options."""
    folder = shlex.quote(str(run.folder))
    config = shlex.quote(str(run.folder / "config.toml"))
    for algorithm in (one for one in run.record.algorithms if one.divergences):
        again = f"personax resume {folder} --fresh {shlex.quote(algorithm.name)}"
        yield again, f"Retrain {algorithm.name}, which diverged. Reduce its step size in config.toml first."
    num = len(run.record.seeds)
    if num < ENOUGH_SEEDS:
        lacks = "A single seed has no interval." if num == 1 else f"Intervals over {num} seeds are wide."
        yield f"personax compare {config} --set seeds=5", f"{lacks} Run five seeds."
    learning = [score.label for score in scores if _still_learns(score, run.record.headline)]
    if learning:
        why = f"{', '.join(learning)} still improved in the last quarter."
        yield f"personax resume {folder}", f"{why} Increase schedule.num_rounds in config.toml, then resume."
    if run.record.tuning is None:
        words = "Tune the step sizes on validation data; this run was not tuned."
        yield f"personax compare {config} --tune", words
    words = "Measure how much clients differ and which settings the theorems allow, and get a starting configuration."
    yield f"personax inspect {config}", words


def _still_learns(score: Score, metric: str) -> bool:
    """Return True if the last quarter of a curve still improved noticeably, beyond the noise over seeds."""
    points = [(one.round, one.mean[metric]) for one in score.record.evaluations if metric in one.mean]
    if len(points) < 5 or not np.isfinite([of_seeds for _, of_seeds in points]).all():
        return False
    rounds, means = np.array([at for at, _ in points]), np.array([np.mean(of_seeds) for _, of_seeds in points])
    sign = 1 if higher_is_better(metric) else -1
    before = means[np.searchsorted(rounds, 0.75 * rounds[-1], side="right") - 1]
    noise = np.std(points[-1][1]) / np.sqrt(len(points[-1][1]))
    gain, whole = sign * (means[-1] - before), sign * (means[-1] - means[0])
    return bool(gain > max(STILL_LEARNING * whole, 2 * noise, 0))
