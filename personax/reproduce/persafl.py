"""PersA-FL 2023: Figure 2 (section 5, appendix D)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

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
from personax.models import cnn2, cnn3, standardized
from personax.models.tasks import classification
from personax.objectives import Meta, Moreau
from personax.reproduce.choices import choices
from personax.reproduce.experiment import (
    OF_CIFAR,
    Cell,
    Claim,
    Contrast,
    Experiment,
    PaperTraining,
    Reading,
    baselines,
    beats,
)
from personax.schedules import Delays, Schedule, arrivals, persafl_delays, rounds
from personax.schedules.delays import Exponential, Uniform
from personax.server import asynchronous, synchronous
from personax.typing import Array

SPLIT = 2210  # the seed of the split and of the delays
NUM_CLIENTS, COHORT = 30, 10
NUM_STEPS, LR, BATCH = 10, 0.01, 32  # the paper's Q and eta
STRENGTHS, ADAPT_LRS, SERVER_LRS = (20.0, 25.0, 30.0), (0.002, 0.005, 0.01), (0.8, 1.0, 1.2)
BUDGET, PROX_LR = 10, 0.01  # the number of personalization steps, the step size of the inner problem
DROPOUT = 0.25
HORIZONS = {"mnist": 450.0, "cifar10": 450.0}
SPREAD = 0.5  # the spread of the delays, as a share of their means
FEDAVG, FEDPROX, SCAFFOLD, PER_FEDAVG, PFEDME = "FedAvg", "FedProx", "SCAFFOLD", "Per-FedAvg", "pFedMe"
FEDASYNC, MAML, ME = "FedAsync", "PersA-FL-MAML", "PersA-FL-ME"
OURS, SYNCHRONOUS = (MAML, ME), (FEDAVG, FEDPROX, SCAFFOLD, PER_FEDAVG, PFEDME)
PANELS = {"mnist": "(b) MNIST, c = 5", "cifar10": "(c) CIFAR-10, c = 3"}
RECEIVED, REQUESTED, EXPONENTIAL = "received", "requested", "exponential"
BOUNDED = "Delays are uniform within 50 % of their means, and thus bounded, as Assumption 1 requires."
READINGS = (
    Reading(RECEIVED, f"Omega(t) is the time at which the client has received the model. {BOUNDED}", "the text"),
    Reading(REQUESTED, f"The server sends its model of the time of the request. {BOUNDED}", "our choice"),
    Reading(
        EXPONENTIAL, "The model of the time of the request, with exponential delays, which are unbounded.", "our choice"
    ),
)

FILLED = {
    "spread": SPREAD,
    "cohort": COHORT,
    "num_clients": NUM_CLIENTS,
    "budget": BUDGET,
    "batch": BATCH,
    "lr": LR,
    "prox_lr": PROX_LR,
}


def by_classes(load: Callable[[], Pool], num_classes_each: int, num_clients: int) -> Callable[[], Federation]:
    """Return a maker of a pool divided so that each client has this many classes."""

    def make() -> Federation:
        pool, key = load(), jax.random.key(SPLIT)
        divide = partial(partition.classes_per_client, num_clients=num_clients, num_classes_each=num_classes_each)
        train, test = divide(pool.y, key=key), divide(pool.test_y, key=key)
        return Federation.from_partition(pool.x, pool.y, train, test, test_x=pool.test_x, test_y=pool.test_y)

    return make


def searched() -> dict[str, dict[str, Algorithm]]:
    """Return every algorithm with its candidates: the server's step size and, if it has one, its own parameter."""
    local: dict[str, Any] = {"num_steps": NUM_STEPS, "batch_size": BATCH}
    inner = {"prox_lr": PROX_LR, "num_prox_steps": BUDGET}
    plain: dict[str, Callable[..., Algorithm]] = {
        FEDAVG: partial(fedavg, lr=LR, **local),
        FEDPROX: partial(fedprox, strength=0.1, lr=LR, **local),
        SCAFFOLD: partial(scaffold, lr=LR, option=1, **local),
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


def budgeted(name: str) -> Mapping[str, Scoring]:
    """Return the scoring of a method after the common budget of personalization steps."""
    model = "recomputed" if name in (PFEDME, ME) else "adapted"
    return {f"{BUDGET} steps of personalization": Scoring(model, BUDGET, LR, BATCH)}


def bounded_delays(num_clients: int, spread: float = SPREAD, *, key: Array) -> Delays:
    """Return delays with the means of `persafl_delays` that are uniform within a share of their means."""
    given = persafl_delays(num_clients, key=key)
    of_mean = lambda delay: Uniform(cast(Exponential, delay).mean, spread)  # `persafl_delays` are exponential
    return Delays(download=of_mean(given.download), upload=of_mean(given.upload))


def delayed_schedules(
    num_clients: int,
    cohort_size: int | None,
    horizon: float,
    reading: str = RECEIVED,
    *,
    spread: float = SPREAD,
    of_seed: bool = False,
) -> Callable[..., Schedule]:
    """Return a maker of schedules up to the horizon, in rounds or asynchronous.

    All seeds have the same delays or, with `of_seed`, each its own. Schedules of several seeds must have equal lengths,
    so all have as many updates or rounds as the common delays allow.
    """
    common = jax.random.key(SPLIT)
    make_delays = persafl_delays if reading == EXPONENTIAL else partial(bounded_delays, spread=spread)
    model_at = "receipt" if reading == RECEIVED else "request"

    def of_length(num: int, key: Array) -> Schedule:
        delays = make_delays(num_clients, key=key)
        if cohort_size is None:
            return arrivals(num_clients, num, model_at=model_at, delays=delays, key=key)
        return rounds(num_clients, num, cohort_size, delays=delays, key=key)

    def make(*, key: Array) -> Schedule:
        most = 50 + int(horizon * num_clients / 3)  # a client's download and upload together take 6 units of time
        times = of_length(most, common).time
        ends = times if cohort_size is None else times.reshape(most, -1).max(axis=1)
        return of_length(int(np.sum(ends <= horizon)), key if of_seed else common)

    return make


def claims_of(panel: str, rows: tuple[str, ...]) -> tuple[Claim, ...]:
    """Return the claims of section 5 about (b) or (c)."""
    pairs = {FEDASYNC: FEDAVG, MAML: PER_FEDAVG, ME: PFEDME}
    sooner = tuple(contrast for one, other in pairs.items() for contrast in _named(one, other, rows))
    here = lambda words: f"{words}, {panel[:3]}"
    place = f"section 5, Figure 2 {panel[:3]}"
    return (
        Claim(here("asynchronous beats synchronous at equal time"), place, sooner),
        Claim(here("the personalized methods beat FedAsync"), place, beats(OURS, FEDASYNC, rows)),
        Claim(
            here("the asynchronous personalized methods beat all synchronous ones"),
            place,
            beats(OURS, SYNCHRONOUS, rows),
        ),
        Claim(here("ME ends above MAML"), place, beats(ME, MAML, rows)),
        Claim(here("ME is more stable than MAML"), place, beats(ME, MAML, rows), of="wavering"),
    )


def _named(one: str, other: str, rows: tuple[str, ...]) -> tuple[Contrast, ...]:
    return tuple(Contrast(f"{row}, {one} over {other}", ((row, one),), ((row, other),)) for row in rows)


def row_of(data: str, reading: str) -> str:
    """Return the row of a panel in a reading."""
    return PANELS[data] if reading == RECEIVED else f"{PANELS[data]}; {reading}"


NETWORKS = {"mnist": cnn2(10, dropout=DROPOUT, init="fan_in")}
NETWORKS["cifar10"] = standardized(cnn3(10, dropout=DROPOUT, init="fan_in"), *OF_CIFAR)
POOLS = {"mnist": (datasets.mnist, 5), "cifar10": (datasets.cifar10, 3)}


def _trainings(data: str, readings: tuple[str, ...], quick: bool) -> list[PaperTraining]:
    """Return all trainings of a panel. Synchronous trainings with the same delays are equal and fill several rows."""
    num_clients, cohort_size = (6, 2) if quick else (NUM_CLIENTS, COHORT)
    horizon = 30.0 if quick else HORIZONS[data]
    found = []
    for name, candidates in searched().items():
        waits = name in SYNCHRONOUS
        chosen = dict(list(candidates.items())[:1]) if quick else candidates
        bounded = tuple(one for one in readings if one != EXPONENTIAL)
        alike = (bounded, *((one,) for one in readings if one == EXPONENTIAL))
        for of_training in alike if waits else tuple((one,) for one in readings):
            cells = [Cell(row_of(data, one), name, budgeted(name), reading=one) for one in of_training]
            if name == FEDAVG:
                cells += [cell for one in of_training for cell in baselines(row_of(data, one), budgeted(name), one)]
            along = partial(delayed_schedules, num_clients, cohort_size if waits else None, reading=of_training[0])
            search = None if quick else along(horizon / 4)
            task = classification(NETWORKS[data])
            every = 2 if waits else 5 * num_clients
            found.append(PaperTraining(data, task, chosen, along(horizon), tuple(cells), every, search))
    return found


def _panel(data: str, name: str, readings: tuple[Reading, ...], quick: bool) -> Experiment:
    num_clients = 6 if quick else NUM_CLIENTS
    names = tuple(one.name for one in readings)
    rows = tuple(row_of(data, one) for one in names)
    horizon = 30.0 if quick else HORIZONS[data]
    return Experiment(
        name=name,
        source="PersA-FL 2023, Figure 2, section 5, appendix D",
        title=f"Accuracy over virtual time under random delays, {PANELS[data]}",
        length=f"{horizon:g} units of virtual time, {num_clients} clients",
        federations={data: by_classes(*POOLS[data], num_clients)},
        trainings=tuple(_trainings(data, names, quick)),
        num_seeds=1 if quick else 3,
        claims=claims_of(PANELS[data], rows),
        choices=choices("persafl", "figure2", **FILLED, **HORIZONS),
        readings=readings,
        needs=(data,),
        quick=quick,
    )


def figure2(quick: bool) -> Experiment:
    """Reproduce (b), accuracy over virtual time on MNIST."""
    return _panel("mnist", "persafl-figure2", READINGS, quick)


def figure2c(quick: bool) -> Experiment:
    """Reproduce (c), accuracy over virtual time on CIFAR-10."""
    reason = "Not run at full size, which needs a dedicated GPU. `persafl-figure2c-small` is a reduced version."
    return replace(_panel("cifar10", "persafl-figure2c", READINGS[:1], quick), unavailable=reason)
