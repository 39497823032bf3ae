"""Controllers of a run: from the configuration, in checkpoints, and in messages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from personax.evaluation.scoring import Scoring
from personax.evaluation.validation import controlled
from personax.experiment.build import Study, Training
from personax.experiment.config import Config, ConfigError
from personax.experiment.records import EndRecord, RunRecord
from personax.schedules import Schedule
from personax.simulation.control import Control
from personax.simulation.results import Controlled, Snapshot
from personax.values import CONTROLLERS


def control_of(config: Config, plan: Study, training: Training, cohort: int) -> Control | None:
    """Make the control of one algorithm: its own, or that of the whole study; None without one.

    `cohort` is the number of updates that count as a round of an asynchronous server.
    """
    own = config.algorithms[training.name].controller
    section, where = (config.controller, "controller") if own is None else (own, _place(training.name))
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


def check_control(config: Config, plan: Study, training: Training, schedules: Sequence[Schedule]) -> None:
    """Raise before the run if the controller of an algorithm cannot work with its schedules."""
    control = control_of(config, plan, training, 1)
    if control is None:
        return
    where = "controller" if config.algorithms[training.name].controller is None else _place(training.name)
    try:
        control.check(schedules)
    except ValueError as error:
        raise ConfigError(f"`{where}`: {error}") from None


def _place(name: str) -> str:
    return f"algorithms.{name}.controller"


def controller_citations(config: Config, name: str) -> list[str]:
    """Return the citation keys of an algorithm's controller, and of those that it consists of."""
    section = config.algorithms[name].controller or config.controller
    return [] if section is None else list(_cited({"kind": section.kind, **section.options}))


def _cited(item: Any) -> Iterator[str]:
    """Yield the citations of the controllers in a table."""
    if isinstance(item, Mapping):
        kind = CONTROLLERS.kinds.get(str(item.get("kind")))
        yield from () if kind is None else kind.citations
        yield from (key for entry in item.values() for key in _cited(entry))
    elif isinstance(item, list | tuple):
        yield from (key for entry in item for key in _cited(entry))


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
            one["state"],
            tuple((first, cohort(members)) for first, members in one["chosen"]),
            one["ended"],
            one["wave"],
            tuple((event, num) for event, num in one["asked"]),
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
