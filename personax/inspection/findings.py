"""What an inspection found, as data: the schema of `inspection.json`."""

from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

_KNOWN = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True, config=_KNOWN)
class MeasuredConstant:
    """A constant of the papers' assumptions: the largest value found, and how far it may be off."""

    name: str
    symbol: str
    value: float
    error: float
    words: str


@dataclass(frozen=True, config=_KNOWN)
class Estimator:
    """How far a way to apply the Hessian moves the mean meta gradient, as a share of its norm."""

    name: str
    relative_bias: float


@dataclass(frozen=True, config=_KNOWN)
class ClientFinding:
    """One client that was measured."""

    id: int
    num_samples: int
    distance: float | None  # total variation between its labels and the average client's; none for real targets
    mix: float  # the weight of a model of its own that is best on data kept from it
    losses: dict[
        str, float
    ]  # on that data: "shared", "adapted", "mixed" (with the weight that is best for all), "alone"


@dataclass(frozen=True, config=_KNOWN)
class Measurements:
    """Everything that was measured, and where."""

    region: str
    num_clients: int  # of the federation
    num_samples: int  # of each client, at most
    num_steps: int  # local steps of a visit
    num_rounds: int  # of the whole run
    num_updates: int  # that the server receives in it
    standardized: bool  # whether features were standardized before
    path_lr: float  # of the short training that the constants were measured along
    constants: list[MeasuredConstant]
    adapt_lr: float  # at which the estimators were compared
    estimators: list[Estimator]
    mix: float  # the weight that is best for all clients together
    clients: list[ClientFinding]

    def of(self, name: str) -> float:
        """The value of a constant."""
        return next(one.value for one in self.constants if one.name == name)


@dataclass(frozen=True, config=_KNOWN)
class Limit:
    """The value that a theorem demands of a setting; `problem` states why it is of no use, if it is not."""

    setting: str
    value: float
    rule: str
    source: str
    words: str
    problem: str = ""


RunSource = Literal["advice", "your configuration", "your configuration, standardized"]


@dataclass(frozen=True, config=_KNOWN)
class ShortRun:
    """One algorithm that was trained for a short time and scored on validation data."""

    source: RunSource
    algorithm: str
    options: dict[str, Any]
    score: float | None  # the mean over clients and seeds; None if it diverged
    error: float | None  # its standard error over clients


@dataclass(frozen=True, config=_KNOWN)
class Validation:
    """Short runs on the same split: the advice beside the algorithms of the configuration that was inspected."""

    metric: str
    num_rounds: int
    num_seeds: int
    runs: list[ShortRun]
    verdict: str

    @property
    def title(self) -> str:
        """The number of rounds and seeds in words."""
        return f"Short runs: {self.num_rounds} rounds, {self.num_seeds} seed{'' if self.num_seeds == 1 else 's'}"


@dataclass(frozen=True, config=_KNOWN)
class Advice:
    """A recommendation: what, why, how sure, and a configuration that runs."""

    recipe: str
    algorithm: str  # its name in the starter
    summary: str
    why: list[str]
    sure: list[str]
    starter: str  # TOML
    validation: Validation | None = None


@dataclass(frozen=True, config=_KNOWN)
class Inspection:
    """`inspection.json`."""

    schema_version: Literal[1]
    personax: str
    name: str
    started: str
    seconds: float
    machine: dict[str, str]
    federation: str
    measured: Measurements
    limits: list[Limit]
    advice: Advice
    unusable: list[str] = field(default_factory=list)  # sentences about limits that are of no use
    warnings: list[str] = field(default_factory=list)  # about the data


INSPECTION = TypeAdapter(Inspection)
