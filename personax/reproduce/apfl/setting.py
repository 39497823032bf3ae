"""What APFL's tables and figures share: names, readings, choices, and who is trained on what (section 5)."""

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


def cells_of(
    row: str,
    columns: Iterable[str],
    paper: Mapping[str, Any] = {},
    *,
    reading: str = MAIN.name,
    plain: Mapping[str, Scoring] = {},
    **scored: Any,
) -> tuple[Cell, ...]:
    """Training loss and validation accuracy of each column that one training fills; with FedAvg the rows without."""
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
    """The ways to score a column, that of the text first.

    Section 3 mixes the client's own copy of the shared model, from before the average; localized models are the shared
    one after plain local steps (section 5), given in `plain` for SCAFFOLD, whose own steps have corrections.
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
    """Plain local steps from the last shared model: of the training's size by then, and of FedAvg's if it differs."""
    now = Clock(num_rounds, 0, num_steps)
    sizes = {"plain steps": lr} | ({"plain steps of FedAvg's size": other} if other != lr else {})
    return {name: Scoring("adapted", num_steps, float(of(now)), BATCH) for name, of in sizes.items()}


online_cells = partial(cells_of, clients="cohort")  # averaged over the clients online, as in the tables


def mixture(**options: Any) -> Algorithm:
    """The recipe `apfl`, whose clients also keep their copy of the shared model from before the average."""
    made = apfl(**options)
    return replace(made, objective=WithCopy(cast(Mixture, made.objective)))


def contestants_of(lr: StepSize, scaffold_lr: StepSize, **local: Any) -> dict[tuple[str, ...], Algorithm]:
    """Who is trained, by the columns that each fills."""
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
    """The numbers of clients and rounds."""
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
