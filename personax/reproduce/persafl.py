"""PersA-FL 2023: Figure 2 (section 5, appendix D)."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np

from personax.algorithms import (
    HESSIAN_FREE,
    Algorithm,
    fedasync,
    fedavg,
    fedprox,
    per_fedavg,
    persafl,
    pfedme,
    scaffold,
)
from personax.data import datasets, partition
from personax.data.datasets import Pool
from personax.data.federation import Federation
from personax.evaluation.scoring import Scoring
from personax.models import cnn2, cnn3
from personax.models.tasks import classification
from personax.objectives import Meta, Moreau
from personax.reproduce.choices import choices
from personax.reproduce.experiment import ActiveShare, Cell, Claim, Contrast, Experiment, PaperTraining, beats
from personax.schedules import Schedule, arrivals, persafl_delays, rounds
from personax.server import asynchronous, synchronous
from personax.typing import Array

SPLIT = 2210  # the seed of the split, and of the delays
NUM_CLIENTS, COHORT = 30, 10
NUM_STEPS, LR, BATCH = 10, 0.01, 32  # the paper's Q and eta
STRENGTHS, ADAPT_LRS, SERVER_LRS = (20.0, 25.0, 30.0), (0.002, 0.005, 0.01), (0.8, 1.0, 1.2)
BUDGET, PROX_LR = 10, 0.01  # steps of every model's personalization, and of the inner problem
DROPOUT = 0.25
HORIZONS = {"mnist": 450.0, "cifar10": 600.0}
FEDAVG, FEDPROX, SCAFFOLD, PER_FEDAVG, PFEDME = "FedAvg", "FedProx", "SCAFFOLD", "Per-FedAvg", "pFedMe"
FEDASYNC, MAML, ME = "FedAsync", "PersA-FL-MAML", "PersA-FL-ME"
OURS, SYNCHRONOUS = (MAML, ME), (FEDAVG, FEDPROX, SCAFFOLD, PER_FEDAVG, PFEDME)
ACTIVE = "(a) active clients"
PANELS = {"mnist": "(b) MNIST, c = 5", "cifar10": "(c) CIFAR-10, c = 3"}

FILLED = {"cohort": COHORT, "num_clients": NUM_CLIENTS, "budget": BUDGET, "batch": BATCH, "lr": LR, "prox_lr": PROX_LR}


def _by_classes(load: Callable[[], Pool], num_classes_each: int, num_clients: int) -> Callable[[], Federation]:
    def make() -> Federation:
        pool, key = load(), jax.random.key(SPLIT)
        divide = partial(partition.classes_per_client, num_clients=num_clients, num_classes_each=num_classes_each)
        train, test = divide(pool.y, key=key), divide(pool.test_y, key=key)
        return Federation.from_partition(pool.x, pool.y, train, test, test_x=pool.test_x, test_y=pool.test_y)

    return make


def _searched() -> dict[str, dict[str, Algorithm]]:
    """Every algorithm with its candidates: the server's step and, where there is one, its own number."""
    local: dict[str, Any] = {"num_steps": NUM_STEPS, "batch_size": BATCH}
    inner = {"prox_lr": PROX_LR, "num_prox_steps": BUDGET}
    plain: dict[str, Callable[..., Algorithm]] = {
        FEDAVG: partial(fedavg, lr=LR, **local),
        FEDPROX: partial(fedprox, strength=0.1, lr=LR, **local),
        SCAFFOLD: partial(scaffold, lr=LR, option=2, **local),
        FEDASYNC: partial(fedasync, lr=LR, **local),
    }
    meta: dict[str, Callable[..., Algorithm]] = {
        PER_FEDAVG: lambda adapt_lr, server: per_fedavg(
            adapt_lr=adapt_lr, lr=LR, hvp=HESSIAN_FREE, server=server, **local
        ),
        MAML: lambda adapt_lr, server: persafl(Meta(adapt_lr, 1, HESSIAN_FREE), lr=LR, server=server, **local),
    }
    envelope: dict[str, Callable[..., Algorithm]] = {
        PFEDME: lambda strength, server: pfedme(strength=strength, lr=LR, **inner, server=server, **local),
        ME: lambda strength, server: persafl(Moreau(strength, **inner), lr=LR, server=server, **local),
    }
    found: dict[str, dict[str, Algorithm]] = {}
    for name in (*SYNCHRONOUS, FEDASYNC, *OURS):
        serve = synchronous if name in SYNCHRONOUS else asynchronous
        if name in plain:
            found[name] = {f"server {lr}": plain[name](server=serve(lr)) for lr in SERVER_LRS}
        else:
            make, own = (meta[name], ADAPT_LRS) if name in meta else (envelope[name], STRENGTHS)
            found[name] = {f"{one}, server {lr}": make(one, serve(lr)) for one, lr in product(own, SERVER_LRS)}
    return found


def _budgeted(name: str) -> Mapping[str, Scoring]:
    model = "recomputed" if name in (PFEDME, ME) else "adapted"
    return {f"{BUDGET} steps of personalization": Scoring(model, BUDGET, LR, BATCH)}


def delayed_schedules(num_clients: int, cohort_size: int | None, horizon: float) -> Callable[..., Schedule]:
    """All that arrives within the horizon, in rounds of a cohort or without. All seeds have the same delays."""
    setting = jax.random.key(SPLIT)
    delays = persafl_delays(num_clients, key=setting)

    def make(*, key: Array) -> Schedule:
        del key
        most = 50 + int(horizon * num_clients / 4)  # a client's download and upload take 6 units of time together
        if cohort_size is None:
            arrived = arrivals(num_clients, most, delays=delays, key=setting).time
            return arrivals(num_clients, int(np.sum(arrived <= horizon)), delays=delays, key=setting)
        ends = rounds(num_clients, most, cohort_size, delays=delays, key=setting).time.reshape(most, -1).max(axis=1)
        return rounds(num_clients, int(np.sum(ends <= horizon)), cohort_size, delays=delays, key=setting)

    return make


def _claims(row: str) -> tuple[Claim, ...]:
    """What section 5 says of (b) and of (c)."""
    pairs = {FEDASYNC: FEDAVG, MAML: PER_FEDAVG, ME: PFEDME}
    sooner = tuple(Contrast(f"{one} over {other}", ((row, one),), ((row, other),)) for one, other in pairs.items())
    here = lambda words: f"{words}, {row[:3]}"
    return (
        Claim(here("asynchronous beats synchronous at equal time"), "section 5", sooner),
        Claim(here("the personalized methods beat FedAsync"), "section 5", beats(OURS, FEDASYNC, (row,))),
        Claim(
            here("the asynchronous personalized methods beat all synchronous ones"),
            "section 5",
            beats(OURS, SYNCHRONOUS, (row,)),
        ),
        Claim(here("ME ends above MAML"), "section 5", beats(ME, MAML, (row,))),
        Claim(here("ME is more stable than MAML"), "section 5", beats(ME, MAML, (row,)), of="wavering"),
    )


def figure2(quick: bool) -> Experiment:
    """(a) the share of active clients; (b), (c) accuracy against virtual time."""
    num_clients, cohort_size = (6, 2) if quick else (NUM_CLIENTS, COHORT)
    horizons = {"mnist": 30.0} if quick else HORIZONS
    lengths = " and ".join(f"{horizon:g}" for horizon in horizons.values())
    panels = {"mnist": PANELS["mnist"]} if quick else PANELS
    nets = {"mnist": cnn2, "cifar10": cnn3}
    pools = {"mnist": (datasets.mnist, 5), "cifar10": (datasets.cifar10, 3)}
    trainings = []
    for data, row in panels.items():
        task = classification(nets[data](10, dropout=DROPOUT, init="fan_in"))
        for name, candidates in _searched().items():
            waits = name in SYNCHRONOUS
            cells = [Cell(row, name, _budgeted(name))]
            if data == "mnist" and name in (FEDAVG, FEDASYNC):
                paper = (80.0, 0.0) if name == FEDASYNC else None
                column = "synchronous" if waits else "asynchronous"
                sampled = {"sampled": ActiveShare(to_the_end=True)} if waits else {}
                shares = {"mean over time": ActiveShare(), **sampled}
                cells.append(Cell(ACTIVE, column, shares, paper, "active_share"))
            along = partial(delayed_schedules, num_clients, cohort_size if waits else None)
            every = 2 if waits else 5 * num_clients
            chosen = dict(list(candidates.items())[:1]) if quick else candidates
            search = None if quick else along(horizons[data] / 4)
            trainings.append(PaperTraining(data, task, chosen, along(horizons[data]), tuple(cells), every, search))
    rows = tuple(panels.values())
    return Experiment(
        name="persafl-figure2",
        source="PersA-FL 2023, Figure 2, section 5, appendix D",
        title="Accuracy against virtual time under random delays",
        length=f"{lengths} units of virtual time, {num_clients} clients",
        federations={data: _by_classes(*pools[data], num_clients) for data in panels},
        trainings=tuple(trainings),
        num_seeds=1 if quick else 3,
        claims=(
            Claim(
                "more clients are active asynchronously",
                "section 5, Figure 2 (a)",
                (Contrast("mean over time", ((ACTIVE, "asynchronous"),), ((ACTIVE, "synchronous"),)),),
            ),
            *(claim for row in rows for claim in _claims(row)),
        ),
        choices=choices("persafl", "figure2", **FILLED, **HORIZONS),
        quick=quick,
    )
