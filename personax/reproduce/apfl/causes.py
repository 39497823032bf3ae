"""Causes of the differences from APFL's Tables 1 and 2: parts of the code that the authors published."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from personax.algorithms import Algorithm, fedavg
from personax.client.local import Local
from personax.client.step_sizes import StepSize
from personax.data import datasets
from personax.models import cnn, mlp, standardized
from personax.models.tasks import classification
from personax.objectives import Mixture
from personax.reproduce.apfl.networks import augmented, batch_norm_mlp, mixing_outputs, pairs
from personax.reproduce.apfl.setting import (
    ADAPTIVE,
    BATCH,
    CHOSEN,
    DECAYS,
    FEDAVG,
    FIXED,
    FROM_LITTLE,
    LOCALIZED_FEDAVG,
    LR,
    MIXES,
    MLP,
    PER_FEDAVG,
    PFEDME,
    accuracy_of,
    by_classes,
    cells_of,
    chosen,
    contestants_of,
    divided,
    experiment_of,
    loss_of,
    online,
    online_cells,
    plain_steps,
    size_of,
)
from personax.reproduce.apfl.tables import CNN, TABLE_1, TABLE_2, claims_of_table1
from personax.reproduce.apfl.variants import KeptStep, OutputMixture, PerEpoch, PersistentTheta, WithCopy
from personax.reproduce.experiment import OF_CIFAR, OF_MNIST, Claim, Experiment, PaperTraining, Reading, beats
from personax.server import synchronous
from personax.typing import Task

STEPS, STEPS_PER_EPOCH = 20, 24  # in Table 2: 480 samples in batches of 20
DIVISOR = 1.01
DROPOUT = 0.25
WIDTHS = (200, 200)
_PART = "investigates a cause: one part of the authors' code"
_NORMALIZED = batch_norm_mlp(WIDTHS, 10, DROPOUT)

AUTHORS, OTHERS = "authors' code", "other methods"
READINGS = (
    Reading(
        AUTHORS,
        "All of it: batch normalization with batch statistics and dropout 0.25, standardized inputs, mixed outputs, "
        "a step size of w that is divided by 1.01 after each local epoch while v keeps 0.1, classes k and k + 5, "
        "perFedAvg that keeps its adaptation step, pFedMe with a persistent theta.",
        "the authors' code",
    ),
    Reading("standardized", "As in Table 2, with standardized pixels.", "the authors' code", _PART),
    Reading("batch norm", "As in Table 2, with the network of the authors' code.", "the authors' code", _PART),
    Reading(
        "step per epoch",
        "As in Table 2, with w's step size divided by 1.01 after each local epoch.",
        "the authors' code",
        _PART,
    ),
    Reading("mixed outputs", "As in Table 2, mixing outputs instead of parameters.", "the authors' code", _PART),
    Reading(
        OTHERS,
        "As in Table 2, with perFedAvg that keeps its adaptation step and pFedMe with a persistent theta.",
        "the authors' code",
        "investigates a cause: not the algorithms that the paper names",
    ),
)


@dataclass(frozen=True)
class _Variant:
    """A network, the decay of w's step size, and the way models are mixed."""

    task: Task
    lr: StepSize
    local_lr: float | None = None
    mixes_outputs: bool = False

    def apfl(self, mix: float, adaptive: bool) -> Algorithm:
        """Return APFL with this step size and mixing."""
        update_mix = "round" if adaptive else "never"
        plain = WithCopy(Mixture(mix, update_mix=update_mix, local_lr=self.local_lr))
        objective = OutputMixture(mix, self.local_lr, adaptive) if self.mixes_outputs else plain
        return Algorithm(objective, Local(self.lr, num_steps=STEPS, batch_size=BATCH), synchronous())


_GEOMETRIC = DECAYS[CHOSEN](LR, 0.01)
_PER_EPOCH = PerEpoch(LR, DIVISOR, STEPS_PER_EPOCH)
VARIANTS = {
    AUTHORS: _Variant(
        classification(standardized(mixing_outputs(_NORMALIZED), *OF_MNIST)), _PER_EPOCH, LR, mixes_outputs=True
    ),
    "standardized": _Variant(classification(standardized(mlp(WIDTHS, 10, "relu", "fan_in"), *OF_MNIST)), _GEOMETRIC),
    "batch norm": _Variant(classification(_NORMALIZED), _GEOMETRIC),
    "step per epoch": _Variant(MLP, _PER_EPOCH),
    "mixed outputs": _Variant(
        classification(mixing_outputs(mlp(WIDTHS, 10, "relu", "fan_in"))), _GEOMETRIC, mixes_outputs=True
    ),
    OTHERS: _Variant(MLP, _GEOMETRIC),
}


def _others() -> dict[str, Algorithm]:
    """Return perFedAvg and pFedMe as in the authors' code, without decay."""
    kept = Local(0.001, num_steps=STEPS, batch_size=BATCH, query_share=0.1)
    stays = Local(0.01, num_steps=STEPS, batch_size=BATCH)
    return {
        PER_FEDAVG: Algorithm(KeptStep(0.01), kept, synchronous()),
        PFEDME: Algorithm(PersistentTheta(15.0, 0.01), stays, synchronous()),
    }


def _table2_trainings(size: Mapping[str, int], name: str) -> list[PaperTraining]:
    """Return the trainings of a reading: all columns for the authors' code, otherwise the decisive ones."""
    variant = VARIANTS[name]
    whole = name in (AUTHORS, OTHERS)
    mixed = dict(zip(FIXED, MIXES, strict=True)) if whole else {FIXED[0]: MIXES[0]}
    algorithms: dict[tuple[str, ...], Algorithm] = {(one,): variant.apfl(mix, False) for one, mix in mixed.items()}
    algorithms[(ADAPTIVE,)] = variant.apfl(0.5, True)
    if name == AUTHORS:
        algorithms[(FROM_LITTLE,)] = variant.apfl(0.01, True)
    algorithms[(FEDAVG, LOCALIZED_FEDAVG)] = fedavg(lr=variant.lr, num_steps=STEPS, batch_size=BATCH)
    algorithms |= {(one,): algorithm for one, algorithm in _others().items() if whole}
    data = "pairs" if name == AUTHORS else "classes"
    return [
        PaperTraining(data, variant.task, algorithm, online(size), online_cells(name, columns, TABLE_2, reading=name))
        for columns, algorithm in algorithms.items()
    ]


def table2_causes(quick: bool) -> Experiment:
    """Repeat Table 2 with the authors' code, and with its parts."""
    size = size_of(quick)
    readings = READINGS[:1] if quick else READINGS
    rows = tuple(one.name for one in readings)
    whole = tuple(row for row in rows if row in (AUTHORS, OTHERS))
    both = lambda names: (*map(loss_of, names), *map(accuracy_of, names))
    accuracies = tuple(map(accuracy_of, whole))
    return experiment_of(
        quick,
        size,
        name="apfl-table2-causes",
        source="APFL 2020, Table 2, section 5",
        title="Table 2 with the authors' published code, and with parts of it",
        federations={
            "pairs": divided(datasets.mnist, pairs, size["num_clients"]),
            "classes": by_classes(datasets.mnist, 2, size["num_clients"]),
        },
        trainings=tuple(training for row in rows for training in _table2_trainings(size, row)),
        claims=(
            Claim("APFL beats localized FedAvg", "Table 2", beats((FIXED[0], ADAPTIVE), LOCALIZED_FEDAVG, both(rows))),
            Claim("APFL beats perFedAvg and pFedMe", "Table 2", beats(FIXED, (PER_FEDAVG, PFEDME), both(whole))),
            Claim("adaptive mixing has the best accuracy", "section 5", beats(ADAPTIVE, FIXED, accuracies)),
            Claim("perFedAvg beats localized FedAvg", "section 5", beats(PER_FEDAVG, LOCALIZED_FEDAVG, accuracies)),
            Claim("pFedMe beats the global FedAvg", "section 5", beats(PFEDME, FEDAVG, accuracies)),
            Claim("localized FedAvg beats pFedMe", "section 5", beats(LOCALIZED_FEDAVG, PFEDME, accuracies)),
        ),
        readings=readings,
        needs=("mnist",),
        causes_of="apfl-table2",
        choices=chosen("steps", "online", "table2_causes"),
    )


OURS, THEIRS = "our network", "authors' network"
_REDUCED = "20 of 100 clients, so that each client holds as much data as in Table 1"
NETWORKS = {
    OURS: (Reading(OURS, f"The network of our Table 1; {_REDUCED}.", "our choice"), CNN),
    THEIRS: (
        Reading(
            THEIRS,
            "20 and 50 channels, 5 x 5 without padding, 512 units; images cropped and flipped at random in training; "
            f"{_REDUCED}.",
            "the authors' code",
        ),
        classification(
            standardized(augmented(cnn((20, 50), (512,), 10, kernel_size=5, padding="VALID", init="fan_in")), *OF_CIFAR)
        ),
    ),
}


def table1_causes(quick: bool) -> Experiment:
    """Repeat Table 1 at a fifth of its size, with the authors' network beside ours."""
    size = {"num_clients": 5, "num_rounds": 2} if quick else {"num_clients": 20, "num_rounds": 100}
    lr, scaffold_lr = DECAYS[CHOSEN](LR, 0.01), DECAYS[CHOSEN](0.05, 0.05)
    plain = plain_steps(scaffold_lr, lr, size["num_rounds"], 10)
    local: dict[str, Any] = {"num_steps": 10, "batch_size": BATCH}
    trainings = [
        PaperTraining(
            "cifar10", task, algorithm, online(size), cells_of(row, columns, TABLE_1, reading=row, plain=plain)
        )
        for row, (_, task) in NETWORKS.items()
        for columns, algorithm in contestants_of(lr, scaffold_lr, **local).items()
    ]
    return experiment_of(
        quick,
        size,
        name="apfl-table1-causes",
        source="APFL 2020, Table 1, section 5",
        title="Table 1 at a fifth of its size, with the authors' network beside ours",
        federations={"cifar10": lambda: by_classes(datasets.cifar10, 2, 100)().select(np.arange(size["num_clients"]))},
        trainings=tuple(trainings),
        claims=claims_of_table1(tuple(NETWORKS)),
        readings=tuple(reading for reading, _ in NETWORKS.values()),
        needs=("cifar10",),
        causes_of="apfl-table1",
        choices=chosen("divided", "scaffold", "mixing", "relu", "steps", "table1_causes", mixing="0.5 and 0.01"),
    )
