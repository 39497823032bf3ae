"""The parts of a reproduction: cells with the paper's numbers, our choices where it is silent, and its claims."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from typing import Protocol as Interface

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.evaluation.scoring import Scoring
from personax.reproduce.measures import MostFrequentClass, RunMeasure
from personax.schedules import Schedule
from personax.typing import Array, Task

OF_CIFAR = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # mean and deviation of each color, training images
OF_MNIST = 0.1307, 0.3081  # mean and deviation of all pixels, training images
Verdict = Literal["holds", "holds in part", "does not hold", "undecided", "not testable", "not finite"]
Source = Literal["the text", "the authors' code", "the cited code", "our choice"]


@dataclass(frozen=True)
class Reading:
    """One interpretation of a detail that a paper leaves open, such as a decay or a network, with its source.

    Claims are judged in each reading separately. With `excluded`, which states the reason, a reading is shown but does
    not count in the overall verdict: its numbers are far from the paper's, or it only investigates a cause.
    """

    name: str
    words: str
    source: Source
    excluded: str = ""


MAIN = Reading("main", "The paper's text, and the choices listed here where it is silent.", "the text")


class MakesSchedule(Interface):
    """A function that makes the schedule of one seed."""

    def __call__(self, *, key: Array) -> Schedule: ...


Measure = Scoring | RunMeasure
UNTRAINED, MOST_FREQUENT = "untrained", "most frequent class"  # the columns of the baselines


@dataclass(frozen=True)
class Cell:
    """One number of a table or one curve of a figure, with the paper's value.

    `scorings` maps names to the scorings that the paper's text allows; the first is compared with the paper's number.
    `reading` names a reading of the experiment. With `at="start"`, the cell scores the model before training.
    """

    row: str
    column: str
    scorings: Mapping[str, Measure]
    paper: tuple[float, float] | None = None  # the value and half its interval, as printed (accuracies in %)
    metric: str = "accuracy"
    reading: str = MAIN.name
    at: Literal["start", "end"] = "end"

    @property
    def is_baseline(self) -> bool:
        """Return True if this number needs no training."""
        return self.column in (UNTRAINED, MOST_FREQUENT)


def baselines(
    row: str, scorings: Mapping[str, Measure], reading: str = MAIN.name, held_out: bool = False
) -> tuple[Cell, Cell]:
    """Return the baselines without training: the initial model, and the most frequent class.

    A claim about accuracies is not testable in a row where no method beats both (see `judging.judge`). Any training
    with the row's federation and network can fill these cells.
    """
    return (
        Cell(row, UNTRAINED, scorings, reading=reading, at="start"),
        Cell(row, MOST_FREQUENT, {MOST_FREQUENT: MostFrequentClass(held_out)}, reading=reading),
    )


@dataclass(frozen=True)
class PaperTraining:
    """One training and the cells that it fills. With `every`, the first scoring is recorded during training.

    Given several algorithms, the one with the best validation score runs. Validation data is split off the clients'
    training data, and the score is the first cell's first scoring that does not adapt on the data it scores. The
    candidates are compared on the full schedule with all seeds or, if that takes too long, on `search` with one seed.
    """

    data: str  # the name of the federation
    task: Task
    algorithm: Algorithm | Mapping[str, Algorithm]  # one, or named candidates
    schedule: MakesSchedule
    cells: tuple[Cell, ...]
    every: int | None = None
    search: MakesSchedule | None = None


Place = tuple[str, str]  # a row and a column


@dataclass(frozen=True)
class Contrast:
    """A comparison of the cells `better` with the cells `worse`, by the quantity that the claim's `of` names.

    `scale` multiplies the difference, so that it can be one of means.
    """

    name: str
    better: tuple[Place, ...]
    worse: tuple[Place, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Claim:
    """An ordering or trend that the paper states; it holds if all contrasts are above 0.

    `at` is the share of the training after which cells are compared: 1 for the end, less for "converges faster".
    With `along="seconds"` they are compared after equal computing time: that of the shortest training, times `at`.
    `of` is the compared quantity: the sum of the values (negated for losses); the stability, from the standard
    deviation over the second half of the curve; the spread, the largest value minus the smallest; or the turn
    of the values `better` in their order, which is above 0 if they both rise and fall: the smaller of the largest rise
    and the largest fall between neighbors, taken at the same neighbors for all seeds.
    With `within`, the claim is that two values are nearly equal: it holds if the interval of their difference lies
    within this distance of 0.
    `untestable` gives the reason if the claim cannot be tested at all; it may then have no contrasts.
    """

    words: str
    place: str
    contrasts: tuple[Contrast, ...]
    at: float = 1.0
    of: Literal["values", "wavering", "spread", "turn"] = "values"
    along: Literal["progress", "seconds"] = "progress"
    within: float | None = None
    untestable: str = ""

    @property
    def is_along_curves(self) -> bool:
        """Return True if curves are compared, which have the first scoring alone."""
        return self.of == "wavering" or self.at != 1.0 or self.along != "progress"


def beats(better: str | Sequence[str], worse: str | Sequence[str], rows: Iterable[str]) -> tuple[Contrast, ...]:
    """Return contrasts that put every `better` column above every `worse` column in each row."""
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
    """A table or figure of a paper, as data."""

    name: str
    source: str  # paper, table or figure, section
    title: str
    length: str  # a description of the length of a training
    federations: Mapping[str, Callable[[], Federation]]
    trainings: tuple[PaperTraining, ...]
    num_seeds: int
    claims: tuple[Claim, ...]
    choices: tuple[str, ...]  # details that the paper leaves open, and our choices
    readings: tuple[Reading, ...] = (MAIN,)
    needs: tuple[str, ...] = ()  # the datasets to fetch first
    causes_of: str = ""  # the experiment whose numbers this one explains
    unavailable: str = ""  # the reason why there is no record, such as unavailable data
    quick: bool = False
    timed: bool = False  # train sequentially, so that times are comparable

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Return the cells of all trainings."""
        return tuple(cell for training in self.trainings for cell in training.cells)
