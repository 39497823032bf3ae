"""Jamali 2025 (gMeta): Figure 1, section 5."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from personax.algorithms import Algorithm, fedavg, per_fedavg
from personax.curvature import exact, finite_difference, first_order
from personax.data import datasets, partition
from personax.data.federation import Federation
from personax.evaluation.scoring import Scoring
from personax.models import mlp, standardized
from personax.models.tasks import classification
from personax.reproduce.choices import choices
from personax.reproduce.experiment import (
    MAIN,
    OF_CIFAR,
    Cell,
    Claim,
    Experiment,
    PaperTraining,
    Reading,
    baselines,
    beats,
)
from personax.schedules import rounds
from personax.typing import Task

SPLIT = 2025  # the seed of the split
NUM_CLIENTS, COHORT, NUM_EACH, CONCENTRATION = 50, 10, 1000, 0.01
ADAPT_LR, LR, NUM_STEPS, NUM_ADAPT_STEPS = 0.01, 0.001, 4, 3  # the paper's alpha, beta, tau, nu
FEDAVG, PER_FEDAVG, GMETA = "FedAvg", "Per-FedAvg, 1 step (HF)", "gMeta, 3 steps (HF)"
GMETA_EXACT, GMETA_FO = "gMeta, 3 steps (exact)", "gMeta, 3 steps (FO)"
ROW = "CIFAR-10, Dirichlet(0.01)"
WIDTHS = (80, 60)

ELU = classification(mlp(WIDTHS, num_outputs=10, activation="elu"))
RELU = classification(standardized(mlp(WIDTHS, num_outputs=10, activation="relu", init="fan_in"), *OF_CIFAR))
# For each reading: its row, the concentration of its split, and its network.
ROWS: dict[str, tuple[str, float, Task]] = {
    MAIN.name: (ROW, CONCENTRATION, ELU),
    "PyTorch": (f"{ROW}; PyTorch", CONCENTRATION, RELU),
    "PyTorch, 0.1": ("CIFAR-10, Dirichlet(0.1); PyTorch", 0.1, RELU),
    "PyTorch, 1": ("CIFAR-10, Dirichlet(1); PyTorch", 1.0, RELU),
}
_PYTORCH = "ReLU, PyTorch's initialization, standardized inputs"
READINGS = (
    Reading(MAIN.name, "ELU, Glorot-normal kernels and zero biases, pixels in [0, 1].", "our choice"),
    Reading("PyTorch", f"{_PYTORCH}; concentration 0.01, as in the paper.", "our choice"),
    *(
        Reading(
            f"PyTorch, {given}",
            f"{_PYTORCH}; concentration {given} instead of 0.01, so that clients hold more classes.",
            "our choice",
        )
        for given in ("0.1", "1")
    ),
)


def _federation(concentration: float) -> Federation:
    pool, key = datasets.cifar10(), jax.random.key(SPLIT)
    parts = partition.dirichlet(pool.y, NUM_CLIENTS, concentration, num_per_client=NUM_EACH, key=key)
    return Federation.from_partition(pool.x, pool.y, *parts.split(0.2, key=key))


def _contestants() -> dict[str, Algorithm]:
    local: dict[str, Any] = {"num_steps": NUM_STEPS, "batch_size": 40}
    meta = lambda hvp, num: per_fedavg(adapt_lr=ADAPT_LR, lr=LR, hvp=hvp, num_adapt_steps=num, **local)
    difference = finite_difference(1e-3)
    return {
        FEDAVG: fedavg(lr=LR, **local),
        PER_FEDAVG: meta(difference, 1),
        GMETA: meta(difference, NUM_ADAPT_STEPS),
        GMETA_EXACT: meta(exact, NUM_ADAPT_STEPS),
        GMETA_FO: meta(first_order, NUM_ADAPT_STEPS),
    }


def _trainings(train: Callable[..., PaperTraining], reading: str) -> list[PaperTraining]:
    """Return the trainings of a reading (all approximations in the first one) and the baselines."""
    row, _, task = ROWS[reading]
    tuned: dict[str, Any] = {"num_steps": NUM_ADAPT_STEPS, "lr": ADAPT_LR}
    scorings = {
        "3 steps on training data": Scoring(**tuned),
        "3 steps on test data": Scoring(**tuned, adapt_on="test"),
    }
    cells = lambda name: (
        Cell(row, name, scorings, reading=reading),
        *(baselines(row, scorings, reading) if name == FEDAVG else ()),
    )
    wanted = tuple(_contestants()) if reading == MAIN.name else (FEDAVG, PER_FEDAVG, GMETA)
    return [train(reading, task, _contestants()[name], cells=cells(name)) for name in wanted]


def figure1(quick: bool) -> Experiment:
    """Reproduce Figure 1: accuracy over rounds, after 3 fine-tuning steps for every algorithm."""
    num_rounds, every = (60, 10) if quick else (1000, 20)
    train = partial(PaperTraining, schedule=partial(rounds, NUM_CLIENTS, num_rounds, COHORT), every=every)
    readings = READINGS[:2] if quick else READINGS
    trainings = [training for one in readings for training in _trainings(train, one.name)]
    rows = [ROWS[one.name][0] for one in readings]
    over = lambda other: beats(GMETA, other, rows)
    return Experiment(
        name="gmeta-figure1",
        source="Jamali 2025, Figure 1, section 5",
        title="Accuracy over rounds, after 3 fine-tuning steps",
        length=f"{num_rounds} rounds",
        federations={name: partial(_federation, concentration) for name, (_, concentration, _) in ROWS.items()},
        trainings=tuple(trainings),
        num_seeds=2 if quick else 5,
        claims=(
            Claim("gMeta ends above Per-FedAvg", "section 5", over(PER_FEDAVG)),
            Claim("gMeta ends above FedAvg", "section 5", over(FEDAVG)),
            Claim("gMeta converges faster than Per-FedAvg", "section 5", over(PER_FEDAVG), at=0.2),
            Claim("gMeta converges faster than FedAvg", "section 5", over(FEDAVG), at=0.2),
        ),
        choices=choices("gmeta", "figure1"),
        readings=readings,
        needs=("cifar10",),
        quick=quick,
    )
