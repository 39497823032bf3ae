"""The configuration of a run as a value that round-trips through TOML and is validated before anything is computed."""

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
from personax.simulation import controllers  # noqa: F401
from personax.values import (
    CONTROLLERS,
    DATASETS,
    MODELS,
    PARTITIONS,
    ConfigError,
    check_names,
    construct,
    imports_in,
    unknown_name,
)

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
    """A section such as `[partition]`: a kind, and its options, which in TOML are in the same table."""

    kind: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        """Return the section as in TOML."""
        return {"kind": self.kind, **self.options}


@dataclass(frozen=True, config=_KNOWN)
class LoraSection:
    """The section `[model.lora]`: adapters on dense layers, see `px.lora`; with `mix`, two each, see `px.dual_lora`."""

    rank: Count
    on: str | list[str] = "*.kernel"
    scale: Positive = 1.0
    mix: Share | None = None


@dataclass(frozen=True, config=_KNOWN)
class ModelSection:
    """The section `[model]`: a kind with its options, a safetensors file with its initial parameters, and adapters.

    `base_digest` is the SHA-256 of the file, which a run folder records.
    """

    kind: str
    base: str | None = None
    base_digest: str | None = None
    lora: LoraSection | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        """Return the table of the network: the section without its initial parameters."""
        adapters = {} if self.lora is None else {"lora": _without_none(dataclasses.asdict(self.lora))}
        return {"kind": self.kind, **self.options, **adapters}


@dataclass(frozen=True, config=_KNOWN)
class DataSection:
    """The section `[data]`: a kind with its options, and the flag `standardize` for features and regression targets."""

    kind: str
    standardize: Flag = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        """Return the table of the data: the section without `standardize`."""
        return {"kind": self.kind, **self.options}


@dataclass(frozen=True, config=_KNOWN)
class Split:
    """The section `[split]`: the test share of clients without test data, the newcomers, and the seed of the split.

    `validation_share` of each client's training data is held out of training for controllers.
    """

    test_share: Share = 0.2
    validation_share: Share | None = None
    num_held_out: Natural = 0
    seed: Natural = 0


@dataclass(frozen=True, config=_KNOWN)
class TaskSection:
    """The section `[task]`: classification or regression (by default inferred from the labels), and an l2 penalty."""

    kind: Literal["auto", "classification", "regression"] = "auto"
    l2: Amount = 0.0


@dataclass(frozen=True, config=_KNOWN)
class ScheduleSection:
    """The section `[schedule]`: rounds of a cohort or of "all"; asynchronous algorithms get equally many updates.

    Of each cohort, `num_aggregated` updates are aggregated, either random ones or the first to arrive, and none after
    the `deadline`. At most `concurrency` clients of an asynchronous server train at the same time. At most
    `cohort_chunk` clients are trained at once, for cohorts that do not fit into the device's memory.
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
    """The section `[evaluation]`: the interval in rounds, newcomers' adaptation steps, and gradient norms.

    `target` is a value of the headline metric, such as an accuracy of 0.8: results have the rounds, the virtual time
    and the bytes until each score reaches it. By default it is the best that all scores reach.
    """

    every: Count = 10
    target: float | None = None
    stationarity: bool = False
    adaptation_steps: list[Natural] = dataclasses.field(default_factory=lambda: [0, 1, 2, 5, 10])


@dataclass(frozen=True, config=_KNOWN)
class Sample:
    """The section `[live.sample]`: the schema of the clients' samples, for a server without data.

    Clients match columns and labels to `features` and `classes` by name. With `standardize`, they first send the
    moments of their columns, from which the server fits a common scaling.
    """

    shape: list[Count] = dataclasses.field(default_factory=list)  # by default one number per feature
    type: Literal["float32", "float64", "uint8", "int32"] = "float32"
    features: list[str] = dataclasses.field(default_factory=list)  # in the order in which the model reads them
    classes: list[str] = dataclasses.field(default_factory=list)  # in the order of the model's outputs
    num_outputs: Count | None = None  # without `classes`: the number of classes 0, 1, ... or of targets; 10 by default
    label_shape: list[Count] = dataclasses.field(default_factory=list)  # for labels that are not single numbers
    standardize: Flag = False


@dataclass(frozen=True, config=_KNOWN)
class Terms:
    """The section `[live]`: settings of the operator of `personax serve`; simulations ignore it. Times are in seconds.

    A synchronous round ends when its cohort has reported, or at its `deadline` if `least_share` of the cohort has;
    otherwise, absent members are replaced and it waits again. `num_clients` is the number of clients (SCAFFOLD's N): a
    synchronous run starts when that many have joined. An upload whose norm exceeds `outlier_factor` times the median of
    the other clients' last norms is refused or clipped; a factor of 0 allows any norm. `personax.live.admission` has
    the rule.
    """

    num_clients: Count | None = None
    deadline: Positive = 600.0
    least_share: PartOrAll = 0.5
    outliers: Literal["refuse", "clip"] = "refuse"
    outlier_factor: Amount = 20.0
    least_peers: Count = 2  # clients that must have reported before norms are compared
    model_factor: Amount = 20.0  # largest upload norm, in units of the model's norm or 1; 0 allows any
    loud_budget: Amount = 3.0  # uploads at the bound that one client may send before its bound is lowered
    max_share: Amount = 3.0  # largest weight in a round, in units of the uniform one, if weighted by samples; 0: any
    samples: dict[str, Positive] = dataclasses.field(
        default_factory=dict
    )  # sample counts that override the clients' claims
    rate: Positive = 100.0  # requests per second and client
    bytes_per_day: Count = 10_000_000  # per client: reports, and records of its refused or late uploads
    max_streams: Annotated[Count, Field(ge=2)] = 4  # concurrent streams per client; uploads keep one open
    max_transfers: Count = 64  # concurrent transfers of models
    max_connections: Count = 4096  # of all peers
    max_client_connections: Count = 16  # per certificate
    stall: Positive = 30.0  # longest pause within an upload
    presence: Positive = 60.0  # since the last message of a client
    checkpoint: Positive = 10.0  # between checkpoints
    save_every: Positive = 3600.0  # between states kept for `personax serve --from`
    num_saved: Count = 24  # kept states; older ones are removed
    linger: Amount = 60.0  # after the end, to receive the clients' final scores
    sync: Flag = False  # flush to disk before answering, which survives power failures
    sample: Sample | None = None


@dataclass(frozen=True, config=_KNOWN)
class ControllerSection:
    """`[controller]`: a kind with its options, and the rounds between two decisions."""

    kind: str
    every: Count = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=_KNOWN)
class OwnSchedule:
    """The section `[algorithms.NAME.schedule]`: settings that replace those of `[schedule]` for one algorithm.

    A study can thus compare servers that wait for all, for the first, or until a deadline. The number of rounds and the
    delays are the same for all algorithms.
    """

    cohort_size: Count | Literal["all"] | None = None
    num_aggregated: Count | None = None
    aggregate: Literal["random", "first"] | None = None
    deadline: Positive | None = None
    concurrency: Count | None = None


@dataclass(frozen=True, config=_KNOWN)
class AlgorithmSection:
    """The section `[algorithms.NAME]`: a recipe (a name, or a table that imports one), its options and its scores.

    `controller` and `schedule` replace those of the whole study; the schedule only in the settings that it has.
    """

    recipe: str | dict[str, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    scores: dict[Name, dict[str, Any]] = dataclasses.field(default_factory=dict)
    controller: ControllerSection | None = None
    schedule: OwnSchedule | None = None


@dataclass(frozen=True, config=_KNOWN)
class TuneSection:
    """The section `[tune]`: the search of `--tune`, and lists of values to try, by the (dotted) name of an option.

    Without lists, each recipe states which options are tuned, around its own values. A grid tries every combination, a
    random search `num_trials` of them; "auto" is a grid if it has at most that many. `seed` is the seed of the
    validation split, by default `split.seed`, and `share` the share of each client's training data used for validation.
    """

    search: Literal["auto", "grid", "random"] = "auto"
    num_trials: Count = 12  # per algorithm, before extensions
    num_extensions: Natural = 3  # beyond the edge of the recipe's values, while the best value is at the edge
    share: Share = 0.2
    seed: Natural | None = None
    options: dict[str, Annotated[list[Any], Field(min_length=1)]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=_KNOWN)
class Config:
    """The configuration of a run. `seeds` is their number or a list; `[local]` holds options shared by all recipes.

    `precision` is the precision of the clients' matrix products, see `simulate`. A nonfinite update ends the curve of
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
    controller: ControllerSection | None = None
    live: Terms | None = None
    local: dict[str, Any] = dataclasses.field(default_factory=dict)
    tune: TuneSection = TuneSection()
    algorithms: Annotated[dict[Name, AlgorithmSection], Field(min_length=1)] = dataclasses.field(default_factory=dict)

    @property
    def seed_list(self) -> list[int]:
        """Return the list of seeds."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    def scheduled_for(self, name: str) -> "Config":
        """Return the configuration with the schedule of one algorithm."""
        own = self.algorithms[name].schedule
        given = {} if own is None else {key: item for key, item in vars(own).items() if item is not None}
        return dataclasses.replace(self, schedule=dataclasses.replace(self.schedule, **given))


STARTER = Path(__file__).with_name("default.toml")
_CONFIG = TypeAdapter(Config)
_SECTIONS = {"data": DATASETS, "partition": PARTITIONS, "model": MODELS, "controller": CONTROLLERS}
_OF_SECTION = {
    "data": ("kind", "standardize"),
    "partition": ("kind",),
    "model": ("kind", "base", "base_digest", "lora"),
    "controller": ("kind", "every"),
}
_OF_ENTRY = ("recipe", "scores", "controller", "schedule")
_OF_TUNE = ("search", "num_trials", "num_extensions", "share", "seed")
_ALTERNATIVE = re.compile(r"constrained-int|str|(list|dict|literal)\[.*\]")  # added to locations by pydantic
_ASSIGNMENT = re.compile(r"""((?:"[^"]*"|'[^']*'|[^"'=])*)=(.*)""", re.DOTALL)


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Load the configuration of a file, or the embedded default, with `key=value` overrides."""
    source = STARTER if path is None else path
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"File not found: {source}. Write a starter with `personax init {source}`.") from None
    except (ValueError, RecursionError) as error:  # also for invalid encodings, numbers and nesting
        raise ConfigError(f"{source} is not valid TOML: {error}. Fix the syntax there.") from None
    for override in overrides:
        _override(table, override)
    return dataclasses.replace(parse(table), personax=None)


def parse(table: dict[str, Any]) -> Config:
    """Validate plain tables and make a configuration, without importing anything."""
    sections = {name: _with_options(table[name], _OF_SECTION[name]) for name in _SECTIONS if name in table}
    algorithms = table.get("algorithms", {})
    if isinstance(algorithms, dict):
        algorithms = {name: _entry(entry) for name, entry in algorithms.items()}
    if "tune" in table:
        sections["tune"] = _with_options(_dotted(table["tune"]), _OF_TUNE)
    try:
        config = _CONFIG.validate_python({**table, **sections, "algorithms": algorithms})
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_explain(one) for one in error.errors()))) from None
    completed = {name: _completed(name, getattr(config, name)) for name in _SECTIONS}
    entries = {name: _completed_entry(name, entry) for name, entry in config.algorithms.items()}
    return dataclasses.replace(config, **completed, algorithms=entries)


def _entry(table: Any) -> Any:
    """Move the options of an algorithm, and those of its controller, to nested tables."""
    moved = _with_options(table, _OF_ENTRY)
    if not isinstance(moved, dict) or "controller" not in moved:
        return moved
    return {**moved, "controller": _with_options(moved["controller"], _OF_SECTION["controller"])}


def _completed_entry(name: str, entry: AlgorithmSection) -> AlgorithmSection:
    controller = _completed("controller", entry.controller, f"algorithms.{name}.controller")
    return dataclasses.replace(entry, controller=controller)


def dump(config: Config) -> str:
    """Write the configuration as TOML, including every default."""
    table = _without_none(dataclasses.asdict(config))
    sections = {name: _of_section(table[name]) for name in (*_SECTIONS, "tune") if name in table}
    flat = {name: _flat_entry(entry) for name, entry in table["algorithms"].items()}
    return tomli_w.dumps({**table, **sections, "algorithms": flat})


def _flat_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the table of an algorithm as in TOML."""
    kept = {key: entry[key] for key in ("scores", "schedule") if entry.get(key)}
    if "controller" in entry:
        kept["controller"] = _of_section(entry["controller"])
    return {"recipe": entry["recipe"], **entry["options"], **kept}


def _of_section(entry: dict[str, Any]) -> dict[str, Any]:
    """Move the options of a section next to its other keys, as in TOML."""
    return {**{key: item for key, item in entry.items() if key != "options"}, **entry["options"]}


def dump_run(config: Config) -> str:
    """Write the configuration of a run folder, which includes the version of personax."""
    return dump(dataclasses.replace(config, personax=version("personax")))


def load_run(path: Path) -> Config:
    """Load the configuration of a run folder; one of an older version is rejected."""
    try:
        writer = tomllib.loads(path.read_text(encoding="utf-8")).get("personax", "0.1")
    except (ValueError, OSError):
        writer = version("personax")  # `load` reports the problem of the file
    require_same_version(path.parent, str(writer))
    return load(path)


def require_same_version(folder: Path, writer: str) -> None:
    """Raise unless a run folder was written by this version of personax (the last number does not matter)."""
    mine = version("personax")
    if writer.split(".")[:2] != mine.split(".")[:2]:
        raise ConfigError(
            f"{folder} was written by personax {writer} and cannot be read by {mine}. "
            f"Rerun the experiment, or install personax {writer}."
        )


def choose_algorithm(config: Config, name: str | None, where: object = "the configuration") -> Config:
    """Reduce a configuration to one algorithm, which must be named if there are several."""
    names = list(config.algorithms)
    if name is None and len(names) > 1:
        raise ConfigError(f"`{where}` has {len(names)} algorithms. Choose one with --algorithm: {', '.join(names)}.")
    chosen = names[0] if name is None else name
    check_names(str(where), [chosen], names, "algorithm")
    return dataclasses.replace(config, algorithms={chosen: config.algorithms[chosen]})


def imports_of(config: Config) -> list[str]:
    """Return the paths of all imports of a configuration, each once.

    A configuration with imports is code: `compare` and `run` print this list before they run it.
    """
    return list(dict.fromkeys(imports_in(tomllib.loads(dump(config)))))


AnySection = Section | DataSection | ModelSection | ControllerSection


def _completed(name: str, section: Any, where: str = "") -> Any:
    """Fill in the defaults of a section's kind and check its options. Imports are checked when they are built."""
    if section is None or section.kind == "import":
        return section
    where = where or name
    parameters = _SECTIONS[name].parameters({"kind": section.kind, **section.options}, where)
    known = {*parameters, *(("test_each",) if "num_each" in parameters else ())}  # for a published test set
    known |= set(_OF_SECTION[name]) - {"kind"}
    check_names(where, section.options, known)
    for key, item in section.options.items():
        construct(parameters[key].annotation if key in parameters else int, item, f"{where}.{key}")
    missing = [key for key, one in parameters.items() if one.default is one.empty and key not in section.options]
    if missing:
        raise ConfigError(f"`{where}` needs `{missing[0]}`. Add it; `personax init` writes an example.")
    defaults = {key: one.default for key, one in parameters.items() if one.default not in (one.empty, None)}
    return dataclasses.replace(section, options={**defaults, **section.options})


def _with_options(table: Any, own: tuple[str, ...]) -> Any:
    """Move all keys except `own` to a nested table."""
    if not isinstance(table, dict):
        return table
    options = {key: item for key, item in table.items() if key not in own}
    return {**{key: table[key] for key in own if key in table}, "options": options}


def _dotted(table: Any, before: str = "") -> Any:
    """Flatten nested tables: their keys get a dotted prefix."""
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
    """Apply `a.b.c=value` to nested tables; the value is TOML, or otherwise a string."""
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
    """Split a dotted TOML key; names with dots or spaces are quoted."""
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
    """Describe an error in one sentence: the requirement, the value and the remedy."""
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
    """Return a location as written in TOML, without the alternatives that pydantic adds."""
    first, *rest = map(str, loc)
    if first in ("seeds", "schedule", "algorithms"):
        rest = [part for part in rest if not _ALTERNATIVE.fullmatch(part)]
    if first == "tune" and rest[:1] == ["options"]:
        rest = rest[1:]
    return [first, *rest]


def _settings_at(place: Sequence[Any]) -> list[str]:
    """Return the setting names of the section at a location."""
    sections: list[Any] = [Config]
    for part in place:
        annotations = {name: kind for section in sections for name, kind in _types(section).items()}
        sections = _classes(annotations[part]) if part in annotations else sections  # or an algorithm's name
    return [name for section in sections for name in _types(section)]


def _types(section: Any) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(section)}


def _classes(annotation: Any) -> list[Any]:
    """Return the section classes in an annotation."""
    if dataclasses.is_dataclass(annotation):
        return [annotation]
    return [found for part in get_args(annotation) for found in _classes(part)]
