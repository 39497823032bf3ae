"""The findings of an inspection: the schema of `inspection.json`."""

from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

_KNOWN = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True, config=_KNOWN)
class MeasuredConstant:
    """A constant of the papers' assumptions: the largest value found, and its error."""

    name: str
    symbol: str
    value: float
    error: float
    words: str


@dataclass(frozen=True, config=_KNOWN)
class Estimator:
    """The bias of the mean meta gradient for one treatment of the Hessian, relative to the gradient's norm."""

    name: str
    relative_bias: float


@dataclass(frozen=True, config=_KNOWN)
class ClientFinding:
    """One client that was measured."""

    id: int
    num_samples: int
    distance: float | None  # total variation between its labels and the average client's; None for real targets
    mix: float  # the best weight of its own model, on held-out data
    losses: dict[str, float]  # on held-out data: "shared", "adapted", "mixed" (with the best common weight), "alone"


@dataclass(frozen=True, config=_KNOWN)
class Measurements:
    """All measurements, and where they were made."""

    region: str
    num_clients: int  # in the federation
    num_samples: int  # per client, at most
    num_steps: int  # local steps per visit
    num_rounds: int  # in the whole run
    num_updates: int  # received by the server in the whole run
    standardized: bool  # True if features were standardized first
    path_lr: float  # step size of the short training along which constants were measured
    constants: list[MeasuredConstant]
    adapt_lr: float  # adaptation step size with which estimators were compared
    estimators: list[Estimator]
    mix: float  # the best common weight of all clients
    clients: list[ClientFinding]

    def of(self, name: str) -> float:
        """Return the value of a constant."""
        return next(one.value for one in self.constants if one.name == name)


@dataclass(frozen=True, config=_KNOWN)
class Limit:
    """The limit of a theorem on a setting; `problem` gives the reason if the limit is unusable."""

    setting: str
    value: float
    rule: str
    source: str
    words: str
    problem: str = ""


RunSource = Literal["advice", "your configuration", "your configuration, standardized"]


@dataclass(frozen=True, config=_KNOWN)
class ShortRun:
    """An algorithm that was trained for a short time and scored on validation data."""

    source: RunSource
    algorithm: str
    options: dict[str, Any]
    score: float | None  # mean over clients and seeds; None if it diverged
    error: float | None  # standard error over clients


@dataclass(frozen=True, config=_KNOWN)
class Validation:
    """Short runs on the same split, of the advice and of the inspected configuration's algorithms."""

    metric: str
    num_rounds: int
    num_seeds: int
    runs: list[ShortRun]
    verdict: str

    @property
    def title(self) -> str:
        """Describe the number of rounds and seeds."""
        return f"Short runs: {self.num_rounds} rounds, {self.num_seeds} seed{'' if self.num_seeds == 1 else 's'}"


@dataclass(frozen=True, config=_KNOWN)
class Advice:
    """A recommendation with its reasons, its certainty, and a configuration that runs it."""

    recipe: str
    algorithm: str  # its name in the starter configuration
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
    unusable: list[str] = field(default_factory=list)  # sentences about unusable limits
    warnings: list[str] = field(default_factory=list)  # about the data


INSPECTION = TypeAdapter(Inspection)
