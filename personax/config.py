"""A run as one value: TOML in, the same TOML out. What is wrong with a file is said before anything is computed."""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

_KNOWN = ConfigDict(extra="forbid")  # an unknown key is an error
Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Share = Annotated[float, Field(gt=0, lt=1, strict=True)]
PartOrAll = Annotated[float, Field(gt=0, le=1, strict=True)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
AtLeastTwo = Annotated[int, Field(ge=2, lt=2**31, strict=True)]
Natural = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=80)]
HowMany = Annotated[int, Field(ge=1, le=1000, strict=True)]


class ConfigError(ValueError):
    """A configuration that cannot be run: what is wrong, what was given, what to do."""


@dataclass(frozen=True, config=_KNOWN)
class Pooled:
    """`[data]` that a partition divides: `digits` (embedded), `mnist` or `cifar10`."""

    kind: Literal["digits", "mnist", "cifar10"] = "digits"


@dataclass(frozen=True, config=_KNOWN)
class Synthetic:
    """`[data] kind = "synthetic"`: APFL's synthetic(model_spread, input_spread)."""

    kind: Literal["synthetic"]
    model_spread: Amount = 0.5
    input_spread: Amount = 0.5
    num_clients: Count = 100
    num_features: Count = 60
    num_classes: AtLeastTwo = 10
    num_samples: AtLeastTwo | None = None


@dataclass(frozen=True, config=_KNOWN)
class Leaf:
    """`[data] kind = "leaf"` or `"femnist"`: a folder in LEAF's format."""

    kind: Literal["leaf", "femnist"]
    path: str
    digits_only: Flag = False


@dataclass(frozen=True, config=_KNOWN)
class File:
    """`[data] kind = "file"`: your own npz, CSV or Parquet file with a client column."""

    kind: Literal["file"]
    path: str
    client: str = "client"
    label: str = "label"
    split: str | None = None
    shape: list[Count] | None = None


@dataclass(frozen=True, config=_KNOWN)
class Saved:
    """`[data] kind = "folder"`: what `Federation.save` wrote, tests and newcomers included; read as it is needed."""

    kind: Literal["folder"]
    path: str


@dataclass(frozen=True, config=_KNOWN)
class Iid:
    """`[partition] kind = "iid"`."""

    kind: Literal["iid"]
    num_clients: Count
    num_per_client: Count | None = None


@dataclass(frozen=True, config=_KNOWN)
class Shards:
    """`[partition] kind = "shards"`: McMahan's."""

    kind: Literal["shards"]
    num_clients: Count
    num_shards_each: Count = 2


@dataclass(frozen=True, config=_KNOWN)
class ClassesPerClient:
    """`[partition] kind = "classes_per_client"`: exactly so many classes for each client."""

    kind: Literal["classes_per_client"] = "classes_per_client"
    num_clients: Count = 66
    num_classes_each: Count = 4
    num_per_client: Count | None = None


@dataclass(frozen=True, config=_KNOWN)
class Dirichlet:
    """`[partition] kind = "dirichlet"`: a class distribution for each client (Hsu, gMeta)."""

    kind: Literal["dirichlet"]
    num_clients: Count
    concentration: Positive
    num_per_client: Count


@dataclass(frozen=True, config=_KNOWN)
class DirichletByClass:
    """`[partition] kind = "dirichlet_by_class"`: each class of the pool divided (Yurochkin)."""

    kind: Literal["dirichlet_by_class"]
    num_clients: Count
    concentration: Positive
    least: Count = 2


@dataclass(frozen=True, config=_KNOWN)
class FallahHalves:
    """`[partition] kind = "fallah_halves"`: the test clients are cut from the published test set with `test_each`."""

    kind: Literal["fallah_halves"]
    num_clients: Count
    num_each: Count
    test_each: Count | None = None
    without_first: Flag = False


@dataclass(frozen=True, config=_KNOWN)
class Split:
    """`[split]`: the test share of clients without tests of their own, newcomers, and the split's own seed."""

    test_share: Share = 0.2
    num_held_out: Natural = 0
    seed: Natural = 0


@dataclass(frozen=True, config=_KNOWN)
class Mlp:
    """`[model] kind = "mlp"`: fully connected."""

    kind: Literal["mlp"] = "mlp"
    widths: list[Count] = dataclasses.field(default_factory=lambda: [32])
    activation: Literal["elu", "relu", "tanh"] = "elu"
    init: Literal["glorot", "fan_in"] = "glorot"


@dataclass(frozen=True, config=_KNOWN)
class Named:
    """`[model]` without sizes of its own: `logistic_regression`, or the papers' networks `cnn2` and `cnn3`."""

    kind: Literal["logistic_regression", "cnn2", "cnn3"]
    init: Literal["glorot", "fan_in"] = "glorot"


@dataclass(frozen=True, config=_KNOWN)
class Imported:
    """`[model] kind = "import"`: `path = "package.module:function"`, called with `num_outputs` and `options`."""

    kind: Literal["import"]
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=_KNOWN)
class TaskSection:
    """`[task]`: classification or regression (by default what the labels suggest), and an l2 penalty."""

    kind: Literal["auto", "classification", "regression"] = "auto"
    l2: Amount = 0.0


@dataclass(frozen=True, config=_KNOWN)
class ScheduleSection:
    """`[schedule]`: rounds of a cohort, or "all"; asynchronous algorithms get as many updates, one by one.

    At most `cohort_chunk` clients train at once, where a whole cohort does not fit into the device's memory.
    """

    num_rounds: Count = 60
    cohort_size: Count | Literal["all"] = 10
    delays: Literal["none", "persafl"] = "none"
    cohort_chunk: Count | None = None


@dataclass(frozen=True, config=_KNOWN)
class EvaluationSection:
    """`[evaluation]`: how often, in rounds; how far newcomers adapt; whether gradient norms are measured, too."""

    every: Count = 10
    stationarity: bool = False
    adaptation_steps: list[Natural] = dataclasses.field(default_factory=lambda: [0, 1, 2, 5, 10])


@dataclass(frozen=True, config=_KNOWN)
class Sample:
    """`[live.sample]`: what a sample of the clients looks like, where the server has no data to see it in."""

    shape: list[Count]
    type: Literal["float32", "float64", "uint8", "int32"] = "float32"
    num_outputs: Count = 10


@dataclass(frozen=True, config=_KNOWN)
class Terms:
    """`[live]`: what the operator of `personax serve` decides; a simulation ignores it. Times are in seconds.

    A synchronous round ends when its cohort has reported, or at its `deadline` if `least_share` of the cohort has; else
    those who are away are replaced and it waits once more. `num_clients` is how many there are (SCAFFOLD's N): a
    synchronous run begins when so many are there.
    An upload whose norm is more than `outlier_factor` times the median of the other clients' last is refused, or
    clipped to that; with a factor of 0 any norm will do.
    """

    num_clients: Count | None = None
    deadline: Positive = 600.0
    least_share: PartOrAll = 0.5
    outliers: Literal["refuse", "clip"] = "refuse"
    outlier_factor: Amount = 20.0
    least_peers: Count = 2  # who must have reported before norms are compared
    rate: Positive = 100.0  # requests of one client in a second
    max_streams: Annotated[Count, Field(ge=2)] = 4  # of one client at the same time; its uploads keep one open
    max_transfers: Count = 64  # models on their way at the same time
    max_connections: Count = 4096  # of all peers together
    stall: Positive = 30.0  # without a piece of an upload
    presence: Positive = 60.0  # since a client was last heard of
    checkpoint: Positive = 10.0  # between checkpoints
    linger: Amount = 60.0  # after the end, for the clients' last numbers
    sync: Flag = False  # wait for the disk before answering: survives power cuts, too
    sample: Sample | None = None


@dataclass(frozen=True, config=_KNOWN)
class Entry:
    """`[algorithms.NAME]`: a recipe, its options, and the protocols that score it (by name; by default one)."""

    recipe: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    scores: dict[Name, dict[str, Any]] = dataclasses.field(default_factory=dict)


Data = Annotated[Pooled | Synthetic | Leaf | File | Saved, Field(discriminator="kind")]
PartitionSection = Annotated[
    Iid | Shards | ClassesPerClient | Dirichlet | DirichletByClass | FallahHalves, Field(discriminator="kind")
]
ModelSection = Annotated[Mlp | Named | Imported, Field(discriminator="kind")]


@dataclass(frozen=True, config=_KNOWN)
class Config:
    """A whole run. `seeds` is how many, or which; `[local]` holds options that all recipes share.

    `precision` is that of the clients' matrix products, see `simulate`.
    """

    name: Name = "run"
    seeds: HowMany | Annotated[list[Natural], Field(min_length=1, max_length=1000)] = 3
    precision: Literal["default", "float32", "tf32", "bf16"] = "default"
    data: Data = Pooled()
    partition: PartitionSection | None = None
    split: Split = Split()
    model: ModelSection = Mlp()
    task: TaskSection = TaskSection()
    schedule: ScheduleSection = ScheduleSection()
    evaluation: EvaluationSection = EvaluationSection()
    live: Terms | None = None
    local: dict[str, Any] = dataclasses.field(default_factory=dict)
    tune: dict[str, Annotated[list[Any], Field(min_length=1)]] = dataclasses.field(default_factory=dict)
    algorithms: Annotated[dict[Name, Entry], Field(min_length=1)] = dataclasses.field(default_factory=dict)

    @property
    def seed_list(self) -> list[int]:
        """The seeds themselves."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds


_CONFIG = TypeAdapter(Config)
_OF_ENTRY = ("recipe", "scores")
_ALTERNATIVE = re.compile(r"constrained-int|(list|literal)\[.*\]")  # what pydantic adds to places
_ASSIGNMENT = re.compile(r"""((?:"[^"]*"|'[^']*'|[^"'=])*)=(.*)""", re.DOTALL)


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a file (without one: the embedded default), with `key=value` overrides."""
    source = Path(__file__).with_name("default.toml") if path is None else path
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no file {source}. Write a starter with `personax init {source}`.") from None
    except (ValueError, RecursionError) as error:  # also of letters, numbers and nesting that cannot be read
        raise ConfigError(f"{source} is not TOML: {error}. Repair that place.") from None
    for override in overrides:
        _override(table, override)
    return parse(table)


def parse(table: dict[str, Any]) -> Config:
    """The configuration of plain tables."""
    try:
        return _CONFIG.validate_python({**table, "algorithms": _with_options(table.get("algorithms", {}))})
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_explain(one) for one in error.errors()))) from None


def dump(config: Config) -> str:
    """The configuration as TOML, with every default written out."""
    table = _without_none(dataclasses.asdict(config))
    flat = {
        name: {"recipe": entry["recipe"], **entry["options"], "scores": entry["scores"]}
        for name, entry in table["algorithms"].items()
    }
    return tomli_w.dumps({**table, "algorithms": flat})


def check_names(where: str, given: Iterable[str], known: Iterable[str], what: str = "setting") -> None:
    """Refuse names that are not known, with the nearest that is."""
    known = set(known)
    for name in given:
        if name not in known:
            raise ConfigError(_no_such(where, name, known, what))


def _with_options(algorithms: Any) -> Any:
    """The keys of a recipe, which stand beside `recipe` and `scores` in TOML, in a table of their own."""
    if not isinstance(algorithms, dict):
        return algorithms
    options = lambda entry: {key: item for key, item in entry.items() if key not in _OF_ENTRY}
    apart = lambda entry: {**{k: entry[k] for k in _OF_ENTRY if k in entry}, "options": options(entry)}
    return {name: apart(entry) if isinstance(entry, dict) else entry for name, entry in algorithms.items()}


def _without_none(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _without_none(entry) for key, entry in item.items() if entry is not None}
    return [_without_none(entry) for entry in item] if isinstance(item, list | tuple) else item


def _override(table: dict[str, Any], override: str) -> None:
    """Put `a.b.c=value` into nested tables; the value is TOML, or else a string."""
    parts = _ASSIGNMENT.fullmatch(override)
    keys = _keys(parts[1]) if parts else []
    if parts is None or not all(keys):
        raise ConfigError(f"An override must look like `schedule.num_rounds=100`, got {override!r}.")
    try:
        value = tomllib.loads(f"value = {parts[2]}")["value"]
    except (ValueError, RecursionError):
        value = parts[2]
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"`{key}` in the override {override!r} is not a table. Name the setting itself.")
    table[keys[-1]] = value


def _keys(path: str) -> list[str]:
    """The parts of a dotted TOML key; names with dots or spaces stand in quotes."""
    try:
        table: Any = tomllib.loads(f"{path.strip()} = 0")
    except tomllib.TOMLDecodeError:
        return path.strip().split(".")
    keys = []
    while isinstance(table, dict):
        key, table = next(iter(table.items()))
        keys.append(key)
    return keys


def _explain(error: Any) -> str:
    """One sentence for one error: what, got, do."""
    place = _in_toml(error["loc"])
    where, name = ".".join(place[:-1]) or "the file", place[-1]
    path = ".".join(place)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return _no_such(where, name, _settings_at(error["loc"][:-1]))
    if error["type"] == "union_tag_invalid":
        kinds = error["ctx"]["expected_tags"]
        return f"`{path}.kind` must be one of {kinds}, got {error['ctx']['tag']!r}."
    if error["type"] == "union_tag_not_found":
        return f"`{path}` needs a `kind`. Add it; `personax init` writes an example."
    if error["type"] in ("missing", "missing_argument"):
        return f"`{where}` needs `{name}`. Add it; `personax init` writes an example."
    must = error["msg"][0].lower() + error["msg"][1:]
    return f"`{path}`: {must}, got {error['input']!r:.80}. Change it; `personax init` writes an example."


def _in_toml(loc: Sequence[Any]) -> list[str]:
    """A place as it is written in TOML: without the kinds of sections and the alternatives, which pydantic adds."""
    first, *rest = map(str, loc)
    if first in ("data", "partition", "model") and len(rest) > 1:
        rest = rest[1:]
    if first in ("seeds", "schedule"):
        rest = [part for part in rest if not _ALTERNATIVE.fullmatch(part)]
    return [first, *rest]


def _no_such(where: str, name: str, known: Iterable[str], what: str = "setting") -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    return f"`{where}` has no {what} `{name}`.{hint} There are: {', '.join(known)}."


def _settings_at(place: Sequence[Any]) -> list[str]:
    """The names of the settings of the section at this place, whose path has the kinds of sections in it."""
    sections: list[Any] = [Config]
    for part in place:
        annotations = {name: kind for section in sections for name, kind in _types(section).items()}
        if part in annotations:
            sections = _classes(annotations[part])
        else:  # a kind, or the name of an algorithm
            sections = [one for one in sections if part in get_args(_types(one).get("kind"))] or sections
    return [name for section in sections for name in _types(section)]


def _types(section: Any) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(section)}


def _classes(annotation: Any) -> list[Any]:
    """The sections in an annotation."""
    if dataclasses.is_dataclass(annotation):
        return [annotation]
    return [found for part in get_args(annotation) for found in _classes(part)]
