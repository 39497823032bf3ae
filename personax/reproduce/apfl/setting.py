"""What APFL's tables and figures share: names, readings, choices, and who is trained on what (section 5)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from personax.algorithms import Algorithm, apfl, fedavg, scaffold
from personax.client.step_sizes import Decay, InverseDecay, StepSize
from personax.data import partition
from personax.data.datasets import Pool
from personax.data.federation import Federation
from personax.data.partition import Partition
from personax.evaluation.scoring import Scoring
from personax.models import logistic_regression, mlp
from personax.models.tasks import classification
from personax.reproduce.choices import choices
from personax.reproduce.experiment import Cell, Experiment
from personax.schedules import rounds
from personax.typing import Array

SPLIT = 2003  # the seed of the splits
NUM_CLIENTS, BATCH, LR = 100, 20, 0.1
MIXES = (0.25, 0.5, 0.75)
FEDAVG, LOCALIZED_FEDAVG = "FedAvg, global", "FedAvg, localized"
SCAFFOLD, LOCALIZED_SCAFFOLD = "SCAFFOLD, global", "SCAFFOLD, localized"
ADAPTIVE, FROM_LITTLE = "APFL, adaptive from 0.5", "APFL, adaptive from 0.01"
PER_FEDAVG, PFEDME = "perFedAvg", "pFedMe"
FIXED = tuple(f"APFL, {mix}" for mix in MIXES)
MIXED = (*FIXED, ADAPTIVE)
ALL_MIXED = (*MIXED, FROM_LITTLE)
LOCALIZED = (LOCALIZED_FEDAVG, LOCALIZED_SCAFFOLD)

# What a linear decay with respect to local steps (Bottou 2012), by 1 % at each iteration, may mean.
DECAYS: dict[str, Callable[[float, float], StepSize]] = {
    "each step, geometric": partial(Decay, clock="step"),
    "each step, 1/(1 + t)": partial(InverseDecay, clock="step"),
    "each round, geometric": partial(Decay, clock="round"),
    "each round, 1/(1 + t)": partial(InverseDecay, clock="round"),
}
CHOSEN = "each round, geometric"  # for the figures, which have no numbers to tell

SCORED: dict[str, Any] = {
    FEDAVG: "global",
    LOCALIZED_FEDAVG: "localized",
    SCAFFOLD: "global",
    LOCALIZED_SCAFFOLD: "localized",
}  # all others: personal

chosen = partial(choices, "apfl", "common", decay=CHOSEN)  # what was chosen, in words


def loss_of(row: str) -> str:
    """The row with a setting's training losses."""
    return f"{row}: training loss"


def accuracy_of(row: str) -> str:
    """The row with a setting's validation accuracies."""
    return f"{row}: validation accuracy"


def cells_of(row: str, columns: Iterable[str], paper: Mapping[str, Any] = {}, **scored: Any) -> tuple[Cell, ...]:
    """Training loss and validation accuracy of each column that one training fills."""
    cells = []
    for column in columns:
        readings = {"ours": protocol_of(column, **scored)}
        if column == PER_FEDAVG:
            readings["after 20 steps"] = replace(readings["ours"], num_steps=20)
        loss, accuracy = paper.get(column, (None, None))
        cells.append(Cell(loss_of(row), column, readings, loss, "train_loss"))
        cells.append(Cell(accuracy_of(row), column, readings, accuracy))
    return tuple(cells)


def protocol_of(column: str, **scored: Any) -> Scoring:
    """What a column scores: a global, a localized or a personal model."""
    if column == PER_FEDAVG:
        return Scoring("adapted", 1, 0.01, BATCH, score_on="both", **scored)
    return Scoring(SCORED.get(column, "personal"), score_on="both", **scored)


online_cells = partial(cells_of, clients="cohort")  # averaged over the clients online, as in the tables


def contestants_of(lr: StepSize, scaffold_lr: StepSize, **local: Any) -> dict[tuple[str, ...], Algorithm]:
    """Who is trained, by the columns that each fills."""
    mixed = {(name,): apfl(lr=lr, mix=mix, update_mix="never", **local) for name, mix in zip(FIXED, MIXES, strict=True)}
    return {
        **mixed,
        (ADAPTIVE,): apfl(lr=lr, mix=0.5, update_mix="round", **local),
        (FROM_LITTLE,): apfl(lr=lr, mix=0.01, update_mix="round", **local),
        (FEDAVG, LOCALIZED_FEDAVG): fedavg(lr=lr, **local),
        (SCAFFOLD, LOCALIZED_SCAFFOLD): scaffold(lr=scaffold_lr, option=2, **local),
    }


def divided(load: Callable[[], Pool], divide: Callable[..., Partition], num_clients: int) -> Callable[[], Federation]:
    """A pool divided by label, 20 % of each client's part kept for validation."""

    def make() -> Federation:
        pool, key = load(), jax.random.key(SPLIT)
        parts = divide(pool.y, num_clients, key=key)
        return Federation.from_partition(pool.x, pool.y, *parts.split(0.2, key=key))

    return make


def by_classes(load: Callable[[], Pool], num_classes_each: int, num_clients: int) -> Callable[[], Federation]:
    """A pool divided so that a client has this many classes; all 10 are IID."""

    def divide(labels: np.ndarray, num_clients: int, *, key: Array) -> Partition:
        if num_classes_each == 10:
            return partition.iid(labels, num_clients, key=key)
        return partition.classes_per_client(labels, num_clients, num_classes_each, key=key)

    return divided(load, divide, num_clients)


def size_of(quick: bool, num_rounds: int = 100) -> dict[str, int]:
    """How much is done."""
    return {"num_clients": 20, "num_rounds": 5} if quick else {"num_clients": NUM_CLIENTS, "num_rounds": num_rounds}


def online(size: Mapping[str, int], share: float = 1.0) -> partial:
    """Rounds with this share of the clients online."""
    return partial(rounds, size["num_clients"], size["num_rounds"], round(share * size["num_clients"]))


def experiment_of(quick: bool, size: Mapping[str, int], num_seeds: int = 3, **parts: Any) -> Experiment:
    """An experiment of this size."""
    length = f"{size['num_rounds']} rounds, {size['num_clients']} clients"
    return Experiment(length=length, num_seeds=2 if quick else num_seeds, quick=quick, **parts)


LOGISTIC = classification(logistic_regression(10, init="fan_in"), l2=1e-4)
MLP = classification(mlp((200, 200), num_outputs=10, activation="relu", init="fan_in"))
