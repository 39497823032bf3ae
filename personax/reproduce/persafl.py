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
from personax.models import cnn2, cnn3, mlp, standardized
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
from personax.reproduce.measures import ActiveShare
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
ACTIVE = "(a) active clients"
PANELS = {"mnist": "(b) MNIST, c = 5", "cifar10": "(c) CIFAR-10, c = 3"}
RECEIVED, REQUESTED, EXPONENTIAL = "received", "requested", "exponential"
_DELAYS = "Delays are uniform within 50 % of their means, and thus bounded, as Assumption 1 requires."
READINGS = (
    Reading(RECEIVED, f"Omega(t) is the time at which the client has received the model. {_DELAYS}", "the text"),
    Reading(REQUESTED, f"The server sends its model of the time of the request. {_DELAYS}", "our choice"),
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


def _by_classes(load: Callable[[], Pool], num_classes_each: int, num_clients: int) -> Callable[[], Federation]:
    def make() -> Federation:
        pool, key = load(), jax.random.key(SPLIT)
        divide = partial(partition.classes_per_client, num_clients=num_clients, num_classes_each=num_classes_each)
        train, test = divide(pool.y, key=key), divide(pool.test_y, key=key)
        return Federation.from_partition(pool.x, pool.y, train, test, test_x=pool.test_x, test_y=pool.test_y)

    return make


def _searched() -> dict[str, dict[str, Algorithm]]:
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


def _budgeted(name: str) -> Mapping[str, Scoring]:
    model = "recomputed" if name in (PFEDME, ME) else "adapted"
    return {f"{BUDGET} steps of personalization": Scoring(model, BUDGET, LR, BATCH)}


def bounded_delays(num_clients: int, *, key: Array) -> Delays:
    """Return delays with the means of `persafl_delays` that are uniform within 50 % of their means."""
    given = persafl_delays(num_clients, key=key)
    of_mean = lambda delay: Uniform(cast(Exponential, delay).mean, SPREAD)  # `persafl_delays` are exponential
    return Delays(download=of_mean(given.download), upload=of_mean(given.upload))


def delayed_schedules(
    num_clients: int, cohort_size: int | None, horizon: float, reading: str = RECEIVED
) -> Callable[..., Schedule]:
    """Return a maker of schedules up to the horizon, in rounds or asynchronous. All seeds have the same delays."""
    setting = jax.random.key(SPLIT)
    make_delays = persafl_delays if reading == EXPONENTIAL else bounded_delays
    delays = make_delays(num_clients, key=setting)
    arriving = partial(arrivals, model_at="receipt" if reading == RECEIVED else "request")

    def make(*, key: Array) -> Schedule:
        del key
        most = 50 + int(horizon * num_clients / 3)  # a client's download and upload together take 6 units of time
        if cohort_size is None:
            arrived = arriving(num_clients, most, delays=delays, key=setting).time
            return arriving(num_clients, int(np.sum(arrived <= horizon)), delays=delays, key=setting)
        ends = rounds(num_clients, most, cohort_size, delays=delays, key=setting).time.reshape(most, -1).max(axis=1)
        return rounds(num_clients, int(np.sum(ends <= horizon)), cohort_size, delays=delays, key=setting)

    return make


def _claims(panel: str, rows: tuple[str, ...]) -> tuple[Claim, ...]:
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
    for name, candidates in _searched().items():
        waits = name in SYNCHRONOUS
        chosen = dict(list(candidates.items())[:1]) if quick else candidates
        bounded = tuple(one for one in readings if one != EXPONENTIAL)
        alike = (bounded, *((one,) for one in readings if one == EXPONENTIAL))
        for of_training in alike if waits else tuple((one,) for one in readings):
            cells = [Cell(row_of(data, one), name, _budgeted(name), reading=one) for one in of_training]
            if name == FEDAVG:
                cells += [cell for one in of_training for cell in baselines(row_of(data, one), _budgeted(name), one)]
            if data == "mnist" and name in (FEDAVG, FEDASYNC) and RECEIVED in of_training:
                cells.append(_active(waits))
            along = partial(delayed_schedules, num_clients, cohort_size if waits else None, reading=of_training[0])
            search = None if quick else along(horizon / 4)
            task = classification(NETWORKS[data])
            every = 2 if waits else 5 * num_clients
            found.append(PaperTraining(data, task, chosen, along(horizon), tuple(cells), every, search))
    return found


def _active(waits: bool) -> Cell:
    """Return the cell with the share of active clients in synchronous or asynchronous training."""
    sampled = {"sampled": ActiveShare(to_the_end=True)} if waits else {}
    column = "synchronous" if waits else "asynchronous"
    shares = {"mean over time": ActiveShare(), **sampled}
    return Cell(ACTIVE, column, shares, metric="active_share", reading=RECEIVED)


SMALL, DAMPED = "small", "small, server step 0.1"
SMALL_HORIZON, SMALL_WIDTH, NUM_SMALL, DAMPED_LR = 150.0, 32, 6000, 0.1
_SMALL = (
    f"At reduced size: one ReLU layer of {SMALL_WIDTH} units for the CNN, {NUM_SMALL} images, {SMALL_HORIZON:g} units "
    "of time. Omega(t) is the time of receipt."
)
SMALL_READINGS = (
    Reading(SMALL, f"{_SMALL} The server's step size is 1, the middle of the stated set. {_DELAYS}", "our choice"),
    Reading(
        DAMPED,
        f"{_SMALL} The server's step size is {DAMPED_LR} for asynchronous methods, below the stated set. {_DELAYS}",
        "our choice",
    ),
)


def _first_images() -> Pool:
    pool, num_test = datasets.mnist(), NUM_SMALL // 3
    assert pool.test_x is not None and pool.test_y is not None  # MNIST has test images
    x, y, test_x, test_y = pool.x[:NUM_SMALL], pool.y[:NUM_SMALL], pool.test_x[:num_test], pool.test_y[:num_test]
    return replace(pool, x=x, y=y, test_x=test_x, test_y=test_y)


def _small_trainings(readings: tuple[str, ...], rows: Mapping[str, str], quick: bool) -> list[PaperTraining]:
    """Return all trainings with the small network; only asynchronous ones have a damped server step."""
    num_clients, cohort_size = (6, 2) if quick else (NUM_CLIENTS, COHORT)
    horizon = 30.0 if quick else SMALL_HORIZON
    task = classification(mlp((SMALL_WIDTH,), 10, "relu", "fan_in"))
    trainings = []
    for name, candidates in _searched().items():
        waits = name in SYNCHRONOUS
        kept = {key: one for key, one in candidates.items() if key.endswith("server 1.0")}
        damp = lambda key: key.replace("server 1.0", f"server {DAMPED_LR}")
        damped = {damp(key): replace(one, server=asynchronous(DAMPED_LR)) for key, one in kept.items()}
        along = partial(delayed_schedules, num_clients, cohort_size if waits else None)
        search = None if quick else along(horizon / 4)
        for of_training in (readings,) if waits else tuple((one,) for one in readings):
            cells = tuple(Cell(rows[one], name, _budgeted(name), reading=one) for one in of_training)
            if name == FEDAVG:
                cells += tuple(cell for one in readings for cell in baselines(rows[one], _budgeted(name), one))
            used = kept if waits or of_training == (SMALL,) else damped
            trainings.append(PaperTraining("mnist", task, used, along(horizon), cells, 1 if waits else 75, search))
    return trainings


def figure2_small(quick: bool) -> Experiment:
    """Reproduce (b) with a small network and fewer images, for a machine without an accelerator."""
    num_clients, horizon = (6, 30.0) if quick else (NUM_CLIENTS, SMALL_HORIZON)
    rows = {one.name: f"{PANELS['mnist']}; {one.name}" for one in SMALL_READINGS}
    return Experiment(
        name="persafl-figure2-small",
        source="PersA-FL 2023, Figure 2, section 5, appendix D",
        title=f"Accuracy over virtual time under random delays, {PANELS['mnist']}, at reduced size",
        length=f"{horizon:g} units of virtual time, {num_clients} clients",
        federations={"mnist": _by_classes(_first_images, 5, num_clients)},
        trainings=tuple(_small_trainings(tuple(rows), rows, quick)),
        num_seeds=1 if quick else 3,
        claims=_claims(PANELS["mnist"], tuple(rows.values())),
        choices=choices("persafl", "figure2", **FILLED, **HORIZONS),
        readings=SMALL_READINGS,
        needs=("mnist",),
        causes_of="persafl-figure2",
        quick=quick,
    )


CLAIMS_OF_ACTIVITY = (
    Claim(
        "more clients are active asynchronously",
        "section 5, Figure 2 (a)",
        (Contrast("mean over time", ((ACTIVE, "asynchronous"),), ((ACTIVE, "synchronous"),)),),
    ),
    Claim(
        "up to 80 % of the clients are active on average",
        "section 5, Figure 2 (a)",
        (),
        untestable="The distributions of the delays are not stated and the number has no interval; ours is in the row.",
    ),
)


def _panel(data: str, name: str, readings: tuple[Reading, ...], claims: tuple[Claim, ...], quick: bool) -> Experiment:
    num_clients = 6 if quick else NUM_CLIENTS
    names = tuple(one.name for one in readings)
    rows = tuple(row_of(data, one) for one in names)
    horizon = 30.0 if quick else HORIZONS[data]
    return Experiment(
        name=name,
        source="PersA-FL 2023, Figure 2, section 5, appendix D",
        title=f"Accuracy over virtual time under random delays, {PANELS[data]}",
        length=f"{horizon:g} units of virtual time, {num_clients} clients",
        federations={data: _by_classes(*POOLS[data], num_clients)},
        trainings=tuple(_trainings(data, names, quick)),
        num_seeds=1 if quick else 3,
        claims=(*claims, *_claims(PANELS[data], rows)),
        choices=choices("persafl", "figure2", **FILLED, **HORIZONS),
        readings=readings,
        needs=(data,),
        quick=quick,
    )


def figure2(quick: bool) -> Experiment:
    """Reproduce (a), the share of active clients, and (b), accuracy over virtual time on MNIST."""
    return _panel("mnist", "persafl-figure2", READINGS, CLAIMS_OF_ACTIVITY, quick)


def figure2c(quick: bool) -> Experiment:
    """Reproduce (c), accuracy over virtual time on CIFAR-10."""
    reason = (
        "No run in this reading was completed: it needs a dedicated GPU. With pixels in [0, 1] and exponential delays, "
        "every method ended below guessing (33 %), which is not informative."
    )
    return replace(_panel("cifar10", "persafl-figure2c", READINGS[:1], (), quick), unavailable=reason)
