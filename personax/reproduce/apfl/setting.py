"""Shared parts of APFL's tables and figures: names, readings, choices, algorithms and federations (section 5)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

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
from personax.objectives import Mixture
from personax.reproduce.apfl.variants import WithCopy
from personax.reproduce.choices import choices
from personax.reproduce.experiment import MAIN, Cell, Experiment, baselines
from personax.schedules import rounds
from personax.typing import Array, Clock

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

# Interpretations of "linear decay with respect to local steps" (Bottou 2012) by 1 % at each iteration.
DECAYS: dict[str, Callable[[float, float], StepSize]] = {
    "each step, geometric": partial(Decay, clock="step"),
    "each step, 1/(1 + t)": partial(InverseDecay, clock="step"),
    "each round, geometric": partial(Decay, clock="round"),
    "each round, 1/(1 + t)": partial(InverseDecay, clock="round"),
}
CHOSEN = "each round, geometric"  # also for the figures, which have no numbers to decide by

SCORED: dict[str, Any] = {
    FEDAVG: "global",
    LOCALIZED_FEDAVG: "localized",
    SCAFFOLD: "global",
    LOCALIZED_SCAFFOLD: "localized",
}  # all others are personal

chosen = partial(choices, "apfl", "common", decay=CHOSEN)  # describes our choices


def loss_of(row: str) -> str:
    """Return the name of the row with a setting's training losses."""
    return f"{row}: training loss"


def accuracy_of(row: str) -> str:
    """Return the name of the row with a setting's validation accuracies."""
    return f"{row}: validation accuracy"


def cells_of(
    row: str,
    columns: Iterable[str],
    paper: Mapping[str, Any] = {},
    *,
    reading: str = MAIN.name,
    plain: Mapping[str, Scoring] = {},
    **scored: Any,
) -> tuple[Cell, ...]:
    """Return the training-loss and accuracy cells of each column that one training fills; FedAvg adds baselines."""
    cells = []
    for column in columns:
        scorings = scorings_of(column, plain, **scored)
        loss, accuracy = paper.get(column, (None, None))
        cells.append(Cell(loss_of(row), column, scorings, loss, "train_loss", reading))
        cells.append(Cell(accuracy_of(row), column, scorings, accuracy, reading=reading))
        if column == FEDAVG:
            cells += baselines(accuracy_of(row), {"after a round's local steps": Scoring("localized")}, reading)
    return tuple(cells)


def scorings_of(column: str, plain: Mapping[str, Scoring] = {}, **scored: Any) -> dict[str, Scoring]:
    """Return the scorings of a column, with the paper's first.

    Section 3 mixes the client's own copy of the shared model from before the average. Localized models are the shared
    model after plain local steps (section 5); `plain` has them for SCAFFOLD, whose own steps include corrections.
    """
    here = partial(Scoring, score_on="both", **scored)
    if column in (*ALL_MIXED,):
        return {"own copy": here("own_copy"), "average": here("personal")}
    if column == LOCALIZED_SCAFFOLD:
        return {
            **{name: replace(one, score_on="both", **scored) for name, one in plain.items()},
            "with corrections": here("localized"),
        }
    if column == PER_FEDAVG:
        return {f"after {num} step{'s' * (num > 1)}": here("adapted", num, 0.01, BATCH) for num in (1, 20)}
    return {"ours": here(SCORED.get(column, "personal"))}


def plain_steps(lr: StepSize, other: StepSize, num_rounds: int, num_steps: int) -> dict[str, Scoring]:
    """Return plain local steps from the last shared model, with the final step size and with FedAvg's if different."""
    now = Clock(num_rounds, 0, num_steps)
    sizes = {"plain steps": lr} | ({"plain steps of FedAvg's size": other} if other != lr else {})
    return {name: Scoring("adapted", num_steps, float(of(now)), BATCH) for name, of in sizes.items()}


online_cells = partial(cells_of, clients="cohort")  # averaged over online clients, as in the tables


def mixture(**options: Any) -> Algorithm:
    """Return the recipe `apfl`, with clients that also keep their copy of the shared model from before the average."""
    made = apfl(**options)
    return replace(made, objective=WithCopy(cast(Mixture, made.objective)))


def contestants_of(lr: StepSize, scaffold_lr: StepSize, **local: Any) -> dict[tuple[str, ...], Algorithm]:
    """Return the algorithms to train, by the columns that each fills."""
    mixed = {
        (name,): mixture(lr=lr, mix=mix, update_mix="never", **local) for name, mix in zip(FIXED, MIXES, strict=True)
    }
    return {
        **mixed,
        (ADAPTIVE,): mixture(lr=lr, mix=0.5, update_mix="round", **local),
        (FROM_LITTLE,): mixture(lr=lr, mix=0.01, update_mix="round", **local),
        (FEDAVG, LOCALIZED_FEDAVG): fedavg(lr=lr, **local),
        (SCAFFOLD, LOCALIZED_SCAFFOLD): scaffold(lr=scaffold_lr, option=2, **local),
    }


def divided(load: Callable[[], Pool], divide: Callable[..., Partition], num_clients: int) -> Callable[[], Federation]:
    """Return a maker of a pool divided by label, with 20 % of each client's part held out for validation."""

    def make() -> Federation:
        pool, key = load(), jax.random.key(SPLIT)
        parts = divide(pool.y, num_clients, key=key)
        return Federation.from_partition(pool.x, pool.y, *parts.split(0.2, key=key))

    return make


def by_classes(load: Callable[[], Pool], num_classes_each: int, num_clients: int) -> Callable[[], Federation]:
    """Return a maker of a pool divided so that each client has this many classes; all 10 is IID."""

    def divide(labels: np.ndarray, num_clients: int, *, key: Array) -> Partition:
        if num_classes_each == 10:
            return partition.iid(labels, num_clients, key=key)
        return partition.classes_per_client(labels, num_clients, num_classes_each, key=key)

    return divided(load, divide, num_clients)


def size_of(quick: bool, num_rounds: int = 100) -> dict[str, int]:
    """Return the numbers of clients and rounds."""
    return {"num_clients": 20, "num_rounds": 5} if quick else {"num_clients": NUM_CLIENTS, "num_rounds": num_rounds}


def online(size: Mapping[str, int], share: float = 1.0) -> partial:
    """Return a maker of rounds with this share of the clients online."""
    return partial(rounds, size["num_clients"], size["num_rounds"], round(share * size["num_clients"]))


def experiment_of(quick: bool, size: Mapping[str, int], num_seeds: int = 3, **parts: Any) -> Experiment:
    """Return an experiment of this size."""
    length = f"{size['num_rounds']} rounds, {size['num_clients']} clients"
    return Experiment(length=length, num_seeds=2 if quick else num_seeds, quick=quick, **parts)


LOGISTIC = classification(logistic_regression(10, init="fan_in"), l2=1e-4)
MLP = classification(mlp((200, 200), num_outputs=10, activation="relu", init="fan_in"))
