"""APFL 2020, Figures 1 to 6 (sections 1 and 5, appendices B.2 and C)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from personax.algorithms import Algorithm, apfl, fedavg
from personax.data import datasets
from personax.data.datasets.fetch import folder
from personax.data.datasets.stand_in import STAND_IN
from personax.data.federation import Federation
from personax.evaluation.scoring import Scoring
from personax.models import logistic_regression, standardized
from personax.models.tasks import classification
from personax.reproduce.apfl.networks import synthetic_of_authors
from personax.reproduce.apfl.setting import (
    ADAPTIVE,
    BATCH,
    CHOSEN,
    DECAYS,
    FEDAVG,
    FIXED,
    FROM_LITTLE,
    LOCALIZED,
    LOCALIZED_FEDAVG,
    LOCALIZED_SCAFFOLD,
    LOGISTIC,
    LR,
    MLP,
    SCAFFOLD,
    SPLIT,
    accuracy_of,
    by_classes,
    cells_of,
    chosen,
    contestants_of,
    experiment_of,
    loss_of,
    mixture,
    online,
    online_cells,
    plain_steps,
    scorings_of,
    size_of,
)
from personax.reproduce.experiment import (
    MAIN,
    OF_MNIST,
    Cell,
    Claim,
    Contrast,
    Experiment,
    PaperTraining,
    Reading,
    baselines,
    beats,
)

NUM_NEW, NUM_SAMPLES = 3, 250  # in Figure 6: new clients, samples of each client
EPOCHS = {num: f"{num} epoch{'s' * (num > 1)}" for num in (1, 2, 3, 4, 5)}


def _classes(num: int) -> str:
    return "IID" if num == 10 else f"{num} classes"


def figure1(quick: bool) -> Experiment:
    """Reproduce Figure 1: losses of personal and global models as clients differ more."""
    size, lr = size_of(quick), DECAYS[CHOSEN](LR, 0.01)
    names = {num: _classes(num) for num in ((2, 10) if quick else (2, 4, 6, 8, 10))}
    wanted = ((ADAPTIVE,), (FIXED[0],), (FEDAVG, LOCALIZED_FEDAVG), (SCAFFOLD, LOCALIZED_SCAFFOLD))
    trainings = []
    for row in names.values():
        algorithms = contestants_of(lr, lr, num_steps=10, batch_size=BATCH)
        for columns in wanted:
            column = columns[0]
            readings = scorings_of(column)
            cells = (
                Cell(loss_of(row), column, readings, metric="train_loss"),
                Cell(f"{row}: validation loss", column, readings, metric="loss"),
            )
            trainings.append(PaperTraining(row, LOGISTIC, algorithms[columns], online(size), cells))
    rows = (loss_of("2 classes"), "2 classes: validation loss")
    grows = lambda column: tuple(
        Contrast(kind, ((f"IID: {kind}", column),), ((f"2 classes: {kind}", column),))
        for kind in ("training loss", "validation loss")
    )
    pairs = list(pairwise(names.values()))
    by_steps = lambda column: tuple(
        Contrast(f"{kind}, {more} over {fewer}", ((f"{more}: {kind}", column),), ((f"{fewer}: {kind}", column),))
        for kind in ("training loss", "validation loss")
        for fewer, more in pairs
    )
    return experiment_of(
        quick,
        size,
        name="apfl-figure1",
        source="APFL 2020, Figure 1, section 1",
        title="Losses over the number of classes per client, MNIST, logistic regression",
        federations={row: by_classes(datasets.mnist, num, size["num_clients"]) for num, row in names.items()},
        trainings=tuple(trainings),
        claims=(
            Claim("FedAvg's losses grow as clients differ more", "section 1", grows(FEDAVG)),
            Claim("SCAFFOLD's losses grow as clients differ more", "section 1", grows(SCAFFOLD)),
            Claim("FedAvg's losses grow with each step from IID to 2 classes", "Figure 1", by_steps(FEDAVG)),
            Claim("SCAFFOLD's losses grow with each step from IID to 2 classes", "Figure 1", by_steps(SCAFFOLD)),
            Claim("APFL is below FedAvg at 2 classes", "Figure 1", beats(ADAPTIVE, FEDAVG, rows)),
            Claim("APFL is below SCAFFOLD at 2 classes", "Figure 1", beats(ADAPTIVE, SCAFFOLD, rows)),
        ),
        choices=chosen(
            "divided", "shards", "scale", "steps", "scaffold", "mixing", "logistic", "decay", "figure1", mixing=0.5
        ),
        needs=("mnist",),
    )


STANDARDIZED = "standardized"
FIGURE_2 = (
    Reading(MAIN.name, "Pixels in [0, 1].", "our choice"),
    Reading(STANDARDIZED, "Standardized pixels.", "the authors' code"),
)
SUFFIXES = {MAIN.name: "", STANDARDIZED: ", standardized"}
TASKS = {
    MAIN.name: LOGISTIC,
    STANDARDIZED: classification(standardized(logistic_regression(10, init="fan_in"), *OF_MNIST), l2=1e-4),
}


def figure2(quick: bool) -> Experiment:
    """Reproduce Figure 2: fixed mixing weights beside FedAvg and SCAFFOLD, from 2 classes each to IID."""
    size, lr = size_of(quick), DECAYS[CHOSEN](LR, 0.01)
    names = {num: _classes(num) for num in (2, 4, 10)}
    plain = plain_steps(lr, lr, size["num_rounds"], 10)
    readings = FIGURE_2[:1] if quick else FIGURE_2
    places = {(row, one.name): f"{row}{SUFFIXES[one.name]}" for one in readings for row in names.values()}
    trainings = [
        PaperTraining(
            row,
            TASKS[reading],
            algorithm,
            online(size),
            cells_of(place, columns, reading=reading, plain=plain),
            every=1 if quick else 5,
        )
        for (row, reading), place in places.items()
        for columns, algorithm in contestants_of(lr, lr, num_steps=10, batch_size=BATCH).items()
        if columns[0] not in (ADAPTIVE, FROM_LITTLE)
    ]
    of = lambda name, *wanted: tuple(name(place) for (row, _), place in places.items() if row in wanted)
    losses = of(loss_of, *names.values())
    two, four, iid = (of(accuracy_of, row) for row in names.values())
    along_weight = tuple(
        Contrast(f"{row}: rise and fall", tuple((row, column) for column in (FEDAVG, *FIXED)), ())
        for row in (*two, *four, *iid)
    )  # FedAvg is APFL with the weight 0, as the caption states
    vanishing = tuple(
        Contrast(
            f"lead over {other}: {near} over {far}",
            ((near, FIXED[0]), (far, other)),
            ((near, other), (far, FIXED[0])),
        )
        for rows in (zip(two, four, strict=True), zip(four, iid, strict=True))
        for near, far in rows
        for other in LOCALIZED
    )
    return experiment_of(
        quick,
        size,
        name="apfl-figure2",
        source="APFL 2020, Figure 2, section 5",
        title="Fixed mixing weights on MNIST, logistic regression",
        federations={row: by_classes(datasets.mnist, num, size["num_clients"]) for num, row in names.items()},
        trainings=tuple(trainings),
        claims=(
            Claim(
                "APFL with 0.25 beats the localized models at 2 and 4 classes",
                "section 5",
                beats(FIXED[0], LOCALIZED, two + four),
            ),
            Claim(
                "0.25 is the best fixed weight at 2 and 4 classes", "section 5", beats(FIXED[0], FIXED[1:], two + four)
            ),
            Claim("larger weights are preferable at 2 classes", "appendix B.2", beats(FIXED[1:], FIXED[0], two)),
            Claim(
                "APFL with 0.25 beats the global models at 2 and 4 classes",
                "section 5",
                beats(FIXED[0], (FEDAVG, SCAFFOLD), two + four),
            ),
            Claim("the advantage of 0.25 over the localized models vanishes towards IID", "section 5", vanishing),
            Claim("accuracy is not monotone in the weight, from 0 to 0.75", "section 5", along_weight, of="turn"),
            Claim("localized models are preferable when IID", "section 5", beats(LOCALIZED, FIXED[0], iid)),
            Claim(
                "a larger weight lowers the training loss",
                "section 5",
                (*beats(FIXED[1], FIXED[0], losses), *beats(FIXED[2], FIXED[1], losses)),
            ),
        ),
        readings=readings,
        needs=("mnist",),
        choices=chosen("divided", "shards", "scale", "steps", "scaffold", "logistic", "decay"),
    )


def _synthetic(spread: float, num_clients: int, **changes: Any) -> Callable[[], Federation]:
    key = jax.random.key(SPLIT)
    return lambda: datasets.synthetic(spread, spread, num_clients=num_clients, key=key, **changes)


def _synthetic_of_authors(spread: float, num_clients: int) -> Callable[[], Federation]:
    return lambda: synthetic_of_authors(spread, num_clients, jax.random.key(SPLIT))


GENERATOR = "authors' generator"
TWO_CLASSES = classification(logistic_regression(2, init="fan_in"), l2=1e-4)
FIGURE_3 = (
    Reading(MAIN.name, "Features, classes and sample counts as in Li 2018; spreads are variances.", "the text"),
    Reading(
        GENERATOR, "2 classes, 500 to 1000 samples per client; spreads are standard deviations.", "the authors' code"
    ),
)


def figure3(quick: bool) -> Experiment:
    """Reproduce Figure 3: adaptive mixing on three synthetic federations."""
    size, lr = size_of(quick), DECAYS[CHOSEN](LR, 0.01)
    made = {MAIN.name: _synthetic, GENERATOR: _synthetic_of_authors}
    rows = {
        (name, spread): f"synthetic({spread}, {spread}){'' if name == MAIN.name else ', ' + name}"
        for name in made
        for spread in (0.0, 0.5, 1.0)
    }
    contestants = contestants_of(lr, lr, num_steps=10, batch_size=BATCH)
    tasks = {MAIN.name: LOGISTIC, GENERATOR: TWO_CLASSES}
    mixed = (FROM_LITTLE, ADAPTIVE)
    trainings = [
        PaperTraining(
            row,
            tasks[name],
            contestants[columns],
            online(size),
            cells_of(row, columns, reading=name),
            every=1 if quick else 5,
        )
        for (name, _), row in rows.items()
        for columns in ((FROM_LITTLE,), (ADAPTIVE,), (FEDAVG, LOCALIZED_FEDAVG))
    ]
    everywhere = lambda name, column: tuple((accuracy_of(row), column) for (of, _), row in rows.items() if of == name)
    closed = tuple(
        Contrast(f"spread of {other} less that of {column}, {name}", everywhere(name, column), everywhere(name, other))
        for name in made
        for column in mixed
        for other in (FEDAVG, LOCALIZED_FEDAVG)
    )
    better = lambda rows: beats(mixed, LOCALIZED_FEDAVG, rows)
    return experiment_of(
        quick,
        size,
        name="apfl-figure3",
        source="APFL 2020, Figure 3, section 5",
        title="Adaptive mixing on synthetic data, logistic regression",
        federations={row: made[name](spread, size["num_clients"]) for (name, spread), row in rows.items()},
        trainings=tuple(trainings),
        claims=(
            Claim("APFL trains to a lower loss than FedAvg", "section 5", better(map(loss_of, rows.values()))),
            Claim("APFL generalizes better than FedAvg", "section 5", better(map(accuracy_of, rows.values()))),
            Claim("adaptive mixing closes the gap across heterogeneity", "section 5", closed, of="spread"),
        ),
        readings=FIGURE_3,
        choices=chosen("steps", "mixing", "logistic", "decay", "online", "figure3", mixing="0.01 and 0.5"),
    )


def _in_both(words: str, better: list[tuple[str, str]], worse: list[tuple[str, str]]) -> tuple[Contrast, ...]:
    """Return a contrast of settings and columns, for training losses and for validation accuracies."""
    places = lambda of, side: tuple((of(row), column) for row, column in side)
    kinds = {"training loss": loss_of, "validation accuracy": accuracy_of}
    return tuple(Contrast(f"{kind}: {words}", places(of, better), places(of, worse)) for kind, of in kinds.items())


def figure4(quick: bool) -> Experiment:
    """Reproduce Figure 4: only a share of the clients is online in each round."""
    size, lr = size_of(quick), DECAYS[CHOSEN](LR, 0.01)
    shares = {share: f"{share:.0%} online" for share in (0.3, 0.5, 0.7)}
    trainings = [
        PaperTraining("mnist", LOGISTIC, algorithm, online(size, share), cells_of(row, columns), 1 if quick else 5)
        for share, row in shares.items()
        for columns, algorithm in contestants_of(lr, lr, num_steps=10, batch_size=BATCH).items()
        if columns[0] in (*FIXED, FEDAVG)
    ]
    both = tuple(of(row) for of in (loss_of, accuracy_of) for row in shares.values())
    many, few = shares[0.7], shares[0.3]
    cushioned = f"what {FIXED[0]} loses from 70 to 30 % less what {FIXED[2]} loses"
    return experiment_of(
        quick,
        size,
        name="apfl-figure4",
        source="APFL 2020, Figure 4, appendix B.2",
        title="Client sampling on MNIST with 2 classes each, logistic regression",
        federations={"mnist": by_classes(datasets.mnist, 2, size["num_clients"])},
        trainings=tuple(trainings),
        claims=(
            Claim("APFL beats localized FedAvg at every rate", "appendix B.2", beats(FIXED, LOCALIZED_FEDAVG, both)),
            Claim(
                "fewer clients online make FedAvg worse",
                "appendix B.2",
                _in_both("70 over 30 %", [(many, LOCALIZED_FEDAVG)], [(few, LOCALIZED_FEDAVG)]),
            ),
            Claim(
                "larger mixing weights cushion client sampling",
                "appendix B.2",
                _in_both(cushioned, [(many, FIXED[0]), (few, FIXED[2])], [(few, FIXED[0]), (many, FIXED[2])]),
            ),
        ),
        needs=("mnist",),
        choices=chosen("divided", "shards", "scale", "steps", "logistic", "decay", "figure4"),
    )


def femnist_writers(num_clients: int) -> Federation:
    """Load FEMNIST's digits by writer, or their stand-in, from the data folder."""
    place = folder() / "femnist"
    if not place.is_dir():
        raise FileNotFoundError(
            f"Folder not found: {place}. apfl-figure5 needs FEMNIST by writer: create it with LEAF's scripts "
            "(`preprocess.sh -s niid --sf 1.0 -k 0 -t sample --tf 0.8`) and copy its `data` there. For a trial without "
            "it, use `personax data stand-in`."
        )
    federation = datasets.femnist(place, digits_only=True)
    if federation.names is not None and str(federation.names[0]).startswith(STAND_IN):
        federation = replace(federation, origin="A STAND-IN for FEMNIST with invented writers, see `write_stand_in`.")
    if federation.num_clients < num_clients:
        raise ValueError(f"apfl-figure5 needs {num_clients} writers, got {federation.num_clients} in {place}.")
    return federation.select(np.arange(num_clients))


def figure5(quick: bool) -> Experiment:
    """Reproduce Figure 5: EMNIST digits by writer, adaptive mixing from 0.5, one epoch per round."""
    size = {"num_clients": 100, "num_rounds": 5} if quick else {"num_clients": 1000, "num_rounds": 250}
    lr = DECAYS[CHOSEN](LR, 0.01)
    local: dict[str, Any] = {"num_epochs": 1, "batch_size": BATCH, "sampling": "shuffled"}
    row = "writers"
    entries = {
        (ADAPTIVE,): mixture(lr=lr, mix=0.5, update_mix="round", **local),
        (FEDAVG, LOCALIZED_FEDAVG): fedavg(lr=lr, **local),
    }
    trainings = [
        PaperTraining(row, MLP, algorithm, online(size, 0.1), online_cells(row, columns), 1 if quick else 10)
        for columns, algorithm in entries.items()
    ]
    better = beats(ADAPTIVE, LOCALIZED_FEDAVG, (accuracy_of(row),))
    return experiment_of(
        quick,
        size,
        name="apfl-figure5",
        source="APFL 2020, Figure 5, appendix B.2",
        title="EMNIST digits by writer, MLP, adaptive mixing",
        federations={row: partial(femnist_writers, size["num_clients"])},
        trainings=tuple(trainings),
        claims=(
            Claim("APFL generalizes better than localized FedAvg", "appendix B.2, Figure 5", better),
            Claim(
                "APFL reaches the training loss of localized FedAvg",
                "appendix B.2, Figure 5",
                (),
                untestable="Equality of losses is not an ordering that an interval can decide.",
            ),
        ),
        choices=chosen("scale", "figure5_data", "figure5_weight", "epochs", "decay", "figure5"),
        unavailable=(
            "Data unavailable: EMNIST by writer could not be obtained. Public copies hold only scripts, pointers of "
            "Git LFS, or images without labels."
        ),
    )


def _with_newcomers(spread: float, num_clients: int) -> Callable[[], Federation]:
    make = _synthetic(spread, num_clients + NUM_NEW, num_samples=NUM_SAMPLES)
    return lambda: make().hold_out(NUM_NEW, key=jax.random.key(SPLIT))


def _of_newcomers(data: str, name: str, model: Any) -> tuple[Cell, ...]:
    """Return the cells with losses and accuracies of a federation's newcomers after each epoch."""
    cells = []
    for num, words in EPOCHS.items():
        steps = num * NUM_SAMPLES * 4 // 5 // BATCH
        readings = {"ours": Scoring(model, steps, LR, BATCH, clients="held_out", score_on="both")}
        cells.append(Cell(loss_of(f"{data}, {words}"), name, readings, metric="train_loss"))
        cells.append(Cell(accuracy_of(f"{data}, {words}"), name, readings))
        if model == "adapted":
            cells += baselines(accuracy_of(f"{data}, {words}"), readings, held_out=True)
    return tuple(cells)


def figure6(quick: bool) -> Experiment:
    """Reproduce Figure 6: 3 clients that join after training."""
    size, lr = size_of(quick), DECAYS[CHOSEN](LR, 0.01)
    size["num_clients"] -= NUM_NEW
    local: dict[str, Any] = {"num_epochs": 1, "batch_size": BATCH, "sampling": "shuffled"}
    mixed = "APFL, 0.5"
    entries: dict[str, tuple[Algorithm, str]] = {
        mixed: (apfl(lr=lr, mix=0.5, update_mix="never", **local), "recomputed"),
        "FedAvg": (fedavg(lr=lr, **local), "adapted"),
    }
    spreads = {spread: f"synthetic({spread}, {spread})" for spread in (0.0, 0.5)}
    trainings = [
        PaperTraining(data, LOGISTIC, algorithm, online(size), _of_newcomers(data, name, model))
        for data in spreads.values()
        for name, (algorithm, model) in entries.items()
    ]
    last = [f"{data}, {EPOCHS[5]}" for data in spreads.values()]
    harder = tuple(
        Contrast(f"{kind}, {name}: {last[0]} over {last[1]}", ((of(last[0]), name),), ((of(last[1]), name),))
        for kind, of in (("training loss", loss_of), ("validation accuracy", accuracy_of))
        for name in entries
    )
    return experiment_of(
        quick,
        size,
        num_seeds=10,
        name="apfl-figure6",
        source="APFL 2020, Figure 6, appendix C",
        title="New participants, synthetic data, logistic regression",
        federations={row: _with_newcomers(spread, size["num_clients"]) for spread, row in spreads.items()},
        trainings=tuple(trainings),
        claims=(
            Claim(
                "newcomers reach a lower training loss with APFL",
                "appendix C",
                beats(mixed, "FedAvg", map(loss_of, last)),
            ),
            Claim(
                "newcomers generalize better with APFL", "appendix C", beats(mixed, "FedAvg", map(accuracy_of, last))
            ),
            Claim("more diversity makes it harder to personalize", "Figure 6", harder),
        ),
        choices=chosen("logistic", "decay", "online", "epochs", "figure6", num_samples=NUM_SAMPLES),
    )
