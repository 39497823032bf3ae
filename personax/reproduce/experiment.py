"""What a reproduction is: cells with the paper's numbers, what the paper does not say, and the claims to judge."""

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
    """A way to fill in what a paper leaves open, such as a decay or a network, and where it comes from.

    Claims are judged in each reading separately. With `excluded`, which states the reason, a reading is shown but does
    not count in the overall verdict: because it comes nowhere near the paper, or because it only looks for a cause.
    """

    name: str
    words: str
    source: Source
    excluded: str = ""


MAIN = Reading("main", "The text where it speaks, the choices listed here where it is silent.", "the text")


class MakesSchedule(Interface):
    """The schedule of one seed."""

    def __call__(self, *, key: Array) -> Schedule: ...


Measure = Scoring | RunMeasure
UNTRAINED, MOST_FREQUENT = "untrained", "most frequent class"  # the columns of the baselines


@dataclass(frozen=True)
class Cell:
    """One number of a table, or one curve of a figure, and what the paper says of it.

    `scorings` are the ways to score that the paper allows, by name; the first is set beside the paper's number.
    `reading` names a reading of the experiment. A cell `at` the start scores the model before training.
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
        """True if nothing was trained for this number."""
        return self.column in (UNTRAINED, MOST_FREQUENT)


def baselines(
    row: str, scorings: Mapping[str, Measure], reading: str = MAIN.name, held_out: bool = False
) -> tuple[Cell, Cell]:
    """The rows without training: the initial model, scored as the others are, and the most frequent class.

    A claim about accuracies is not testable in a row where no method is above both (see `judging.judge`). Any
    training of the row's federation and network can fill these cells.
    """
    return (
        Cell(row, UNTRAINED, scorings, reading=reading, at="start"),
        Cell(row, MOST_FREQUENT, {MOST_FREQUENT: MostFrequentClass(held_out)}, reading=reading),
    )


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
    `along="seconds"` compares after the same time of computation: that of the shortest training, times `at`.
    `of` is what is compared: the sums of the values (losses the other way); how little they waver, the standard
    deviation over the second half of the curve; or how little they spread, the largest less the smallest.
    `untestable` is the reason why a claim cannot be tested whatever the numbers are; it may have no contrasts then.
    """

    words: str
    place: str
    contrasts: tuple[Contrast, ...]
    at: float = 1.0
    of: Literal["values", "wavering", "spread"] = "values"
    along: Literal["progress", "seconds"] = "progress"
    untestable: str = ""


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
    readings: tuple[Reading, ...] = (MAIN,)
    needs: tuple[str, ...] = ()  # the datasets to fetch first
    causes_of: str = ""  # the experiment whose numbers it explains
    unavailable: str = ""  # why no record is kept, where the data cannot be obtained
    quick: bool = False
    timed: bool = False  # trainings one after another, so that their times can be compared

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells of all trainings."""
        return tuple(cell for training in self.trainings for cell in training.cells)
