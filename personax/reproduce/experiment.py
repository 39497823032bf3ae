"""What a reproduction is: cells with the paper's numbers, what the paper does not say, and the claims to judge."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from typing import Protocol as Interface

import numpy as np

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.evaluation.scoring import Scoring
from personax.schedules import Schedule
from personax.typing import Array, Task

OF_CIFAR = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # mean and deviation of each colour, training images
Verdict = Literal["holds", "holds in part", "does not hold", "undecided"]


class MakesSchedule(Interface):
    """The schedule of one seed."""

    def __call__(self, *, key: Array) -> Schedule: ...


@dataclass(frozen=True)
class ActiveShare:
    """The mean share of active clients up to a virtual time, in % (see `Schedule.active_share`).

    `to_the_end` counts the members of a round as active until it ends.
    """

    to_the_end: bool = False
    flag = ""

    def describe(self) -> str:
        """The measure in words."""
        if self.to_the_end:
            return "the share of clients in the cohort"
        return "the share of clients that have a model and have not yet delivered an update, mean over virtual time"

    def of(self, schedule: Schedule, time: float) -> float:
        """The mean over 1000 times up to this one."""
        if self.to_the_end:
            return 100 * schedule.num_events / int(schedule.round_ends.sum()) / schedule.num_clients
        return 100 * float(schedule.active_share(np.linspace(0, time, 1000, endpoint=False)).mean())


@dataclass(frozen=True)
class Cell:
    """One number of a table, or one curve of a figure, and what the paper says of it.

    `scorings` are the readings of the paper's evaluation, by name; the first is set beside the paper's number.
    """

    row: str
    column: str
    scorings: Mapping[str, Scoring | ActiveShare]
    paper: tuple[float, float] | None = None  # the value and half its interval, as printed (accuracies in %)
    metric: str = "accuracy"


@dataclass(frozen=True)
class PaperTraining:
    """Who is trained on what, and the cells that it fills. With `every`, the first readings are followed along it.

    Of several algorithms the best on validation data, cut from the clients' training data, is run: best by the
    first cell's first reading that does not adapt on what it scores. They are compared along the same schedule with all
    seeds or, where that takes too long, along `search` with the first one.
    """

    data: str  # the name of the federation
    task: Task
    algorithm: Algorithm | Mapping[str, Algorithm]  # one, or by name those to choose from
    schedule: MakesSchedule
    cells: tuple[Cell, ...]
    every: int | None = None
    search: MakesSchedule | None = None


Place = tuple[str, str]  # a row and a column


@dataclass(frozen=True)
class Contrast:
    """What a claim compares: the cells `better` with the cells `worse`, as the claim's `of` says."""

    name: str
    better: tuple[Place, ...]
    worse: tuple[Place, ...]


@dataclass(frozen=True)
class Claim:
    """An ordering or a trend that the paper states: all contrasts are above 0.

    `at` is the share of the training after which they are compared: 1 for the end, less for "converges faster".
    `of` is what is compared: the sums of the values (losses the other way); how little they waver, the standard
    deviation over the second half of the curve; or how little they spread, the largest less the smallest.
    """

    words: str
    place: str
    contrasts: tuple[Contrast, ...]
    at: float = 1.0
    of: Literal["values", "wavering", "spread"] = "values"


def beats(better: str | Sequence[str], worse: str | Sequence[str], rows: Iterable[str]) -> tuple[Contrast, ...]:
    """In each of the rows, one column is better than another; of several, each one than each other."""
    winners, losers = ([names] if isinstance(names, str) else names for names in (better, worse))
    several = len(winners) * len(losers) > 1
    return tuple(
        Contrast(f"{row}, {one} over {other}" if several else row, ((row, one),), ((row, other),))
        for row in rows
        for one in winners
        for other in losers
    )


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of a paper, as data."""

    name: str
    source: str  # paper, table or figure, section
    title: str
    length: str  # of a training, in words
    federations: Mapping[str, Callable[[], Federation]]
    trainings: tuple[PaperTraining, ...]
    num_seeds: int
    claims: tuple[Claim, ...]
    choices: tuple[str, ...]  # what the paper does not say, and what was chosen
    quick: bool = False
    timed: bool = False  # trainings one after another, so that their times can be compared

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells of all trainings."""
        return tuple(cell for training in self.trainings for cell in training.cells)
