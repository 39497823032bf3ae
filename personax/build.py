"""From a configuration to the values of a run: federation, task, algorithms, protocols, schedules."""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax import algorithms, datasets, models, partition
from personax.algorithms import Algorithm
from personax.checks import check_model
from personax.config import (
    Config,
    ConfigError,
    Entry,
    FallahHalves,
    File,
    Imported,
    Leaf,
    Mlp,
    Pooled,
    Saved,
    check_names,
)
from personax.curvature import exact, first_order
from personax.federation import Federation
from personax.local import Local
from personax.objectives import LocalOnly, Meta, Mixture, Moreau
from personax.protocol import Protocol
from personax.schedules import Delays, Schedule, arrivals, persafl_delays, rounds
from personax.server import Server, asynchronous, buffered, synchronous
from personax.tasks import as_inputs, classification, regression
from personax.typing import Array, Model, Params, Task
from personax.values import KINDS

RECIPES: dict[str, Callable[..., Algorithm]] = {
    name: item
    for name, item in vars(algorithms).items()
    if inspect.isfunction(item) and item.__module__ == algorithms.__name__
}
SHORT: dict[str, Callable[..., Any]] = {  # lower-case kinds, and strings that stand for a value without options
    "synchronous": synchronous,
    "buffered": buffered,
    "asynchronous": asynchronous,
    "exact": lambda: exact,
    "first_order": lambda: first_order,
}
_KINDS_OF = {  # the settings that can be a table, and of which kinds
    "batch_size": ("BatchSizes",),
    "discount": ("Constant", "Hinge", "Polynomial"),
    "hvp": ("Exact", "FiniteDifference", "FirstOrder", "RelativeDifference", "exact", "first_order"),
    "lr": ("Decay", "InverseDecay", "InverseSqrt", "StronglyConvex"),
    "objective": ("Aruba", "Erm", "LocalOnly", "Meta", "Mixture", "Moreau", "Proximal", "Scaffold"),
    "optimizer": ("Optimizer",),
    "server": ("Server", "asynchronous", "buffered", "synchronous"),
}
_NEVER_NUMBERS = ("discount", "hvp", "objective", "optimizer", "server")


class Training(NamedTuple):
    """One algorithm of a run, with the protocols that score it, by name."""

    name: str
    recipe: str
    algorithm: Algorithm
    protocols: dict[str, Protocol]


class Plan(NamedTuple):
    """All that a run computes with. `local` and `together` are the scores of local training and the global model."""

    federation: Federation
    task: Task
    trainings: list[Training]
    keys: Array  # one for each seed
    local: str | None
    together: str | None


def resolve(config: Config, *, baselines: bool) -> Config:
    """The configuration with shared options and default protocols written out.

    With `baselines`, local training and FedAvg's global model are added where they are missing.
    """
    if len(set(config.seed_list)) < len(config.seed_list):
        raise ConfigError(f"`seeds` must all be different, got {config.seeds}. Remove the repeated ones.")
    entries = {name: _merged(config, name, entry) for name, entry in config.algorithms.items()}
    if baselines:
        entries = _with_baselines(config, entries)
    scored = {name: with_scores(name, entry) for name, entry in entries.items()}
    names = [score for entry in scored.values() for score in entry.scores]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"Each score needs a name of its own, got `{twice[0]}` more than once. Rename one.")
    return dataclasses.replace(config, seeds=config.seed_list, local={}, algorithms=scored)


def build(config: Config) -> Plan:
    """The values of a resolved configuration, checked against each other."""
    trainings = [make_training(name, entry) for name, entry in config.algorithms.items()]
    federation = make_federation(config)
    task = make_task(config, outputs_of(config, federation))
    keys = jnp.stack([jax.random.key(seed) for seed in config.seed_list])
    first = lambda recipe, model: next(
        (s for t in trainings for s, p in t.protocols.items() if t.recipe == recipe and p.model == model), None
    )
    check_model(task, federation, None)
    params = jax.eval_shape(lambda: task.model.init(jax.random.key(0), as_inputs(federation.first_sample[0])))
    for training in trainings:
        _check_scores(training, federation, params)
    return Plan(federation, task, trainings, keys, first("local_only", "personal"), first("fedavg", "global"))


def _check_scores(training: Training, federation: Federation, params: Params) -> None:
    """Whether a run can give what its scores ask for: said before it has trained."""
    objective = training.algorithm.objective
    kept = jax.eval_shape(lambda params: objective.models(params, objective.init_personal(params)), params)
    for score, protocol in training.protocols.items():
        where = f"algorithms.{training.name}.scores.{score}"
        if protocol.clients == "held_out" and federation.newcomers is None:
            raise ConfigError(f"`{where}` is of held-out clients and needs some. Set `split.num_held_out`.")
        if protocol.clients == "cohort" and training.algorithm.server.buffer_size is not None:
            raise ConfigError(f"`{where}` is of a cohort, and an asynchronous server has none. Score all clients.")
        check_names(where, [protocol.model], [*kept, "localized", "adapted", "recomputed"], "model")


def make_schedules(config: Config, algorithm: Algorithm, num_clients: int) -> list[Schedule]:
    """One schedule for each seed: rounds, or as many updates one by one where the server does not wait."""
    section = config.schedule
    cohort = num_clients if section.cohort_size == "all" else section.cohort_size
    if cohort > num_clients:
        raise ConfigError(
            f"`schedule.cohort_size` must be at most the {num_clients} clients that train, got {cohort}. Lower it."
        )
    waits = algorithm.server.buffer_size is None
    if not waits and section.delays == "none":
        raise ConfigError('Asynchronous algorithms need delays, got none. Set `schedule.delays = "persafl"`.')
    made = []
    for seed in config.seed_list:
        key = jax.random.key(seed)
        delays = persafl_delays(num_clients, key=key) if section.delays == "persafl" else Delays()
        if waits:
            made.append(rounds(num_clients, section.num_rounds, cohort, key=key, delays=delays))
        else:
            made.append(arrivals(num_clients, section.num_rounds * cohort, delays=delays, key=key))
    return made


def make_federation(config: Config) -> Federation:
    """The clients and their data, those held out of training apart."""
    key = jax.random.key(config.split.seed)
    federation = _divided(config, key) if isinstance(config.data, Pooled) else _read(config, key)
    if federation.is_mapped:
        return _checked(config, federation)
    if federation.test_x is None:
        federation = federation.split_tests(config.split.test_share, key=key)
    held_out = config.split.num_held_out
    if held_out >= federation.num_clients:
        raise ConfigError(
            f"`split.num_held_out` must leave some of the {federation.num_clients} clients, got {held_out}. Lower it."
        )
    return federation.hold_out(held_out, key=key) if held_out else federation


def _checked(config: Config, federation: Federation) -> Federation:
    """A federation in files, which is divided before it is saved: to do it here would read all of it."""
    if federation.test_x is None:
        raise ConfigError("The folder of `data.path` has no test data. Use `split_tests(...)` before `save(...)`.")
    if config.split.num_held_out:
        raise ConfigError("Clients of `data.path` cannot be held out here. Use `hold_out(...)` before `save(...)`.")
    return federation


def _divided(config: Config, key: Array) -> Federation:
    pool = {"digits": datasets.digits, "mnist": datasets.mnist, "cifar10": datasets.cifar10}[config.data.kind]()
    section = config.partition
    if section is None:
        raise ConfigError(f"`{config.data.kind}` has to be divided among clients. Add a `[partition]`.")
    options = {k: v for k, v in dataclasses.asdict(section).items() if k not in ("kind", "test_each") and v is not None}
    divide = partial(getattr(partition, section.kind), **options, key=key)
    make = partial(Federation.from_partition, pool.x, pool.y, origin=f"{pool.name}.")
    if isinstance(section, FallahHalves) and section.test_each is not None:
        if pool.test_y is None:
            raise ConfigError(f"{pool.name} has no published test set for `partition.test_each`. Leave it out.")
        test = partition.fallah_halves(pool.test_y, **{**options, "num_each": section.test_each}, key=key)
        return make(divide(pool.y), test, test_x=pool.test_x, test_y=pool.test_y)
    parts = divide(len(pool.y) if section.kind == "iid" else pool.y)
    return make(*parts.split(config.split.test_share, key=key))


def _read(config: Config, key: Array) -> Federation:
    section = config.data
    if config.partition is not None:
        raise ConfigError(f"`{section.kind}` data comes divided among clients. Remove the `[partition]`.")
    if isinstance(section, File):
        table = partial(datasets.read_table, Path(section.path), client=section.client, label=section.label)
        return table(split=section.split, shape=None if section.shape is None else tuple(section.shape))
    if isinstance(section, Saved):
        return Federation.open(section.path)
    if isinstance(section, Leaf):
        folder = Path(section.path)
        if section.kind == "femnist":
            return datasets.femnist(folder, digits_only=section.digits_only)
        return datasets.read_leaf(folder)
    options: dict[str, Any] = {name: item for name, item in dataclasses.asdict(section).items() if name != "kind"}
    return datasets.synthetic(**options, test_share=config.split.test_share, key=key)


class Outputs(NamedTuple):
    """What a model is to predict."""

    kind: str  # "classification" or "regression"
    num: int


def outputs_of(config: Config, federation: Federation) -> Outputs:
    """One output for each class up to the largest label, or for each target."""
    integers = np.issubdtype(federation.y.dtype, np.integer)
    kind = config.task.kind if config.task.kind != "auto" else "classification" if integers else "regression"
    if kind == "regression":
        return Outputs(kind, int(np.prod(federation.y.shape[1:])))
    if not integers:
        raise ConfigError(f"Classification needs whole-number labels, got {federation.y.dtype}. Use `regression`.")
    new = federation.newcomers
    parts = [federation.y, federation.test_y, *((new.y, new.test_y) if new else ())]
    return Outputs(kind, 1 + max(int(part.max()) for part in parts if part is not None))


def make_task(config: Config, outputs: Outputs) -> Task:
    """The model and its loss."""
    make = classification if outputs.kind == "classification" else regression
    return make(_model(config, outputs.num), config.task.l2)


def _model(config: Config, num_outputs: int) -> Model:
    section = config.model
    if isinstance(section, Mlp):
        return models.mlp(section.widths, num_outputs, section.activation, section.init)
    if not isinstance(section, Imported):
        return getattr(models, section.kind)(num_outputs, init=section.init)
    try:
        made = _imported(section.path)(num_outputs=num_outputs, **section.options)
        hash(made)  # as it must be to compile once
    except Exception as error:  # whatever a user's module raises
        raise ConfigError(f"`model.path` {section.path!r} cannot be used: {type(error).__name__}: {error}") from error
    if not isinstance(made, Model):
        raise ConfigError(f"{section.path!r} must return a personax.Model, got {type(made).__name__}. Use an adapter.")
    return made


def _imported(path: str) -> Any:
    """What `module:name` names; modules are looked for in the current folder, too."""
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.append("")
    return getattr(importlib.import_module(module), name)


def _merged(config: Config, name: str, entry: Entry) -> Entry:
    """An entry with the shared options that its recipe takes."""
    check_names(f"algorithms.{name}", [entry.recipe], RECIPES, "recipe")
    check_names("local", config.local, ["lr", *_LOCAL])
    given = entry.options.keys() & {"num_steps", "num_epochs"}  # either replaces both
    shared = {key: item for key, item in config.local.items() if not (given and key in ("num_steps", "num_epochs"))}
    if entry.recipe == "aruba":
        shared.pop("lr", None)  # its step sizes are learned
    return dataclasses.replace(entry, options={**shared, **entry.options})


def _with_baselines(config: Config, entries: dict[str, Entry]) -> dict[str, Entry]:
    """Entries that have local training and FedAvg's global model among them."""
    made = {name: with_scores(name, entry) for name, entry in entries.items()}
    has = lambda recipe, model: any(
        entry.recipe == recipe and any(score.get("model") == model for score in entry.scores.values())
        for entry in made.values()
    )
    taken = {*made, *(score for entry in made.values() for score in entry.scores)}
    options = _shared_or_first(config, list(made.values()))
    for name, recipe, model in (("Local", "local_only", "personal"), ("FedAvg", "fedavg", "global")):
        if not has(recipe, model):
            if "lr" not in options:
                raise ConfigError(f"The comparison needs `{recipe}`, and no `lr` is given for it. Set `local.lr`.")
            numbered = (f"{name} (baseline {i})" for i in range(2, len(taken) + 2))
            free = next(n for n in (name, f"{name} (baseline)", *numbered) if n not in taken)
            made[free] = Entry(recipe, options, {free: {"model": model}})
    return made


def _shared_or_first(config: Config, entries: list[Entry]) -> dict[str, Any]:
    """How baselines descend: by the shared options, or else those of the first algorithm that has a step size."""
    first = next((entry.options for entry in entries if "lr" in entry.options), {})
    steps = ("num_steps", "num_epochs")
    settled = (*config.local, "query_share", *(steps if config.local.keys() & set(steps) else ()))
    return {**{key: first[key] for key in ("lr", *_LOCAL) if key in first and key not in settled}, **config.local}


def with_scores(name: str, entry: Entry) -> Entry:
    """An entry with at least one score: what its objective is for."""
    if entry.scores:
        return entry
    objective = _algorithm(name, entry).objective
    if isinstance(objective, Meta):
        steps = {"num_steps": objective.num_adapt_steps, "lr": float(objective.adapt_lr)}
        return dataclasses.replace(entry, scores={name: {"model": "adapted", **steps}})
    kept = isinstance(objective, LocalOnly | Moreau | Mixture)
    return dataclasses.replace(entry, scores={name: {"model": "personal" if kept else "global"}})


def make_training(name: str, entry: Entry) -> Training:
    """An algorithm and its protocols, from an entry with at least one score."""
    protocols = {}
    for score, table in entry.scores.items():
        where = f"algorithms.{name}.scores.{score}"
        protocols[score] = _call(where, Protocol, table, _names(Protocol))
    return Training(name, entry.recipe, _algorithm(name, entry), protocols)


def option_names(recipe: str) -> list[str]:
    """What a recipe can be given."""
    parameters = inspect.signature(RECIPES[recipe]).parameters.values()
    return [*(p.name for p in parameters if p.kind is not p.VAR_KEYWORD), *_LOCAL]


def _algorithm(name: str, entry: Entry) -> Algorithm:
    return _call(f"algorithms.{name}", RECIPES[entry.recipe], entry.options, option_names(entry.recipe))


def _call(where: str, make: Callable[..., Any], table: dict[str, Any], known: list[str]) -> Any:
    """Call a recipe or a value with the options of a table; what is wrong is said with the table's name."""
    check_names(where, table, known)
    options = {key: _value(f"{where}.{key}", key, item) for key, item in table.items()}
    try:
        return make(**options)
    except TypeError as error:  # a required option is missing
        raise ConfigError(f"`{where}`: {error}. Add it, or change its type.") from None
    except ValueError as error:
        raise ConfigError(f"`{where}`: {error}") from None


def _value(where: str, key: str, item: Any) -> Any:
    """A value from TOML: a number or string as it is, a table by its `kind`."""
    if isinstance(item, str) and key in _NEVER_NUMBERS:
        item = {"kind": "Optimizer", "name": item} if key == "optimizer" else {"kind": item}
    if isinstance(item, list):
        if key != "options":
            raise ConfigError(f"`{where}` must be one value, got the list {item!s:.80}. To try several use `tune`.")
        return tuple(_value(where, key, entry) for entry in item)
    if not isinstance(item, dict):
        if key in _NEVER_NUMBERS:
            raise ConfigError(f"`{where}` must be a kind or a table with a `kind`, got {item!r:.80}. Name one.")
        return item
    if key not in _KINDS_OF:
        raise ConfigError(f"`{where}` must be one value, got the table {item!s:.80}. Change it.")
    kind, options = str(item.get("kind")), {name: entry for name, entry in item.items() if name != "kind"}
    check_names(where, [kind], _KINDS_OF[key], "kind")
    if kind in SHORT:
        own = {"buffered": _names(Server), "exact": [], "first_order": []}.get(kind, _names(Server)[:1] + _SERVER)
        return _call(where, SHORT[kind], options, own)
    return _call(where, KINDS[kind], options, _names(KINDS[kind]))


def _names(section: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


_LOCAL = [name for name in _names(Local) if name != "lr"]
_SERVER = [name for name in _names(Server) if name != "buffer_size"]
