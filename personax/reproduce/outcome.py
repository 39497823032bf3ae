"""What a reproduction found: the schema of its `results.json`."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from personax.evaluation.scores import is_share
from personax.reproduce.experiment import Verdict

_KNOWN = ConfigDict(extra="forbid")

Number = Annotated[float, BeforeValidator(lambda given: math.nan if given is None else given)]  # JSON's null is not one


@dataclass(frozen=True, config=_KNOWN)
class ReadingRecord:
    """One reading of the paper's evaluation: values in the units of the paper, with a 95 % interval over seeds."""

    reading: str
    words: str
    flag: str
    ours: Number
    low: float | None
    high: float | None
    of_seeds: list[Number]


@dataclass(frozen=True, config=_KNOWN)
class CurveRecord:
    """The first reading along the training, [evaluations][seeds].

    `rounds` are the server's versions, `seconds` those of training, all seeds together, and `times` virtual ones: none
    where nothing was delayed.
    """

    rounds: list[int]
    seconds: list[float]
    times: list[float]
    of_seeds: list[list[Number]]


@dataclass(frozen=True, config=_KNOWN)
class CellRecord:
    """One cell: the paper's value beside ours. The first reading is the one that is compared."""

    row: str
    column: str
    metric: str
    paper: float | None
    paper_interval: float | None
    readings: list[ReadingRecord]
    algorithm: dict[str, Any]
    chosen: str  # of several candidates
    seconds: float  # of its training, which may have filled other cells too
    curve: CurveRecord | None = None


@dataclass(frozen=True, config=_KNOWN)
class TrainingRecord:
    """The cells of one training, and what makes another one differ from it."""

    fingerprint: str
    cells: list[CellRecord]


@dataclass(frozen=True, config=_KNOWN)
class ContrastRecord:
    """One contrast of a claim: the difference over seeds, paired."""

    name: str
    difference: Number
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, config=_KNOWN)
class ClaimRecord:
    """A claim of the paper, judged."""

    words: str
    place: str
    verdict: Verdict
    contrasts: list[ContrastRecord]


@dataclass(frozen=True, config=_KNOWN)
class ReproductionRecord:
    """`results.json` of a reproduction."""

    schema_version: Literal[1]
    personax: str
    name: str
    source: str
    title: str
    quick: bool
    started: str
    command: str
    machine: dict[str, str]
    seconds: float
    length: str
    data: dict[str, str]  # the federations, by name: where they come from
    seeds: list[int]
    cells: list[CellRecord]
    claims: list[ClaimRecord]
    choices: list[str]


REPRODUCTION = TypeAdapter(ReproductionRecord)
TRAINING = TypeAdapter(TrainingRecord)


def shown(number: float, metric: str, sign: str = "") -> str:
    """A number as the papers print it: accuracies in % with two digits, losses with four."""
    if not math.isfinite(number):
        return "not finite"
    if abs(number) >= 1e5:
        return f"{number:{sign}.1e}"
    return f"{number:{sign}{'.2f' if is_share(metric) else '.4f'}}"


def difference_shown(contrast: ContrastRecord) -> str:
    """A contrast's difference and its interval."""
    mean, low, high = contrast.difference, contrast.low, contrast.high
    if not math.isfinite(mean):
        return "not finite"
    digits = 2 if abs(mean) >= 0.1 else 4
    return f"{mean:+.{digits}f}" + ("" if low is None else f" ({low:+.{digits}f} to {high:+.{digits}f})")
