"""The schema of a reproduction's `results.json`."""

import math
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from personax.evaluation.scores import Interval, is_share
from personax.fast.precision import Precision
from personax.reproduce.experiment import Source, Verdict

_KNOWN = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
MOST_LEFT_OUT = 0.01  # the share of nonfinite updates above which a training counts as diverged
LARGEST_LOSS = 1e4  # larger losses count as not finite


@dataclass(frozen=True, config=_KNOWN)
class ReadingRecord:
    """A reading of the paper's setting, with its source. With `excluded`, it does not count in verdicts."""

    name: str
    words: str
    source: Source
    excluded: str


@dataclass(frozen=True, config=_KNOWN)
class ScoringRecord:
    """The values of one scoring in the paper's units, with a 95 % interval over seeds."""

    name: str
    words: str
    flag: str
    ours: Interval
    of_seeds: list[float]


@dataclass(frozen=True, config=_KNOWN)
class CurveRecord:
    """The first scoring during training, [evaluations][seeds].

    `rounds` are server versions, `seconds` the training time of all seeds together, and `times` virtual times, which
    are empty if nothing was delayed.
    """

    rounds: list[int]
    seconds: list[float]
    times: list[float]
    of_seeds: list[list[float]]


@dataclass(frozen=True, config=_KNOWN)
class CellRecord:
    """A cell: the paper's value beside ours. The first scoring is compared with the paper."""

    row: str
    column: str
    reading: str  # the name of one of the record's readings
    metric: str
    paper: float | None
    paper_interval: float | None
    scorings: list[ScoringRecord]
    algorithm: dict[str, Any]
    chosen: str  # the chosen candidate
    seconds: float  # the duration of its training, which may have filled other cells too
    is_baseline: bool = False  # needs no training: the untrained model, the most frequent class
    curve: CurveRecord | None = None
    num_left_out: int = 0  # updates of all seeds that were not finite
    num_updates: int = 0  # updates of all seeds; 0 if none was left out

    @property
    def diverged(self) -> str:
        """Return why its training counts as diverged, or an empty text."""
        if self.num_left_out > MOST_LEFT_OUT * self.num_updates:
            return f"{self.num_left_out:,} of {self.num_updates:,} updates of {self.column} were not finite"
        return ""


@dataclass(frozen=True, config=_KNOWN)
class TrainingRecord:
    """The cells of one training, and its fingerprint."""

    fingerprint: str
    cells: list[CellRecord]


@dataclass(frozen=True, config=_KNOWN)
class ContrastRecord:
    """One contrast of a claim: the difference paired by seed, positive in the direction of the claim."""

    name: str
    metric: str
    difference: Interval
    verdict: Verdict
    reason: str  # why it is not testable or not finite


@dataclass(frozen=True, config=_KNOWN)
class EffectRecord:
    """The size of a claim's difference: the mean over its contrasts of one metric, paired by seed.

    Accuracies are in points. `least` and `most` are the extremes over contrasts.
    """

    metric: str
    difference: Interval
    num_contrasts: int
    least: float
    most: float


@dataclass(frozen=True, config=_KNOWN)
class JudgedRecord:
    """A claim in one reading with one scoring."""

    reading: str
    scoring: str
    verdict: Verdict
    reason: str
    effect: EffectRecord | None  # None if nothing can be compared
    contrasts: list[ContrastRecord]


@dataclass(frozen=True, config=_KNOWN)
class ClaimRecord:
    """A claim of the paper, judged in each reading and over all readings that count, with their first scoring.

    `effect` is that of the first reading that counts and is testable.
    """

    words: str
    place: str
    verdict: Verdict
    reason: str
    effect: EffectRecord | None
    judged: list[JudgedRecord]


@dataclass(frozen=True, config=_KNOWN)
class ReproductionRecord:
    """The `results.json` of a reproduction. `precision` is that of matrix products."""

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
    data: dict[str, str]  # the origin of each federation by name
    seeds: list[int]
    readings: list[ReadingRecord]
    cells: list[CellRecord]
    claims: list[ClaimRecord]
    choices: list[str]


def left_out_words(num: int, total: int) -> str:
    """Describe updates that were not finite, as the flag of a scoring."""
    return f"{num:,} of {total:,} updates were not finite and were left out"


REPRODUCTION = TypeAdapter(ReproductionRecord)
TRAINING = TypeAdapter(TrainingRecord)


def shown(number: float, metric: str, sign: str = "") -> str:
    """Format a number as the papers do: accuracies in % with two digits, losses with four."""
    if not math.isfinite(number):
        return "not finite"
    if abs(number) >= 1e5:
        return f"{number:{sign}.1e}"
    return f"{number:{sign}{'.2f' if is_share(metric) or metric == 'active_share' else '.4f'}}"


def difference_shown(contrast: ContrastRecord) -> str:
    """Format a contrast's difference and interval."""
    found = contrast.difference
    if not math.isfinite(found.mean):
        return "not finite"
    digits = 2 if abs(found.mean) >= 0.1 else 4
    ends = "" if found.low is None else f" ({found.low:+.{digits}f} to {found.high:+.{digits}f})"
    return f"{found.mean:+.{digits}f}{ends}"


def interval_shown(found: Interval, metric: str, plus_minus: str = " ± ") -> str:
    """Format a mean and half of its interval, as the papers do."""
    half = "" if found.half is None else f"{plus_minus}{shown(found.half, metric)}"
    return f"{shown(found.mean, metric)}{half}"
