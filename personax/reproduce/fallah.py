"""Fallah 2020: Table 1 (section 5), and the comparison with ARUBA and over time (appendix I).

A variant of the appendix tunes the step sizes of all methods. `fallah_causes` investigates the differences.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from personax.algorithms import Algorithm, aruba, fedavg, per_fedavg
from personax.curvature import exact, finite_difference, first_order
from personax.data import datasets, partition
from personax.data.datasets import Pool
from personax.data.federation import Federation
from personax.evaluation.scoring import Scoring, fallah_scoring
from personax.models import mlp
from personax.models.tasks import classification
from personax.objectives import Aruba
from personax.reproduce.choices import choices
from personax.reproduce.experiment import Cell, Claim, Contrast, Experiment, PaperTraining, Reading, baselines, beats
from personax.schedules import rounds
from personax.typing import Task

SPLIT = 2020  # the seed of the split
TASK = classification(mlp((80, 60), num_outputs=10, activation="elu"))
NUM_CLIENTS, COHORT, LR = 50, 10, 0.001
FEDAVG, FO, HF, EXACT = "FedAvg + update", "Per-FedAvg (FO)", "Per-FedAvg (HF)", "Per-FedAvg (exact)"
ARUBA = "FedAvg + ARUBA"
SCALES = (0.003, 0.01, 0.03, 0.1, 0.3)  # ARUBA's step-size scale
RATES = (0.001, 0.003, 0.01, 0.03)

# Table 1: row, data, local steps, test-time step size; test accuracy and its interval in %, FedAvg + update, FO, HF.
TABLE_1 = (
    ("MNIST, 10 steps, 0.01", "mnist", 10, 0.01, (75.96, 0.02), (78.00, 0.02), (79.85, 0.02)),
    ("MNIST, 4 steps, 0.01", "mnist", 4, 0.01, (60.18, 0.02), (64.55, 0.02), (70.94, 0.03)),
    ("CIFAR-10, 10 steps, 0.001", "cifar10", 10, 0.001, (40.49, 0.07), (46.98, 0.10), (50.44, 0.15)),
    ("CIFAR-10, 4 steps, 0.001", "cifar10", 4, 0.001, (38.38, 0.07), (34.04, 0.08), (43.73, 0.11)),
    ("CIFAR-10, 4 steps, 0.01", "cifar10", 4, 0.01, (35.97, 0.17), (25.32, 0.18), (46.32, 0.12)),
    ("CIFAR-10, 4 steps, 0.01, different", "different", 4, 0.01, (58.59, 0.11), (37.71, 0.23), (71.25, 0.05)),
)
APPENDIX = {FO: (34.04, 0.08), ARUBA: (36.74, 0.10), HF: (43.73, 0.11)}  # CIFAR-10, 4 steps, 0.001


def _divided(load: Callable[[], Pool], num_each: int, without_first: bool = False) -> Callable[[], Federation]:
    """Return a function that makes the paper's split, where `num_each` is its a."""

    def make() -> Federation:
        pool, key = load(), jax.random.key(SPLIT)
        halves = partial(partition.fallah_halves, num_clients=NUM_CLIENTS, without_first=without_first, key=key)
        train, test = halves(pool.y, num_each=num_each), halves(pool.test_y, num_each=32)
        return Federation.from_partition(pool.x, pool.y, train, test, test_x=pool.test_x, test_y=pool.test_y)

    return make


FEDERATIONS = {
    "mnist": _divided(datasets.mnist, 196),
    "cifar10": _divided(datasets.cifar10, 68),
    "different": _divided(datasets.cifar10, 68, without_first=True),
}


def contestants_of(num_steps: int, adapt_lr: float, lr: float = LR) -> dict[str, Algorithm]:
    """Return the columns of Table 1, and the exact Hessian."""
    local: dict[str, Any] = {"num_steps": num_steps, "batch_size": 40}
    meta = lambda hvp: per_fedavg(adapt_lr=adapt_lr, lr=lr, hvp=hvp, **local)
    return {
        FEDAVG: fedavg(lr=lr, **local),
        FO: meta(first_order),
        HF: meta(finite_difference(1e-3)),
        EXACT: meta(exact),
    }


def readings_of(adapt_lr: float) -> dict[str, Scoring]:
    """Return the scorings with one step at test time: on test data, as in section 5, and on training data."""
    return {"a step on test data": fallah_scoring(adapt_lr), "a step on training data": Scoring(lr=adapt_lr)}


def num_rounds_of(quick: bool) -> int:
    """Return the paper's K, or a few rounds for a quick run."""
    return 20 if quick else 1000


def setting(quick: bool, task: Task = TASK) -> tuple[dict[str, Any], Callable[..., PaperTraining]]:
    """Return the parts that the experiments share, and a function that makes their trainings."""
    num_rounds, num_seeds = num_rounds_of(quick), 2 if quick else 5
    shared = {"federations": FEDERATIONS, "length": f"{num_rounds} rounds", "num_seeds": num_seeds, "quick": quick}
    train = partial(PaperTraining, task=task, schedule=partial(rounds, NUM_CLIENTS, num_rounds, COHORT))
    return shared, train


def _rows(train: Callable[..., PaperTraining], columns: tuple[str, ...]) -> tuple[PaperTraining, ...]:
    """Return the trainings of Table 1, one per cell; FedAvg's also fills the baselines."""
    trainings = []
    for row, data, num_steps, adapt_lr, *paper in TABLE_1:
        numbers: dict[str, Any] = dict(zip(COLUMNS, paper, strict=True))  # the paper has no exact column
        contestants, readings = contestants_of(num_steps, adapt_lr), readings_of(adapt_lr)
        for column in columns:
            cells = (Cell(row, column, readings, numbers.get(column)),)
            cells += baselines(row, readings) if column == FEDAVG else ()
            trainings.append(train(data, algorithm=contestants[column], cells=cells))
    return tuple(trainings)


COLUMNS = (FEDAVG, FO, HF)
ROWS = tuple(row for row, *_ in TABLE_1)
PLACE = "section 5, observation ({})"


def from_to(column: str, before: str, after: str) -> Contrast:
    """Return the contrast of a column between two rows: better in the second."""
    return Contrast(f"{column}: {after} over {before}", ((after, column),), ((before, column),))


SIMILAR = 3.46  # the paper's FO and HF "perform almost similarly" this many points apart
GAINS = Contrast(  # MNIST's two rows count twice, as CIFAR-10 has four
    "mean gain of HF over FedAvg on CIFAR-10 over that on MNIST",
    (*((row, HF) for row in ROWS[2:]), *((row, FEDAVG) for row in (*ROWS[:2], *ROWS[:2]))),
    (*((row, FEDAVG) for row in ROWS[2:]), *((row, HF) for row in (*ROWS[:2], *ROWS[:2]))),
    scale=1 / 4,
)
CLAIMS = (
    Claim("HF beats FedAvg in all six rows", "Table 1", beats(HF, FEDAVG, ROWS)),
    Claim("HF beats FO in all six rows", "Table 1", beats(HF, FO, ROWS)),
    Claim("FO and HF beat FedAvg on MNIST", "section 5", beats((FO, HF), FEDAVG, ROWS[:2])),
    Claim(
        "FO and HF beat FedAvg on CIFAR-10 with 10 steps, alpha 0.001",
        PLACE.format("i"),
        beats((FO, HF), FEDAVG, ROWS[2:3]),
    ),
    Claim(
        "fewer local steps (tau 4 for 10) make all three worse",
        PLACE.format("i"),
        tuple(from_to(one, *rows) for rows in ((ROWS[1], ROWS[0]), (ROWS[3], ROWS[2])) for one in COLUMNS),
    ),
    Claim("HF gains more over FedAvg on CIFAR-10 than on MNIST", "section 5", (GAINS,)),
    Claim(
        "FO and HF are similar on CIFAR-10 with 10 steps, alpha 0.001",
        PLACE.format("i"),
        beats(FO, HF, ROWS[2:3]),
        within=SIMILAR,
    ),
    Claim("HF gains as alpha goes from 0.001 to 0.01", PLACE.format("ii"), (from_to(HF, ROWS[3], ROWS[4]),)),
    Claim("FO loses as alpha goes from 0.001 to 0.01", PLACE.format("ii"), (from_to(FO, ROWS[4], ROWS[3]),)),
    Claim("FO falls behind FedAvg on CIFAR-10 with 4 steps", "Table 1", beats(FEDAVG, FO, ROWS[3:5])),
    Claim("FO falls behind FedAvg under the other heterogeneity", PLACE.format("iii"), beats(FEDAVG, FO, ROWS[5:])),
)


def table1(quick: bool) -> Experiment:
    """Reproduce Table 1, with the exact Hessian as a fourth column."""
    shared, train = setting(quick)
    return Experiment(
        name="fallah-table1",
        source="Fallah 2020, Table 1, section 5",
        title="Test accuracy after one step at test time",
        trainings=_rows(train, (*COLUMNS, EXACT)),
        claims=CLAIMS,
        choices=choices("fallah", "start", "common"),
        needs=("mnist", "cifar10"),
        **shared,
    )


LOCAL: dict[str, Any] = {"num_steps": 4, "batch_size": 40}  # in appendix I
ROW_OF_APPENDIX = "CIFAR-10, 4 steps, 0.001"
REFINED = {
    "refined on test data": Scoring("recomputed", lr=1.0, adapt_on="test"),
    "refined on training data": Scoring("recomputed", lr=1.0),
}
SEARCHED = {f"scale {scale}": aruba(Aruba(scale, refinement=1.0), **LOCAL) for scale in SCALES}
AT_EQUAL_TIME = Claim(
    "HF beats FedAvg within the same computation time",
    "appendix I, Figure 1a",
    beats(HF, FEDAVG, (ROW_OF_APPENDIX,)),
    along="seconds",
)
WITH_ARUBA = (
    Claim("ARUBA beats FO", "appendix I", beats(ARUBA, FO, (ROW_OF_APPENDIX,))),
    Claim("HF beats ARUBA", "appendix I", beats(HF, ARUBA, (ROW_OF_APPENDIX,))),
)
LONGER = 5  # FedAvg runs this many times HF's rounds, so that it lasts longer on any machine


def appendix(quick: bool) -> Experiment:
    """Reproduce appendix I: ARUBA beside FO and HF, and accuracy over time, with FedAvg running as long as HF."""
    shared, train = setting(quick)
    contestants, readings = contestants_of(4, 0.001), readings_of(0.001)
    larger = {reading: replace(scoring, lr=0.03) for reading, scoring in readings.items()}
    every = 5 if quick else 50
    entries = [(name, contestants[name], readings) for name in (FO, HF, EXACT)]
    entries += [(f"{FEDAVG} of 0.03", contestants[FEDAVG], larger), (ARUBA, SEARCHED, REFINED)]
    row = ROW_OF_APPENDIX
    long = partial(rounds, NUM_CLIENTS, LONGER * num_rounds_of(quick), COHORT)
    cells = (Cell(row, FEDAVG, readings), *baselines(row, readings))
    first = train("cifar10", algorithm=contestants[FEDAVG], cells=cells, every=LONGER * every, schedule=long)
    others = (
        train("cifar10", algorithm=algorithm, cells=(Cell(row, name, scorings, APPENDIX.get(name)),), every=every)
        for name, algorithm, scorings in entries
    )
    return Experiment(
        name="fallah-appendix",
        source="Fallah 2020, appendix I",
        title="ARUBA beside Per-FedAvg, and accuracy over computing time",
        trainings=(first, *others),
        claims=(AT_EQUAL_TIME, *WITH_ARUBA),
        timed=True,
        choices=choices("fallah", "start", "common", "aruba", "larger_steps", "longer", scales=SCALES, longer=LONGER),
        needs=("cifar10",),
        **shared,
    )


TUNED = Reading(
    "tuned",
    "The training step sizes of all algorithms are tuned on validation data; the paper uses 0.001 for all but ARUBA.",
    "our choice",
)


def tuned(quick: bool) -> Experiment:
    """Repeat appendix I with the step sizes of all methods tuned as ARUBA's scale is."""
    shared, train = setting(quick)
    by_lr = {f"lr {lr}": contestants_of(4, 0.001, lr) for lr in RATES}
    searched = {name: {lr: of[name] for lr, of in by_lr.items()} for name in (FEDAVG, FO, HF)}
    entries = [(name, candidates, readings_of(0.001)) for name, candidates in searched.items()]
    return Experiment(
        name="fallah-tuned",
        source="Fallah 2020, appendix I",
        title="ARUBA beside Per-FedAvg, with all step sizes tuned on validation data",
        trainings=tuple(
            train(
                "cifar10",
                algorithm=candidates,
                cells=(Cell(ROW_OF_APPENDIX, name, scorings, APPENDIX.get(name), reading=TUNED.name),),
            )
            for name, candidates, scorings in (*entries, (ARUBA, SEARCHED, REFINED))
        ),
        claims=(Claim("HF beats FedAvg", "appendix I", beats(HF, FEDAVG, (ROW_OF_APPENDIX,))), *WITH_ARUBA),
        choices=choices("fallah", "start", "common", "aruba", "tuned", scales=SCALES, rates=RATES),
        readings=(TUNED,),
        causes_of="fallah-appendix",
        needs=("cifar10",),
        **shared,
    )
