"""PersA-FL 2023: Figure 2 at a size for a CPU: (a) from schedules alone, (b) and (c) with a small network."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from personax.algorithms import Algorithm, fedasync, fedavg
from personax.data import datasets
from personax.data.datasets import Pool
from personax.models import logistic_regression, mlp, standardized
from personax.models.tasks import classification
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
)
from personax.reproduce.measures import ActiveShare
from personax.reproduce.persafl import (
    BOUNDED,
    COHORT,
    FEDAVG,
    FILLED,
    HORIZONS,
    LR,
    NUM_CLIENTS,
    PANELS,
    READINGS,
    RECEIVED,
    SPREAD,
    SYNCHRONOUS,
    budgeted,
    by_classes,
    claims_of,
    delayed_schedules,
    searched,
)
from personax.server import asynchronous
from personax.typing import Task

NUM_SEEDS, NUM_SEEDS_OF_B = 5, 3
HORIZON, WIDTH, NUM_IMAGES, DAMPED_LR = 150.0, 32, 6000, 0.1
ACTIVE = "(a) active clients"
ASYNCHRONOUS, WAITING = "asynchronous", "synchronous"

CLAIMS_OF_ACTIVITY = (
    Claim(
        "up to 80 % of the clients are active on average",
        "section 5, Figure 2 (a)",
        (),
        untestable="The distributions of the delays are not stated and the number has no interval; ours is in the row.",
    ),
)


def figure2a(quick: bool) -> Experiment:
    """Reproduce (a), the share of active clients. It depends on the schedules alone, so the model is a small one."""
    num_clients, cohort_size = (6, 2) if quick else (NUM_CLIENTS, COHORT)
    horizon = 30.0 if quick else HORIZONS["mnist"]
    task, local = classification(logistic_regression(10)), {"lr": LR, "num_steps": 1, "batch_size": 1}
    rows = {one.name: ACTIVE if one.name == RECEIVED else f"{ACTIVE}; {one.name}" for one in READINGS}
    trainings = []
    for reading, row in rows.items():
        for waits, algorithm in ((False, fedasync(**local)), (True, fedavg(**local))):
            sampled = {"sampled": ActiveShare(to_the_end=True)} if waits else {}
            shares = {"mean over time": ActiveShare(), **sampled}
            cell = Cell(row, WAITING if waits else ASYNCHRONOUS, shares, metric="active_share", reading=reading)
            cohort = cohort_size if waits else None
            along = delayed_schedules(num_clients, cohort, horizon, reading, of_seed=True)
            trainings.append(PaperTraining("digits", task, algorithm, along, (cell,)))
    pairs = tuple(Contrast(row, ((row, ASYNCHRONOUS),), ((row, WAITING),)) for row in rows.values())
    more = Claim("more clients are active asynchronously", "section 5, Figure 2 (a)", pairs)
    return Experiment(
        name="persafl-figure2a",
        source="PersA-FL 2023, Figure 2, section 5, appendix D",
        title="(a) Share of active clients under random delays",
        length=f"{horizon:g} units of virtual time, {num_clients} clients",
        federations={"digits": by_classes(_digits, 5, num_clients)},
        trainings=tuple(trainings),
        num_seeds=2 if quick else NUM_SEEDS,
        claims=(more, *CLAIMS_OF_ACTIVITY),
        choices=choices("persafl", "figure2a"),
        readings=READINGS,
        quick=quick,
    )


def _digits() -> Pool:
    pool = datasets.digits()
    return replace(pool, test_x=pool.x, test_y=pool.y)


@dataclass(frozen=True)
class _SmallSetting:
    """A reading of the small runs: the server's step size for asynchronous methods, and the spread of the delays."""

    name: str
    server_lr: float
    spread: float = SPREAD

    def reading(self) -> Reading:
        """Return the reading with its description."""
        steps = (
            "The server's step size is 1, the middle of the stated set."
            if self.server_lr == 1.0
            else f"The server's step size is {self.server_lr} for asynchronous methods, below the stated set."
        )
        delays = (
            BOUNDED if self.spread == SPREAD else "Delays are uniform between 0 and twice their means: also bounded."
        )
        return Reading(self.name, f"{_SIZE} {steps} {delays}", "our choice")


_SIZE = (
    f"At reduced size: one ReLU layer of {WIDTH} units for the CNN, {NUM_IMAGES} images, {HORIZON:g} units of time. "
    "Omega(t) is the time of receipt."
)
_OF_MNIST = classification(mlp((WIDTH,), 10, "relu", "fan_in"))
SMALL = _SmallSetting("small", 1.0)
DAMPED = _SmallSetting(f"small, server step {DAMPED_LR}", DAMPED_LR)
SPREAD_OUT = _SmallSetting("small, wider delays", 1.0, 1.0)


def _first_images(load: Callable[[], Pool]) -> Pool:
    pool, num_test = load(), NUM_IMAGES // 3
    assert pool.test_x is not None and pool.test_y is not None  # both pools have test images
    x, y, test_x, test_y = pool.x[:NUM_IMAGES], pool.y[:NUM_IMAGES], pool.test_x[:num_test], pool.test_y[:num_test]
    return replace(pool, x=x, y=y, test_x=test_x, test_y=test_y)


def _with_server(candidates: dict[str, Algorithm], name: str, server_lr: float) -> dict[str, Algorithm]:
    """Return the candidates with the server step size 1, or with another one if the method is asynchronous."""
    kept = {key: one for key, one in candidates.items() if key.endswith("server 1.0")}
    if name in SYNCHRONOUS or server_lr == 1.0:
        return kept
    renamed = lambda key: key.replace("server 1.0", f"server {server_lr}")
    return {renamed(key): replace(one, server=asynchronous(server_lr)) for key, one in kept.items()}


def _trainings(
    data: str, task: Task, settings: tuple[_SmallSetting, ...], quick: bool, of_seed: bool
) -> list[PaperTraining]:
    """Return all trainings of a panel; a synchronous one serves all settings, which have the same delays."""
    num_clients, cohort_size = (6, 2) if quick else (NUM_CLIENTS, COHORT)
    horizon = 30.0 if quick else HORIZON
    trainings = []
    for name, candidates in searched().items():
        waits = name in SYNCHRONOUS
        for served in (settings,) if waits else tuple((one,) for one in settings):
            rows = {one.name: row_of(data, one) for one in served}
            cells = [Cell(row, name, budgeted(name), reading=one) for one, row in rows.items()]
            if name == FEDAVG:
                cells += [cell for one, row in rows.items() for cell in baselines(row, budgeted(name), one)]
            cohort = cohort_size if waits else None
            along = partial(delayed_schedules, num_clients, cohort, spread=served[0].spread, of_seed=of_seed)
            search = None if quick else along(horizon / 4)
            used = _with_server(candidates, name, served[0].server_lr)
            every = 1 if waits else 75
            trainings.append(PaperTraining(data, task, used, along(horizon), tuple(cells), every, search))
    return trainings


def row_of(data: str, setting: _SmallSetting) -> str:
    """Return the row of a panel in a setting."""
    return f"{PANELS[data]}; {setting.name}"


def _small(
    data: str, name: str, task: Task, settings: tuple[_SmallSetting, ...], quick: bool, num_seeds: int = NUM_SEEDS
) -> Experiment:
    """Return a panel at reduced size, with own delays for each seed if it has `NUM_SEEDS` of them."""
    of_seed = num_seeds == NUM_SEEDS
    num_clients, horizon = (6, 30.0) if quick else (NUM_CLIENTS, HORIZON)
    load, num_classes_each = {"mnist": (datasets.mnist, 5), "cifar10": (datasets.cifar10, 3)}[data]
    return Experiment(
        name=name,
        source="PersA-FL 2023, Figure 2, section 5, appendix D",
        title=f"Accuracy over virtual time under random delays, {PANELS[data]}, at reduced size",
        length=f"{horizon:g} units of virtual time, {num_clients} clients",
        federations={data: by_classes(partial(_first_images, load), num_classes_each, num_clients)},
        trainings=tuple(_trainings(data, task, settings, quick, of_seed)),
        num_seeds=1 if quick else num_seeds,
        claims=claims_of(PANELS[data], tuple(row_of(data, one) for one in settings)),
        choices=choices("persafl", "figure2", *(["small"] if of_seed else []), **FILLED, **HORIZONS),
        readings=tuple(one.reading() for one in settings),
        needs=(data,),
        quick=quick,
    )


def figure2_small(quick: bool) -> Experiment:
    """Reproduce (b) with a small network and fewer images, for a machine without an accelerator."""
    made = _small("mnist", "persafl-figure2-small", _OF_MNIST, (SMALL, DAMPED), quick, NUM_SEEDS_OF_B)
    return replace(made, causes_of="persafl-figure2")


def figure2_spread(quick: bool) -> Experiment:
    """Repeat the small run of (b) with delays that are bounded, too, but vary widely."""
    made = _small("mnist", "persafl-figure2-spread", _OF_MNIST, (SPREAD_OUT,), quick)
    return replace(made, causes_of="persafl-figure2")


def figure2c_small(quick: bool) -> Experiment:
    """Reproduce (c) with a small network and fewer images, for a machine without an accelerator."""
    task = classification(standardized(mlp((WIDTH,), 10, "relu", "fan_in"), *OF_CIFAR))
    return _small("cifar10", "persafl-figure2c-small", task, (SMALL, DAMPED), quick)
