"""What a reproduction found: the schema of its `results.json`."""

import math
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from personax.evaluation.scores import Interval, is_share
from personax.reproduce.experiment import Verdict

_KNOWN = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True, config=_KNOWN)
class ReadingRecord:
    """One reading of the paper's evaluation: values in the units of the paper, with a 95 % interval over seeds."""

    reading: str
    words: str
    flag: str
    ours: Interval
    of_seeds: list[float]


@dataclass(frozen=True, config=_KNOWN)
class CurveRecord:
    """The first reading along the training, [evaluations][seeds].

    `rounds` are the server's versions, `seconds` those of training, all seeds together, and `times` virtual ones: none
    where nothing was delayed.
    """

    rounds: list[int]
    seconds: list[float]
    times: list[float]
    of_seeds: list[list[float]]


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
    difference: Interval
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

    schema_version: Literal[2]
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
    found = contrast.difference
    if not math.isfinite(found.mean):
        return "not finite"
    digits = 2 if abs(found.mean) >= 0.1 else 4
    ends = "" if found.low is None else f" ({found.low:+.{digits}f} to {found.high:+.{digits}f})"
    return f"{found.mean:+.{digits}f}{ends}"


def interval_shown(found: Interval, metric: str, plus_minus: str = " ± ") -> str:
    """A mean and half of its interval, as the papers print it."""
    half = "" if found.half is None else f"{plus_minus}{shown(found.half, metric)}"
    return f"{shown(found.mean, metric)}{half}"
