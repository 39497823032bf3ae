"""Causes of the differences from Fallah's Table 1: the cited code, its parts, and two printed formulas."""

from collections.abc import Callable
from typing import Any

from personax.algorithms import Algorithm, per_fedavg
from personax.curvature import Hvp, finite_difference
from personax.models.tasks import classification
from personax.reproduce.choices import choices
from personax.reproduce.cited_code import WithoutTwo, network, squared_error
from personax.reproduce.experiment import MAIN, Cell, Claim, Experiment, PaperTraining, Reading, baselines, beats
from personax.reproduce.fallah import (
    COLUMNS,
    FEDAVG,
    FO,
    HF,
    LR,
    TABLE_1,
    TASK,
    contestants_of,
    from_to,
    readings_of,
    setting,
)
from personax.reproduce.measures import StepTimesCurvature
from personax.typing import Task

ON_OUTER, WITHOUT_TWO = "Per-FedAvg (HF, Hessian on D')", "Per-FedAvg (HF, without the 2)"
RADIUS = 1e-3
DECISIVE = (3, 4)  # CIFAR-10 with 4 steps, alpha 0.001 and 0.01
_PART = "investigates a cause: one part of the cited code"

TASKS: dict[str, Task] = {
    "cited": squared_error(network()),
    "main": TASK,
    "cited loss": squared_error(network("glorot", "linear")),
    "cited output": classification(network("glorot", "elu")),
    "cited init": classification(network("cited", "linear")),
    "PyTorch's init": classification(network("fan_in", "linear")),
    "cited, ELU 0.2": squared_error(network(elu=0.2)),
}
READINGS = (
    Reading(
        "cited",
        "The network, loss and initialization of [45], the code that the paper builds on: ELU on the output, squared "
        "error, kernels from N(0, 2 / n_in), biases from N(0, 1).",
        "the cited code",
    ),
    Reading(MAIN.name, "Cross entropy, a linear output, Glorot-normal kernels and zero biases.", "our choice"),
    Reading("cited loss", "As main, with the squared error of [45].", "the cited code", _PART),
    Reading("cited output", "As main, with ELU on the output as in [45].", "the cited code", _PART),
    Reading("cited init", "As main, with the initialization of [45].", "the cited code", _PART),
    Reading(
        "PyTorch's init",
        "As main, kernels and biases uniform within 1 / sqrt(inputs).",
        "our choice",
        "looks for a cause",
    ),
    Reading(
        "cited, ELU 0.2",
        "As cited, with 0.2 (exp(x) - 1) below 0, which several public copies of [45] call ELU.",
        "the cited code",
        "looks for a cause: not the activation that the paper names",
    ),
)


def row_of(row: str, reading: str) -> str:
    """The name of a row of Table 1 in a reading."""
    return f"{row}; {reading}"


def _hessian_free(num_steps: int, adapt_lr: float) -> dict[str, Algorithm]:
    """HF with the Hessian on D', as Algorithm 1 prints it, and without the 2, as section 5 prints it."""

    def meta(hvp: Hvp, curvature_on: str = "own") -> Algorithm:
        batches = {"num_steps": num_steps, "batch_size": 40}
        return per_fedavg(adapt_lr=adapt_lr, lr=LR, hvp=hvp, curvature_on=curvature_on, **batches)  # pyright: ignore[reportArgumentType]

    return {ON_OUTER: meta(finite_difference(RADIUS), "outer"), WITHOUT_TWO: meta(WithoutTwo(RADIUS))}


def _trainings(train: Callable[..., PaperTraining], reading: str, at: int) -> list[PaperTraining]:
    """Return a row of Table 1 in a reading, with step size times curvature before and after training."""
    name, data, num_steps, adapt_lr, *paper = TABLE_1[at]
    row, scorings = row_of(name, reading), readings_of(adapt_lr)
    curvature = {"alpha": StepTimesCurvature(adapt_lr)}
    numbers: dict[str, Any] = dict(zip(COLUMNS, paper, strict=True))
    algorithms = contestants_of(num_steps, adapt_lr)
    if reading == MAIN.name or (reading == "cited" and at in DECISIVE):
        algorithms |= _hessian_free(num_steps, adapt_lr)
    found = []
    for column in (one for one in algorithms if one in (*COLUMNS, ON_OUTER, WITHOUT_TWO)):
        of = f"{row}: alpha times curvature"
        cells = [Cell(row, column, scorings, numbers.get(column), reading=reading)]
        cells += [Cell(of, column, curvature, metric="step_times_curvature", reading=reading)]
        if column == FEDAVG:
            cells += [
                *baselines(row, scorings, reading),
                Cell(of, "before training", curvature, metric="step_times_curvature", reading=reading, at="start"),
            ]
        found.append(train(data, task=TASKS[reading], algorithm=algorithms[column], cells=tuple(cells)))
    return found


def causes(quick: bool) -> Experiment:
    """Repeat Table 1 with the cited code's network, loss and initialization, together and separately."""
    shared, train = setting(quick)
    rows: dict[int, list[str]] = {at: [] for at in range(len(TABLE_1))}
    trainings: list[PaperTraining] = []
    readings = READINGS[:1] if quick else READINGS
    for reading in readings:
        every = reading.name == "cited" and not quick
        for at in range(len(TABLE_1)) if every else DECISIVE:
            rows[at].append(row_of(TABLE_1[at][0], reading.name))
            trainings += _trainings(train, reading.name, at)
    everywhere = [row for at in rows for row in rows[at]]
    alphas = [(row_of(TABLE_1[3][0], one.name), row_of(TABLE_1[4][0], one.name)) for one in readings]
    return Experiment(
        name="fallah-causes",
        source="Fallah 2020, Table 1, section 5",
        title="Table 1 with the network, loss and initialization of the code that the paper cites",
        trainings=tuple(trainings),
        claims=(
            Claim("HF beats FedAvg in all six rows", "Table 1", beats(HF, FEDAVG, everywhere)),
            Claim("HF beats FO in all six rows", "Table 1", beats(HF, FO, everywhere)),
            Claim("FO falls behind FedAvg on CIFAR-10 with 4 steps", "Table 1", beats(FEDAVG, FO, rows[3] + rows[4])),
            Claim(
                "HF gains as alpha goes from 0.001 to 0.01",
                "section 5, observation (ii)",
                tuple(from_to(HF, small, large) for small, large in alphas),
            ),
            Claim(
                "FO loses as alpha goes from 0.001 to 0.01",
                "section 5, observation (ii)",
                tuple(from_to(FO, large, small) for small, large in alphas),
            ),
        ),
        choices=choices("fallah", "causes", "common"),
        readings=readings,
        needs=("mnist", "cifar10"),
        causes_of="fallah-table1",
        **shared,
    )
