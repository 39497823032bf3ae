"""What a reproduction found: the schema of its `results.json`."""

import math
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from personax.evaluation.scores import Interval, is_share
from personax.fast.precision import Precision
from personax.reproduce.experiment import Source, Verdict

_KNOWN = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True, config=_KNOWN)
class ReadingRecord:
    """A reading of the paper's setting, and where it comes from. With `excluded` it does not count in a verdict."""

    name: str
    words: str
    source: Source
    excluded: str


@dataclass(frozen=True, config=_KNOWN)
class ScoringRecord:
    """One way to score: values in the units of the paper, with a 95 % interval over seeds."""

    name: str
    words: str
    flag: str
    ours: Interval
    of_seeds: list[float]


@dataclass(frozen=True, config=_KNOWN)
class CurveRecord:
    """The first scoring along the training, [evaluations][seeds].

    `rounds` are the server's versions, `seconds` those of training, all seeds together, and `times` virtual ones: none
    where nothing was delayed.
    """

    rounds: list[int]
    seconds: list[float]
    times: list[float]
    of_seeds: list[list[float]]


@dataclass(frozen=True, config=_KNOWN)
class CellRecord:
    """One cell: the paper's value beside ours. The first scoring is the one that is compared."""

    row: str
    column: str
    reading: str  # the name of one of the record's readings
    metric: str
    paper: float | None
    paper_interval: float | None
    scorings: list[ScoringRecord]
    algorithm: dict[str, Any]
    chosen: str  # of several candidates
    seconds: float  # of its training, which may have filled other cells too
    is_baseline: bool = False  # nothing was trained for it: the untrained model, the most frequent class
    curve: CurveRecord | None = None


@dataclass(frozen=True, config=_KNOWN)
class TrainingRecord:
    """The cells of one training, and what makes another one differ from it."""

    fingerprint: str
    cells: list[CellRecord]


@dataclass(frozen=True, config=_KNOWN)
class ContrastRecord:
    """One contrast of a claim: the difference over seeds, paired, positive in the direction of the claim."""

    name: str
    metric: str
    difference: Interval
    verdict: Verdict
    reason: str  # why it is not testable, or not finite


@dataclass(frozen=True, config=_KNOWN)
class EffectRecord:
    """The size of a claim's difference: the mean over its contrasts of one metric, paired over seeds.

    Accuracies are in points. `least` and `most` are the contrasts' extremes.
    """

    metric: str
    difference: Interval
    num_contrasts: int
    least: float
    most: float


@dataclass(frozen=True, config=_KNOWN)
class JudgedRecord:
    """A claim in one reading and one way to score."""

    reading: str
    scoring: str
    verdict: Verdict
    reason: str
    effect: EffectRecord | None  # none where nothing can be compared
    contrasts: list[ContrastRecord]


@dataclass(frozen=True, config=_KNOWN)
class ClaimRecord:
    """A claim of the paper: judged in each reading, and over the readings that count, by their first scoring.

    `effect` is that of the first reading that counts and can be tested.
    """

    words: str
    place: str
    verdict: Verdict
    reason: str
    effect: EffectRecord | None
    judged: list[JudgedRecord]


@dataclass(frozen=True, config=_KNOWN)
class ReproductionRecord:
    """`results.json` of a reproduction. `precision` is that of matrix products."""

    schema_version: Literal[3]
    personax: str
    name: str
    source: str
    title: str
    quick: bool
    started: str
    command: str
    machine: dict[str, str]
    precision: Precision
    seconds: float
    length: str
    data: dict[str, str]  # the federations, by name: where they come from
    seeds: list[int]
    readings: list[ReadingRecord]
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
    return f"{number:{sign}{'.2f' if is_share(metric) or metric == 'active_share' else '.4f'}}"


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
