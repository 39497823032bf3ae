"""What an inspection found, as data: the schema of `inspection.json`."""

from dataclasses import field
from typing import Literal

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
    num_updates: int  # that the server receives in the whole run
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
    """What a theorem asks of a setting."""

    setting: str
    value: float
    rule: str
    source: str
    words: str


@dataclass(frozen=True, config=_KNOWN)
class Advice:
    """A recommendation: what, why, how sure, and a configuration that runs."""

    recipe: str
    why: list[str]
    sure: list[str]
    starter: str  # TOML


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
    warnings: list[str] = field(default_factory=list)  # about the data


INSPECTION = TypeAdapter(Inspection)
