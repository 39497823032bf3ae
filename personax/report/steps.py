"""The next steps after a run, as commands: those that make its findings firmer, and those that use its models."""

import shlex
from collections.abc import Iterator, Sequence

import numpy as np

from personax.evaluation.scores import higher_is_better
from personax.report.document import Bullets
from personax.report.runs import ReportedRun, Score

ENOUGH_SEEDS = 3
STILL_LEARNING = 0.05  # of a curve's whole gain, if it is made in the last quarter
Step = tuple[str, str]  # a command, or none, and what it is for


def steps(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Bullets:
    """The next steps for all runs."""
    found = [step for run in runs for step in _of_run(run, [score for score in scores if score.run is run])]
    first = shlex.quote(str(runs[0].folder))
    if len(runs) == 1:
        found.append((f"personax report {first} OTHER_RUN --out both.html", "Show this run beside another one."))
    return Bullets([*dict.fromkeys(found), (f"personax cite {first}", "BibTeX for what the run used.")])


def _of_run(run: ReportedRun, scores: Sequence[Score]) -> Iterator[Step]:
    """The steps that the numbers of a run suggest."""
    if not run.is_live:
        yield from _firmer(run, scores)
    able = [score for score in scores if not score.record.flag and score.algorithm.bytes_up]
    if able:
        words = "A personal model for a client that was not in training, from its own samples."
        yield f"personax personalize {shlex.quote(str(run.folder))} --data NEW.csv", words


def _firmer(run: ReportedRun, scores: Sequence[Score]) -> Iterator[Step]:
    """More seeds, more rounds, other options: what the numbers of a simulated run ask for."""
    folder = shlex.quote(str(run.folder))
    config = shlex.quote(str(run.folder / "config.toml"))
    for algorithm in (one for one in run.record.algorithms if one.divergences):
        again = f"personax resume {folder} --fresh {shlex.quote(algorithm.name)}"
        yield again, f"Train {algorithm.name}, which diverged, again; give it a smaller step size in config.toml first."
    num = len(run.record.seeds)
    if num < ENOUGH_SEEDS:
        lacks = "One seed has no interval." if num == 1 else f"The intervals of {num} seeds are wide."
        yield f"personax compare {config} --set seeds=5", f"{lacks} Run five."
    learning = [score.label for score in scores if _still_learns(score, run.record.headline)]
    if learning:
        why = f"{', '.join(learning)} still improved in the last quarter of the run."
        yield f"personax resume {folder}", f"{why} Raise schedule.num_rounds in config.toml first: the run continues."
    if run.record.tuning is None:
        words = "Tune the step sizes on validation data: the options of this run are those that were given."
        yield f"personax compare {config} --tune", words
    words = "Measure how much the clients differ, what the theorems allow, and where to start."
    yield f"personax inspect {config}", words


def _still_learns(score: Score, metric: str) -> bool:
    """Return True if the last quarter of a curve gained much of its height, beyond the noise of its seeds."""
    points = [(one.round, one.mean[metric]) for one in score.record.evaluations if metric in one.mean]
    if len(points) < 5 or not np.isfinite([of_seeds for _, of_seeds in points]).all():
        return False
    rounds, means = np.array([at for at, _ in points]), np.array([np.mean(of_seeds) for _, of_seeds in points])
    sign = 1 if higher_is_better(metric) else -1
    before = means[np.searchsorted(rounds, 0.75 * rounds[-1], side="right") - 1]
    noise = np.std(points[-1][1]) / np.sqrt(len(points[-1][1]))
    gain, whole = sign * (means[-1] - before), sign * (means[-1] - means[0])
    return bool(gain > max(STILL_LEARNING * whole, 2 * noise, 0))
