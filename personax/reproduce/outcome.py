"""What a reproduction found: the schema of its `results.json`."""

from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from personax.reproduce.experiment import Verdict

_KNOWN = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_KNOWN)
class ReadingRecord:
    """One reading of the paper's evaluation: values in the units of the paper, with a 95 % interval over seeds."""

    reading: str
    words: str
    flag: str
    ours: float
    low: float | None
    high: float | None
    of_seeds: list[float]


@dataclass(frozen=True, config=_KNOWN)
class CurveRecord:
    """The first reading over the rounds, [evaluations][seeds], and the seconds of training, all seeds together."""

    rounds: list[int]
    seconds: list[float]
    of_seeds: list[list[float]]


@dataclass(frozen=True, config=_KNOWN)
class CellRecord:
    """One cell: the paper's value beside ours. The first reading is the one that is compared."""

    row: str
    column: str
    paper: float | None
    paper_interval: float | None
    readings: list[ReadingRecord]
    algorithm: dict[str, Any]
    chosen: str  # of several candidates
    seconds: float
    curve: CurveRecord | None = None


@dataclass(frozen=True, config=_KNOWN)
class RowVerdict:
    """A claim in one row: the paired difference of the two columns over seeds."""

    row: str
    difference: float
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, config=_KNOWN)
class ClaimRecord:
    """A claim of the paper, judged."""

    words: str
    place: str
    verdict: Verdict
    rows: list[RowVerdict]


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
    num_rounds: int
    seeds: list[int]
    cells: list[CellRecord]
    claims: list[ClaimRecord]
    choices: list[str]


REPRODUCTION = TypeAdapter(ReproductionRecord)
CELL = TypeAdapter(CellRecord)
