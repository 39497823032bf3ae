"""The configuration of a run as one value: TOML in, the same TOML out, checked before anything is computed."""

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from personax.data import datasets, partition  # noqa: F401  (registers their kinds)
from personax.experiment.names import require_title
from personax.models import networks  # noqa: F401
from personax.values import DATASETS, MODELS, PARTITIONS, ConfigError, check_names, construct, imports_in, unknown_name

_KNOWN = ConfigDict(extra="forbid")  # an unknown key is an error
Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Share = Annotated[float, Field(gt=0, lt=1, strict=True)]
PartOrAll = Annotated[float, Field(gt=0, le=1, strict=True)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Natural = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=80), AfterValidator(require_title)]
HowMany = Annotated[int, Field(ge=1, le=1000, strict=True)]


@dataclass(frozen=True, config=_KNOWN)
class Section:
    """`[partition]`: a kind, and the options that stand beside it in TOML."""

    kind: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        """The section as it is written in TOML."""
        return {"kind": self.kind, **self.options}


@dataclass(frozen=True, config=_KNOWN)
class LoraSection:
    """`[model.lora]`: adapters on dense layers, see `px.lora`; with `mix` two of them, see `px.dual_lora`."""

    rank: Count
    on: str | list[str] = "*.kernel"
    scale: Positive = 1.0
    mix: Share | None = None


@dataclass(frozen=True, config=_KNOWN)
class ModelSection:
    """`[model]`: a kind with its options, a safetensors file with its first parameters, and adapters.

    `base_digest` is the SHA-256 of the file, which a run folder records.
    """

    kind: str
    base: str | None = None
    base_digest: str | None = None
    lora: LoraSection | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        """The table that makes the network: the section without its first parameters."""
        adapters = {} if self.lora is None else {"lora": _without_none(dataclasses.asdict(self.lora))}
        return {"kind": self.kind, **self.options, **adapters}


@dataclass(frozen=True, config=_KNOWN)
class DataSection:
    """`[data]`: a kind with its options, and whether features and the targets of a regression are standardized."""

    kind: str
    standardize: Flag = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        """The table that makes the data: the section without `standardize`."""
        return {"kind": self.kind, **self.options}


@dataclass(frozen=True, config=_KNOWN)
class Split:
    """`[split]`: the test share of clients without tests of their own, newcomers, and the split's own seed."""

    test_share: Share = 0.2
    num_held_out: Natural = 0
    seed: Natural = 0


@dataclass(frozen=True, config=_KNOWN)
class TaskSection:
    """`[task]`: classification or regression (by default what the labels suggest), and an l2 penalty."""

    kind: Literal["auto", "classification", "regression"] = "auto"
    l2: Amount = 0.0


@dataclass(frozen=True, config=_KNOWN)
class ScheduleSection:
    """`[schedule]`: rounds of a cohort, or "all"; asynchronous algorithms get as many updates as rounds aggregate.

    Of each cohort `num_aggregated` updates are aggregated, drawn at random or those that arrive first, and no later
    than the `deadline`. At most `concurrency` clients of an asynchronous server are at work at the same time. At most
    `cohort_chunk` clients train at once, where a whole cohort does not fit into the device's memory.
    """

    num_rounds: Count = 60
    cohort_size: Count | Literal["all"] = 10
    delays: str | dict[str, Any] = "none"
    num_aggregated: Count | None = None
    aggregate: Literal["random", "first"] = "random"
    deadline: Positive | None = None
    concurrency: Count | None = None
    cohort_chunk: Count | None = None


@dataclass(frozen=True, config=_KNOWN)
class EvaluationSection:
    """`[evaluation]`: how often, in rounds; how far newcomers adapt; whether gradient norms are measured, too."""

    every: Count = 10
    stationarity: bool = False
    adaptation_steps: list[Natural] = dataclasses.field(default_factory=lambda: [0, 1, 2, 5, 10])


@dataclass(frozen=True, config=_KNOWN)
class Sample:
    """`[live.sample]`: what a sample of the clients looks like, where the server has no data to see it in.

    Clients match columns and labels to `features` and `classes` by name. With `standardize` they send the moments of
    their columns first, from which the server fits a common scaling.
    """

    shape: list[Count] = dataclasses.field(default_factory=list)  # by default one number for each of `features`
    type: Literal["float32", "float64", "uint8", "int32"] = "float32"
    features: list[str] = dataclasses.field(default_factory=list)  # in the order in which the model reads them
    classes: list[str] = dataclasses.field(default_factory=list)  # in the order of the model's outputs
    num_outputs: Count | None = None  # without `classes`: 10, or that many classes 0, 1, ... or targets
    label_shape: list[Count] = dataclasses.field(default_factory=list)  # of labels that are not single numbers
    standardize: Flag = False


@dataclass(frozen=True, config=_KNOWN)
class Terms:
    """`[live]`: what the operator of `personax serve` decides; a simulation ignores it. Times are in seconds.

    A synchronous round ends when its cohort has reported, or at its `deadline` if `least_share` of the cohort has; else
    those who are away are replaced and it waits once more. `num_clients` is how many there are (SCAFFOLD's N): a
    synchronous run begins when so many are there.
    An upload whose norm is more than `outlier_factor` times the median of the other clients' last is refused, or
    clipped to that; with a factor of 0 any norm will do. `personax.live.admission` has the rule.
    """

    num_clients: Count | None = None
    deadline: Positive = 600.0
    least_share: PartOrAll = 0.5
    outliers: Literal["refuse", "clip"] = "refuse"
    outlier_factor: Amount = 20.0
    least_peers: Count = 2  # who must have reported before norms are compared
    model_factor: Amount = 20.0  # times the norm of the model, or 1: the most of any upload; 0 allows any
    loud_budget: Amount = 3.0  # uploads of one client at the bound before it must be quieter
    max_share: Amount = 3.0  # of a round, times the uniform share, where clients are weighted by samples; 0: any
    samples: dict[str, Positive] = dataclasses.field(default_factory=dict)  # of clients, in place of what they claim
    rate: Positive = 100.0  # requests of one client in a second
    bytes_per_day: Count = 10_000_000  # of one client's reports, and of the records of its refused or late uploads
    max_streams: Annotated[Count, Field(ge=2)] = 4  # of one client at the same time; its uploads keep one open
    max_transfers: Count = 64  # models on their way at the same time
    max_connections: Count = 4096  # of all peers together
    max_client_connections: Count = 16  # of one certificate
    stall: Positive = 30.0  # without a piece of an upload
    presence: Positive = 60.0  # since a client was last heard of
    checkpoint: Positive = 10.0  # between checkpoints
    save_every: Positive = 3600.0  # between states that are kept for `personax serve --from`
    num_saved: Count = 24  # of them; older ones are removed
    linger: Amount = 60.0  # after the end, for the clients' last numbers
    sync: Flag = False  # wait for the disk before answering: survives power cuts, too
    sample: Sample | None = None


@dataclass(frozen=True, config=_KNOWN)
class AlgorithmSection:
    """`[algorithms.NAME]`: a recipe (a name, or a table that imports one), its options, and how it is scored."""

    recipe: str | dict[str, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    scores: dict[Name, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=_KNOWN)
class TuneSection:
    """`[tune]`: how `--tune` searches, and lists of values to try, by the (dotted) name of an option.

    Without lists each recipe states what is tuned, around its own values. A grid tries every combination, a random
    search `num_trials` of them; "auto" is a grid where it has at most that many. `seed` is that of the validation
    split, by default `split.seed`, and `share` the part of each client's training data that is validated on.
    """

    search: Literal["auto", "grid", "random"] = "auto"
    num_trials: Count = 12  # of each algorithm, before extensions
    num_extensions: Natural = 3  # beyond the edge of the recipe's own values, while the best value is there
    share: Share = 0.2
    seed: Natural | None = None
    options: dict[str, Annotated[list[Any], Field(min_length=1)]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=_KNOWN)
class Config:
    """A whole run. `seeds` is how many, or which; `[local]` holds options that all recipes share.

    `precision` is that of the clients' matrix products, see `simulate`. An update that is not finite ends the curve of
    its seed ("diverge"), is skipped and counted ("skip"), or stops the run with an error ("raise").
    """

    name: Name = "run"
    personax: str | None = None  # the version that wrote the configuration of a run folder
    seeds: HowMany | Annotated[list[Natural], Field(min_length=1, max_length=1000)] = 3
    precision: Literal["default", "float32", "tf32", "bf16"] = "default"
    on_nonfinite: Literal["diverge", "skip", "raise"] = "diverge"
    data: DataSection = DataSection("digits")
    partition: Section | None = None
    split: Split = Split()
    model: ModelSection = ModelSection("mlp", options={"widths": [32]})
    task: TaskSection = TaskSection()
    schedule: ScheduleSection = ScheduleSection()
    evaluation: EvaluationSection = EvaluationSection()
    live: Terms | None = None
    local: dict[str, Any] = dataclasses.field(default_factory=dict)
    tune: TuneSection = TuneSection()
    algorithms: Annotated[dict[Name, AlgorithmSection], Field(min_length=1)] = dataclasses.field(default_factory=dict)

    @property
    def seed_list(self) -> list[int]:
        """The seeds themselves."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds


STARTER = Path(__file__).with_name("default.toml")
_CONFIG = TypeAdapter(Config)
_SECTIONS = {"data": DATASETS, "partition": PARTITIONS, "model": MODELS}
_OF_SECTION = {
    "data": ("kind", "standardize"),
    "partition": ("kind",),
    "model": ("kind", "base", "base_digest", "lora"),
}
_OF_ENTRY = ("recipe", "scores")
_OF_TUNE = ("search", "num_trials", "num_extensions", "share", "seed")
_ALTERNATIVE = re.compile(r"constrained-int|str|(list|dict|literal)\[.*\]")  # what pydantic adds to places
_ASSIGNMENT = re.compile(r"""((?:"[^"]*"|'[^']*'|[^"'=])*)=(.*)""", re.DOTALL)


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a file (without one: the embedded default), with `key=value` overrides."""
    source = STARTER if path is None else path
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no file {source}. Write a starter with `personax init {source}`.") from None
    except (ValueError, RecursionError) as error:  # also of letters, numbers and nesting that cannot be read
        raise ConfigError(f"{source} is not TOML: {error}. Repair that place.") from None
    for override in overrides:
        _override(table, override)
    return dataclasses.replace(parse(table), personax=None)


def parse(table: dict[str, Any]) -> Config:
    """Check plain tables and make a configuration of them. Nothing is imported."""
    sections = {name: _with_options(table[name], _OF_SECTION[name]) for name in _SECTIONS if name in table}
    algorithms = table.get("algorithms", {})
    if isinstance(algorithms, dict):
        algorithms = {name: _with_options(entry, _OF_ENTRY) for name, entry in algorithms.items()}
    if "tune" in table:
        sections["tune"] = _with_options(_dotted(table["tune"]), _OF_TUNE)
    try:
        config = _CONFIG.validate_python({**table, **sections, "algorithms": algorithms})
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_explain(one) for one in error.errors()))) from None
    completed = {name: _completed(name, getattr(config, name)) for name in _SECTIONS}
    return dataclasses.replace(config, **completed)


def dump(config: Config) -> str:
    """Write the configuration as TOML, including every default."""
    table = _without_none(dataclasses.asdict(config))
    of_section = lambda entry: {**{key: item for key, item in entry.items() if key != "options"}, **entry["options"]}
    sections = {name: of_section(table[name]) for name in (*_SECTIONS, "tune") if name in table}
    flat = {
        name: {"recipe": entry["recipe"], **entry["options"], "scores": entry["scores"]}
        for name, entry in table["algorithms"].items()
    }
    return tomli_w.dumps({**table, **sections, "algorithms": flat})


def dump_run(config: Config) -> str:
    """The configuration of a run folder: with the version of personax that wrote it."""
    return dump(dataclasses.replace(config, personax=version("personax")))


def load_run(path: Path) -> Config:
    """The configuration of a run folder; one of an older version is rejected."""
    try:
        writer = tomllib.loads(path.read_text(encoding="utf-8")).get("personax", "0.1")
    except (ValueError, OSError):
        writer = version("personax")  # `load` says what is wrong with the file
    require_same_version(path.parent, str(writer))
    return load(path)


def require_same_version(folder: Path, writer: str) -> None:
    """Raise unless a run folder was written by this version of personax (the last number does not matter)."""
    mine = version("personax")
    if writer.split(".")[:2] != mine.split(".")[:2]:
        raise ConfigError(
            f"{folder} was written by personax {writer} and cannot be read by {mine}. "
            f"Run it again, or install personax {writer}."
        )


def choose_algorithm(config: Config, name: str | None, where: object = "the configuration") -> Config:
    """The configuration with one of its algorithms, which must be named if there are several."""
    names = list(config.algorithms)
    if name is None and len(names) > 1:
        raise ConfigError(f"`{where}` has {len(names)} algorithms. Choose one with --algorithm: {', '.join(names)}.")
    chosen = names[0] if name is None else name
    check_names(str(where), [chosen], names, "algorithm")
    return dataclasses.replace(config, algorithms={chosen: config.algorithms[chosen]})


def imports_of(config: Config) -> list[str]:
    """The path of everything that a run of this configuration imports, each once.

    A configuration that imports is code: `compare` and `run` print this list before they run it.
    """
    return list(dict.fromkeys(imports_in(tomllib.loads(dump(config)))))


def _completed(
    name: str, section: Section | DataSection | ModelSection | None
) -> Section | DataSection | ModelSection | None:
    """A section with the defaults of its kind, its options checked. What is imported is checked when it is built."""
    if section is None or section.kind == "import":
        return section
    parameters = _SECTIONS[name].parameters({"kind": section.kind, **section.options}, name)
    known = {*parameters, *(("test_each",) if "num_each" in parameters else ())}  # for a published test set
    known |= set(_OF_SECTION[name]) - {"kind"}
    check_names(name, section.options, known)
    for key, item in section.options.items():
        construct(parameters[key].annotation if key in parameters else int, item, f"{name}.{key}")
    missing = [key for key, one in parameters.items() if one.default is one.empty and key not in section.options]
    if missing:
        raise ConfigError(f"`{name}` needs `{missing[0]}`. Add it; `personax init` writes an example.")
    defaults = {key: one.default for key, one in parameters.items() if one.default not in (one.empty, None)}
    return dataclasses.replace(section, options={**defaults, **section.options})


def _with_options(table: Any, own: tuple[str, ...]) -> Any:
    """The keys that stand beside `own` in TOML, in a table of their own."""
    if not isinstance(table, dict):
        return table
    options = {key: item for key, item in table.items() if key not in own}
    return {**{key: table[key] for key in own if key in table}, "options": options}


def _dotted(table: Any, before: str = "") -> Any:
    """A table without tables in it: their keys, after a dot, are keys of its own."""
    if not isinstance(table, dict):
        return table
    flat = {}
    for key, item in table.items():
        flat |= _dotted(item, f"{before}{key}.") if isinstance(item, dict) else {before + key: item}
    return flat


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
    place = [part if part.isprintable() else repr(part) for part in _in_toml(error["loc"]) if part != "[key]"]
    where, name = ".".join(place[:-1]) or "the file", place[-1]
    path = ".".join(place)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return unknown_name(where, name, _settings_at(error["loc"][:-1]))
    if error["type"] in ("missing", "missing_argument"):
        return f"`{where}` needs `{name}`. Add it; `personax init` writes an example."
    must = error["msg"][0].lower() + error["msg"][1:]
    return f"`{path}`: {must}, got {error['input']!r:.80}. Change it; `personax init` writes an example."


def _in_toml(loc: Sequence[Any]) -> list[str]:
    """A place as it is written in TOML: without the alternatives that pydantic adds."""
    first, *rest = map(str, loc)
    if first in ("seeds", "schedule", "algorithms"):
        rest = [part for part in rest if not _ALTERNATIVE.fullmatch(part)]
    if first == "tune" and rest[:1] == ["options"]:
        rest = rest[1:]
    return [first, *rest]


def _settings_at(place: Sequence[Any]) -> list[str]:
    """The names of the settings of the section at this place."""
    sections: list[Any] = [Config]
    for part in place:
        annotations = {name: kind for section in sections for name, kind in _types(section).items()}
        sections = _classes(annotations[part]) if part in annotations else sections  # or an algorithm's name
    return [name for section in sections for name in _types(section)]


def _types(section: Any) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(section)}


def _classes(annotation: Any) -> list[Any]:
    """The sections in an annotation."""
    if dataclasses.is_dataclass(annotation):
        return [annotation]
    return [found for part in get_args(annotation) for found in _classes(part)]
