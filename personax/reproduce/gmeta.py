"""Jamali 2025 (gMeta): Figure 1, section 5."""

from functools import partial
from typing import Any

import jax

from personax.algorithms import fedavg, per_fedavg
from personax.curvature import exact, finite_difference, first_order
from personax.data import datasets, partition
from personax.data.federation import Federation
from personax.evaluation.scoring import Scoring
from personax.models import mlp
from personax.models.tasks import classification
from personax.reproduce.choices import choices
from personax.reproduce.experiment import Cell, Claim, Experiment, PaperTraining, beats
from personax.schedules import rounds

SPLIT = 2025  # the seed of the split
NUM_CLIENTS, NUM_EACH, CONCENTRATION = 50, 1000, 0.01
ADAPT_LR, LR, NUM_STEPS, NUM_ADAPT_STEPS = 0.01, 0.001, 4, 3  # the paper's alpha, beta, tau, nu
FEDAVG, PER_FEDAVG, GMETA = "FedAvg", "Per-FedAvg, 1 step (HF)", "gMeta, 3 steps (HF)"
GMETA_EXACT, GMETA_FO = "gMeta, 3 steps (exact)", "gMeta, 3 steps (FO)"
ROW = "CIFAR-10, Dirichlet(0.01)"


def _federation() -> Federation:
    pool, key = datasets.cifar10(), jax.random.key(SPLIT)
    parts = partition.dirichlet(pool.y, NUM_CLIENTS, CONCENTRATION, num_per_client=NUM_EACH, key=key)
    return Federation.from_partition(pool.x, pool.y, *parts.split(0.2, key=key))


def figure1(quick: bool) -> Experiment:
    """Accuracy over rounds, after 3 fine-tuning steps for every algorithm."""
    local: dict[str, Any] = {"num_steps": NUM_STEPS, "batch_size": 40}
    meta = lambda hvp, num: per_fedavg(adapt_lr=ADAPT_LR, lr=LR, hvp=hvp, num_adapt_steps=num, **local)
    difference = finite_difference(1e-3)
    contestants = {
        FEDAVG: fedavg(lr=LR, **local),
        PER_FEDAVG: meta(difference, 1),
        GMETA: meta(difference, NUM_ADAPT_STEPS),
        GMETA_EXACT: meta(exact, NUM_ADAPT_STEPS),
        GMETA_FO: meta(first_order, NUM_ADAPT_STEPS),
    }
    tuned: dict[str, Any] = {"num_steps": NUM_ADAPT_STEPS, "lr": ADAPT_LR}
    readings = {
        "3 steps on training data": Scoring(**tuned),
        "3 steps on test data": Scoring(**tuned, adapt_on="test"),
    }
    num_rounds, every = (60, 10) if quick else (1000, 20)
    task = classification(mlp((80, 60), num_outputs=10, activation="elu"))
    schedule = partial(rounds, NUM_CLIENTS, num_rounds, 10)
    trainings = (
        PaperTraining("cifar10", task, algorithm, schedule, (Cell(ROW, name, readings),), every)
        for name, algorithm in contestants.items()
    )
    over = lambda other: beats(GMETA, other, (ROW,))
    return Experiment(
        name="gmeta-figure1",
        source="Jamali 2025, Figure 1, section 5",
        title="Accuracy over rounds, after 3 fine-tuning steps",
        length=f"{num_rounds} rounds",
        federations={"cifar10": _federation},
        trainings=tuple(trainings),
        num_seeds=2 if quick else 5,
        claims=(
            Claim("gMeta ends above Per-FedAvg", "section 5", over(PER_FEDAVG)),
            Claim("gMeta ends above FedAvg", "section 5", over(FEDAVG)),
            Claim("gMeta converges faster than Per-FedAvg", "section 5", over(PER_FEDAVG), at=0.2),
            Claim("gMeta converges faster than FedAvg", "section 5", over(FEDAVG), at=0.2),
        ),
        choices=choices("gmeta", "figure1"),
        quick=quick,
    )
