"""Fallah 2020: Table 1 (section 5) and the comparison with ARUBA and against time (appendix I).

Beside both, what was tried to explain where they differ: another initialisation, and step sizes chosen for all.
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
from personax.reproduce.experiment import Cell, Claim, Experiment, PaperTraining, beats
from personax.schedules import rounds
from personax.typing import Task

SPLIT = 2020  # the seed of the split
TASK = classification(mlp((80, 60), num_outputs=10, activation="elu"))
NUM_CLIENTS, COHORT, LR = 50, 10, 0.001
FEDAVG, FO, HF, EXACT = "FedAvg + update", "Per-FedAvg (FO)", "Per-FedAvg (HF)", "Per-FedAvg (exact)"
ARUBA = "FedAvg + ARUBA"
SCALES = (0.003, 0.01, 0.03, 0.1, 0.3)  # of ARUBA
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
    """The paper's split: `num_each` is its a."""

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


def _contestants(num_steps: int, adapt_lr: float, lr: float = LR) -> dict[str, Algorithm]:
    local: dict[str, Any] = {"num_steps": num_steps, "batch_size": 40}
    meta = lambda hvp: per_fedavg(adapt_lr=adapt_lr, lr=lr, hvp=hvp, **local)
    return {
        FEDAVG: fedavg(lr=lr, **local),
        FO: meta(first_order),
        HF: meta(finite_difference(1e-3)),
        EXACT: meta(exact),
    }


def _readings(adapt_lr: float) -> dict[str, Scoring]:
    return {"a step on test data": fallah_scoring(adapt_lr), "a step on training data": Scoring(lr=adapt_lr)}


def _setting(quick: bool, task: Task = TASK) -> tuple[dict[str, Any], Callable[..., PaperTraining]]:
    """What the experiments share, and a training of theirs."""
    num_rounds, num_seeds = (20, 2) if quick else (1000, 5)
    shared = {"federations": FEDERATIONS, "length": f"{num_rounds} rounds", "num_seeds": num_seeds, "quick": quick}
    train = partial(PaperTraining, task=task, schedule=partial(rounds, NUM_CLIENTS, num_rounds, COHORT))
    return shared, train


def _rows(train: Callable[..., PaperTraining], columns: tuple[str, ...]) -> tuple[PaperTraining, ...]:
    """Table 1: a training for each cell."""
    trainings = []
    for row, data, num_steps, adapt_lr, *paper in TABLE_1:
        numbers: dict[str, Any] = dict(zip((FEDAVG, FO, HF), paper, strict=True))  # the paper has no exact column
        contestants, readings = _contestants(num_steps, adapt_lr), _readings(adapt_lr)
        for column in columns:
            cells = (Cell(row, column, readings, numbers.get(column)),)
            trainings.append(train(data, algorithm=contestants[column], cells=cells))
    return tuple(trainings)


ROWS = tuple(row for row, *_ in TABLE_1)
CLAIMS = (
    Claim("HF beats FedAvg in all six rows", "Table 1", beats(HF, FEDAVG, ROWS)),
    Claim("HF beats FO in all six rows", "Table 1", beats(HF, FO, ROWS)),
    Claim("FO beats FedAvg on MNIST", "section 5", beats(FO, FEDAVG, ROWS[:2])),
    Claim("FO beats FedAvg on CIFAR-10 with 10 steps of 0.001", "observation (i)", beats(FO, FEDAVG, ROWS[2:3])),
    Claim("FO falls behind FedAvg on CIFAR-10 with 4 steps", "Table 1", beats(FEDAVG, FO, ROWS[3:])),
)


def table1(quick: bool) -> Experiment:
    """Table 1, with the exact Hessian as a fourth column."""
    shared, train = _setting(quick)
    return Experiment(
        name="fallah-table1",
        source="Fallah 2020, Table 1, section 5",
        title="Test accuracy after one step at test time",
        trainings=_rows(train, (FEDAVG, FO, HF, EXACT)),
        claims=(*CLAIMS, Claim("exact beats HF (not in the paper)", "ours", beats(EXACT, HF, ROWS))),
        choices=choices("fallah", "start", "common"),
        **shared,
    )


def initialisation(quick: bool) -> Experiment:
    """Table 1 from another start: the paper does not state its own."""
    shared, train = _setting(quick, classification(mlp((80, 60), num_outputs=10, activation="elu", init="fan_in")))
    return Experiment(
        name="fallah-initialisation",
        source="Fallah 2020, Table 1, section 5",
        title="Table 1 again, from PyTorch's default initialisation",
        trainings=_rows(train, (FEDAVG, FO, HF)),
        claims=CLAIMS,
        choices=choices("fallah", "start_of_pytorch", "common"),
        **shared,
    )


LOCAL: dict[str, Any] = {"num_steps": 4, "batch_size": 40}  # of appendix I
ROW_OF_APPENDIX = "CIFAR-10, 4 steps, 0.001"
REFINED = {
    "refined on test data": Scoring("recomputed", lr=1.0, adapt_on="test"),
    "refined on training data": Scoring("recomputed", lr=1.0),
}
SEARCHED = {f"scale {scale}": aruba(Aruba(scale, refinement=1.0), **LOCAL) for scale in SCALES}
CLAIMS_OF_APPENDIX = (
    Claim("HF beats FedAvg", "appendix I, Figure 1a", beats(HF, FEDAVG, (ROW_OF_APPENDIX,))),
    Claim("ARUBA beats FO", "appendix I", beats(ARUBA, FO, (ROW_OF_APPENDIX,))),
    Claim("HF beats ARUBA", "appendix I", beats(HF, ARUBA, (ROW_OF_APPENDIX,))),
)


def appendix(quick: bool) -> Experiment:
    """Appendix I: ARUBA beside FO and HF, and accuracy against time."""
    shared, train = _setting(quick)
    contestants, readings = _contestants(4, 0.001), _readings(0.001)
    larger = {reading: replace(scoring, lr=0.03) for reading, scoring in readings.items()}
    entries = [(name, contestants[name], readings) for name in (FEDAVG, FO, HF, EXACT)]
    entries += [(f"{FEDAVG} of 0.03", contestants[FEDAVG], larger), (ARUBA, SEARCHED, REFINED)]
    return Experiment(
        name="fallah-appendix",
        source="Fallah 2020, appendix I",
        title="ARUBA beside Per-FedAvg, and accuracy against computing time",
        trainings=tuple(
            train(
                "cifar10",
                algorithm=algorithm,
                cells=(Cell(ROW_OF_APPENDIX, name, scorings, APPENDIX.get(name)),),
                every=5 if quick else 50,
            )
            for name, algorithm, scorings in entries
        ),
        claims=CLAIMS_OF_APPENDIX,
        timed=True,
        choices=choices("fallah", "start", "common", "aruba", "larger_steps", scales=SCALES),
        **shared,
    )


def tuned(quick: bool) -> Experiment:
    """Appendix I with everybody's step size chosen as ARUBA's scale is."""
    shared, train = _setting(quick)
    by_lr = {f"lr {lr}": _contestants(4, 0.001, lr) for lr in RATES}
    searched = {name: {lr: of[name] for lr, of in by_lr.items()} for name in (FEDAVG, FO, HF)}
    entries = [(name, candidates, _readings(0.001)) for name, candidates in searched.items()]
    return Experiment(
        name="fallah-tuned",
        source="Fallah 2020, appendix I",
        title="ARUBA beside Per-FedAvg, the step sizes of all chosen on validation data",
        trainings=tuple(
            train("cifar10", algorithm=candidates, cells=(Cell(ROW_OF_APPENDIX, name, scorings, APPENDIX.get(name)),))
            for name, candidates, scorings in (*entries, (ARUBA, SEARCHED, REFINED))
        ),
        claims=CLAIMS_OF_APPENDIX,
        choices=choices("fallah", "start", "common", "aruba", "tuned", scales=SCALES, rates=RATES),
        **shared,
    )
