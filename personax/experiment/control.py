"""Controllers of a run: from the configuration, in checkpoints, and in messages."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from personax.evaluation.scoring import Scoring
from personax.evaluation.validation import controlled
from personax.experiment.build import Study, Training
from personax.experiment.config import Config, ConfigError, ControllerSection
from personax.experiment.records import EndRecord, RunRecord
from personax.simulation.control import Control
from personax.simulation.results import Controlled, Snapshot
from personax.values import CONTROLLERS

_OWN = ("kind", "every")


def control_of(config: Config, plan: Study, training: Training, cohort: int) -> Control | None:
    """Make the control of one algorithm: its own, or that of the whole study; None without one.

    `cohort` is the number of updates that count as a round of an asynchronous server.
    """
    section, where = _section_of(config, training.name)
    if section is None:
        return None
    controller = CONTROLLERS.make({"kind": section.kind, **section.options}, where)
    if controller.needs_score and plan.validation is None:
        raise ConfigError(
            f"`{where}` needs a validation score, but there is no validation data. Set `split.validation_share`, for "
            "example to 0.2 of each client's training data."
        )
    waits = training.algorithm.server.is_synchronous
    if controller.selects and not waits:
        raise ConfigError(
            f"`{where}` chooses cohorts, but `{training.name}` is asynchronous. Use `[algorithms.NAME.controller]` for "
            "each synchronous algorithm instead."
        )
    try:
        return controlled(
            controller,
            training.algorithm,
            plan.task,
            plan.validation,
            _validation_scoring(training),
            training=plan.federation,
            every=section.every * (1 if waits else cohort),
            key=plan.keys,
        )
    except ValueError as error:
        raise ConfigError(f"`{where}`: {error}") from None


def _section_of(config: Config, name: str) -> tuple[ControllerSection | None, str]:
    """Return the controller section of an algorithm and its place in the configuration."""
    own = config.algorithms[name].controller
    if own is None:
        return config.controller, "controller"
    options = {key: item for key, item in own.items() if key not in _OWN}
    where = f"algorithms.{name}.controller"
    if "kind" not in own:
        raise ConfigError(f"`{where}` needs `kind`. Add it.")
    return ControllerSection(**{key: own[key] for key in _OWN if key in own}, options=options), where


def _validation_scoring(training: Training) -> Scoring:
    """The first scoring of an algorithm, on the validation data of all clients."""
    return replace(next(iter(training.scorings.values())), clients="all", score_on="test")


def to_json(control: Sequence[Controlled]) -> list[dict[str, Any]]:
    """Return the control of all seeds as JSON for a checkpoint."""
    return [asdict(one) for one in control]


def from_json(about: Mapping[str, Any]) -> tuple[Controlled, ...]:
    """Read the control of all seeds from a checkpoint; empty without a controller."""
    cohort = lambda members: None if members is None else tuple(members)
    return tuple(
        Controlled(
            one["state"], tuple((first, cohort(members)) for first, members in one["chosen"]), one["ended"], one["wave"]
        )
        for one in about.get("control", [])
    )


def end_records(config: Config, snapshot: Snapshot, cohort: int) -> list[EndRecord]:
    """Record the seeds that a controller ended."""
    events = np.atleast_1d(snapshot.num_events)
    return [
        EndRecord(config.seed_list[seed], int(events[seed]) // cohort, one.ended)
        for seed, one in enumerate(snapshot.control)
        if one.ended
    ]


def endings(record: RunRecord) -> list[str]:
    """Return one sentence for each algorithm that a controller ended early.

    >>> endings(record)  # doctest: +SKIP
    ['FedAvg ended early, at round 40 of 100: the budget of 1e+06 bytes is spent.']
    """
    sentences = []
    for algorithm in record.algorithms:
        if algorithm.ended:
            rounds = [one.round for one in algorithm.ended]
            low, high, num = min(rounds), max(rounds), len(record.seeds)
            when = f"round {low}" if low == high else f"rounds {low} to {high}"
            seeds = "" if len(rounds) == num else f" ({len(rounds)} of {num} seeds)"
            sentences.append(f"{algorithm.name} ended early, at {when}{seeds}: {algorithm.ended[0].reason}.")
    return sentences
