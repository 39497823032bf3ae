"""Records and descriptions of seeds that diverged."""

from collections.abc import Sequence

import numpy as np

from personax.data.federation import Federation
from personax.experiment.config import Config
from personax.experiment.records import AlgorithmRecord, DivergenceRecord, RunRecord
from personax.simulation.results import Fault, NonFiniteUpdate, Snapshot

REMEDY = 'Use smaller step sizes or `clip_norm`, or skip such updates: `on_nonfinite = "skip"`.'


def diverged_seeds(config: Config, snapshot: Snapshot) -> list[int]:
    """Return the positions of the seeds that diverged, because one of their updates was not finite."""
    return [fault.seed for fault in snapshot.faults] if config.on_nonfinite == "diverge" else []


def divergence_records(
    config: Config, federation: Federation, snapshot: Snapshot, cohort: int
) -> list[DivergenceRecord]:
    """Return a record for each seed that diverged."""
    faults = snapshot.faults if config.on_nonfinite == "diverge" else []
    return [_record(fault, config, federation, cohort) for fault in faults]


def _record(fault: Fault, config: Config, federation: Federation, cohort: int) -> DivergenceRecord:
    seed, client = config.seed_list[fault.seed], federation.names[fault.client]
    return DivergenceRecord(seed, fault.event // cohort + 1, fault.event, client, fault.stage)


def masked(of_seeds: Sequence[float] | None, diverged: Sequence[int]) -> list[float] | None:
    """Replace the values of seeds that diverged by NaN."""
    if of_seeds is None:
        return None
    return [np.nan if seed in diverged else float(number) for seed, number in enumerate(of_seeds)]


def describe(divergences: Sequence[DivergenceRecord]) -> str:
    """Describe the first divergence of an algorithm.

    >>> describe([DivergenceRecord(2, 7, 61, "anna", "local steps"), DivergenceRecord(0, 9, 85, "ben", "local steps")])
    'diverged at round 7 (anna, seed 2)'
    """
    first = min(divergences, key=lambda one: one.event)
    return f"diverged at round {first.round} ({first.client}, seed {first.seed})"


def has_numbers(algorithm: AlgorithmRecord, num_seeds: int) -> bool:
    """Return True unless all seeds of an algorithm diverged."""
    return len(algorithm.divergences) < num_seeds


def warnings(record: RunRecord) -> list[str]:
    """Return one sentence for each algorithm that diverged, and the remedy."""
    num, sentences = len(record.seeds), []
    for algorithm in record.algorithms:
        if algorithm.divergences:
            left = num - len(algorithm.divergences)
            of_seeds = "" if num == 1 else f"; {left} of {num} seeds {'is' if left == 1 else 'are'} left"
            sentences.append(f"{algorithm.name} {describe(algorithm.divergences)}{of_seeds}.")
    return [*sentences, REMEDY] if sentences else []


def named_error(name: str, error: NonFiniteUpdate, config: Config, federation: Federation, cohort: int) -> Exception:
    """Make the error for a nonfinite update, for runs in which it is an error."""
    if error.fault is None:
        return error
    found = _record(error.fault, config, federation, cohort)
    return NonFiniteUpdate(
        f"{name} {describe([found])}: the update at event {found.event} is not finite ({found.stage}). Use smaller "
        'step sizes or `clip_norm`, or set `on_nonfinite = "diverge"` or "skip".',
        error.fault,
    )
