"""What a reproduction is: cells with the paper's numbers, what the paper does not say, and the claims to judge."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from personax.algorithms import Algorithm
from personax.federation import Federation
from personax.protocol import Protocol
from personax.typing import Task

Verdict = Literal["holds", "holds in part", "does not hold", "undecided"]


@dataclass(frozen=True)
class Cell:
    """One number of a table, or one curve of a figure: who was trained on what, and what the paper says of it.

    `protocols` are the readings of the paper's evaluation, by name; the first is set beside the paper's number. With
    `every`, the scores are followed over the rounds. Of several algorithms the best on validation data, cut from the
    clients' training data, is run.
    """

    row: str
    column: str
    data: str  # the name of the federation
    algorithm: Algorithm | Mapping[str, Algorithm]  # one, or by name those to choose from
    protocols: Mapping[str, Protocol]
    paper: tuple[float, float] | None = None  # the value and half its interval, as printed (in %)
    every: int | None = None


@dataclass(frozen=True)
class Claim:
    """An ordering that the paper states: in each of the rows, `better` is above `worse`.

    `at` is the share of the rounds after which they are compared: 1 for the end, less for "converges faster".
    """

    words: str
    place: str
    better: str
    worse: str
    rows: tuple[str, ...]
    at: float = 1.0


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of a paper, as data."""

    name: str
    source: str  # paper, table or figure, section
    title: str
    federations: Mapping[str, Callable[[], Federation]]
    task: Task
    num_rounds: int
    cohort_size: int
    num_seeds: int
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...]
    choices: tuple[str, ...]  # what the paper does not say, and what was chosen
    quick: bool = False
    timed: bool = False  # cells one after another, so that their times can be compared
    metric: str = "accuracy"
