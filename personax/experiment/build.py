"""Build the parts of a run from a configuration: federation, task, algorithms, scorings and schedules."""

import dataclasses
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.client.local import Local
from personax.data.datasets import Pool
from personax.data.federation import Federation
from personax.data.scaling import Scaling
from personax.data.schema import Schema
from personax.evaluation.evaluate import check_scoring
from personax.evaluation.scoring import COMPUTED, Scoring
from personax.evaluation.validation import ValidationData, split_validation
from personax.experiment.config import AlgorithmSection, Config, ModelSection
from personax.experiment.pretrained import digest_of, pretrained
from personax.models import dual_lora, lora
from personax.models.tasks import as_inputs, classification, regression
from personax.schedules import Delays, Schedule, VisitWork, arrivals, rounds
from personax.schedules.timing import TIMING
from personax.sharing import Sharing
from personax.simulation.checks import check_model, check_statistics
from personax.typing import Array, Model, Params, Task
from personax.values import DATASETS, DELAYS, MODELS, PARTITIONS, RECIPES, ConfigError, call, check_names, construct

LENGTHS = ("num_steps", "num_epochs", "phases")  # of a visit: one of them is given


class Training(NamedTuple):
    """An algorithm of a run, and its scorings by score name."""

    name: str
    recipe: str  # a registered name, or its import path
    algorithm: Algorithm
    scorings: dict[str, Scoring]


class Study(NamedTuple):
    """All parts of a run. The baselines are the scores of local training and of FedAvg's model."""

    federation: Federation
    task: Task
    trainings: list[Training]
    keys: Array  # one per seed
    local_baseline: str | None
    global_baseline: str | None
    validation: ValidationData | None = None  # for controllers


def resolve(config: Config, *, baselines: bool) -> Config:
    """Resolve a configuration: write out shared options and default scorings.

    With `baselines`, add local training and FedAvg's global model if they are missing.
    """
    if len(set(config.seed_list)) < len(config.seed_list):
        raise ConfigError(f"`seeds` must be different, got {config.seeds}. Remove the repeated ones.")
    entries = {name: _merged(config, name, entry) for name, entry in config.algorithms.items()}
    if baselines:
        entries = _with_baselines(config, entries)
    scored = {name: with_scores(name, entry) for name, entry in entries.items()}
    model = config.model
    if model.base is not None and model.base_digest is None:
        model = dataclasses.replace(model, base_digest=digest_of(model.base))
    names = [score for entry in scored.values() for score in entry.scores]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"Duplicate score name `{twice[0]}`. Rename one.")
    return dataclasses.replace(config, seeds=config.seed_list, local={}, model=model, algorithms=scored)


def build(config: Config) -> Study:
    """Build the parts of a resolved configuration, and check that they fit together."""
    trainings = [make_training(name, entry) for name, entry in config.algorithms.items()]
    federation, validation = make_federation(config), None
    if config.split.validation_share is not None:
        split_key = jax.random.key(config.split.seed)
        federation, validation = split_validation(federation, config.split.validation_share, key=split_key)
    task = make_task(config, outputs_of(config, federation), federation.schema.target_scaling)
    keys = jnp.stack([jax.random.key(seed) for seed in config.seed_list])
    first = lambda stands_for: next(
        (name for t in trainings for name, one in t.scorings.items() if stands_for(t.algorithm, one.model)), None
    )
    for part in (federation, federation.newcomers):
        if part is not None:
            check_model(task, part, None)
    params = jax.eval_shape(lambda: task.model.init(jax.random.key(0), as_inputs(federation.first_sample[0])))
    for training in trainings:
        check_statistics(training.algorithm, task, *federation.first_sample)
        _check_scores(training, federation, params)
    return Study(federation, task, trainings, keys, first(is_local_baseline), first(is_global_baseline), validation)


def is_local_baseline(algorithm: Algorithm, model: str) -> bool:
    """Return True for a score of local training: a personal model of an algorithm that shares nothing."""
    return not algorithm.objective.federated and algorithm.objective.is_plain and model == "personal"


def is_global_baseline(algorithm: Algorithm, model: str) -> bool:
    """Return True for a score of FedAvg: the shared model of plain synchronous averaging."""
    objective, is_whole = algorithm.objective, not algorithm.sharing.divides
    is_fedavg = objective.is_plain and objective.federated and algorithm.server.is_synchronous and is_whole
    return is_fedavg and model == "global"


def _check_scores(training: Training, federation: Federation, params: Params) -> None:
    """Check that a run can provide all its scores, before training."""
    try:
        training.algorithm.require_model(params)
    except ValueError as error:
        raise ConfigError(f"`algorithms.{training.name}`: {error}") from None
    objective = training.algorithm.divided
    personal = jax.eval_shape(objective.init_personal, params)
    kept = jax.eval_shape(objective.models, params, personal)
    for score, scoring in training.scorings.items():
        where = f"algorithms.{training.name}.scores.{score}"
        if scoring.clients == "held_out" and federation.newcomers is None:
            raise ConfigError(f"`{where}` scores held-out clients, but there are none. Set `split.num_held_out`.")
        if scoring.clients == "cohort" and not training.algorithm.server.is_synchronous:
            raise ConfigError(f"`{where}` scores a cohort, but an asynchronous server has none. Score all clients.")
        if scoring.model != "global":
            check_names(where, [scoring.model], [*kept, *COMPUTED], "model")
        try:
            check_scoring(training.algorithm, params, personal, scoring)
        except ValueError as error:
            raise ConfigError(f"`{where}`: {error}") from None


def make_schedules(
    config: Config, algorithm: Algorithm, num_clients: int, work: VisitWork | None = None
) -> list[Schedule]:
    """Make one schedule per seed: rounds, or the same number of single updates for an asynchronous server.

    `work` is the work of a visit, from which device delays are computed.
    """
    section = config.schedule
    cohort = num_clients if section.cohort_size == "all" else section.cohort_size
    if cohort > num_clients:
        raise ConfigError(
            f"`schedule.cohort_size` must be at most the {num_clients} training clients, got {cohort}. Reduce it."
        )
    num_aggregated = section.num_aggregated or cohort
    if num_aggregated > cohort:
        raise ConfigError(f"`schedule.num_aggregated` must be at most the cohort's {cohort}, got {num_aggregated}.")
    made = []
    for seed in config.seed_list:
        key = jax.random.key(seed)
        supplied = {"num_clients": num_clients, "key": key, **({} if work is None else {"work": work})}
        delays = DELAYS.make(section.delays, "schedule.delays", **supplied)
        _require_timing(delays)
        if algorithm.server.is_synchronous:
            waits = {"num_aggregated": num_aggregated, "aggregate": section.aggregate, "deadline": section.deadline}
            made.append(rounds(num_clients, section.num_rounds, cohort, key=key, delays=delays, **waits))
        elif delays == Delays():
            raise ConfigError('Asynchronous algorithms need delays. Set `schedule.delays = "persafl"`.')
        else:
            num, limit = section.num_rounds * num_aggregated, section.concurrency
            made.append(arrivals(num_clients, num, delays=delays, key=key, concurrency=limit))
    return made


def _require_timing(delays: Any) -> None:
    """Raise unless delays of any class have the methods of `Timing`."""
    missing = [name for name in TIMING if name not in dir(delays)]
    if missing:
        raise ConfigError(
            f"`schedule.delays`: {type(delays).__name__} lacks {', '.join(f'`{name}`' for name in missing)}. Return a "
            "`px.Delays`, delays of devices, or a class with these methods (`personax.schedules.Timing`)."
        )


def make_federation(config: Config) -> Federation:
    """Make the federation of clients, with held-out clients as newcomers."""
    key = jax.random.key(config.split.seed)
    found = DATASETS.make(config.data.table, "data", test_share=config.split.test_share, key=key)
    if not isinstance(found, Pool | Federation):
        got = type(found).__name__
        raise ConfigError(f"`data` must give a personax Pool or Federation (got {got}). Change the import.")
    if found.is_divided and config.partition is not None:
        pooled = ', or use `kind = "pool"` for a file without clients' if config.data.kind == "file" else ""
        raise ConfigError(f"`{config.data.kind}` data is already divided among clients. Remove `[partition]`{pooled}.")
    federation = found if isinstance(found, Federation) else _divided(config, found, key)
    if config.task.kind == "regression" and federation.schema.classes:
        federation = federation.as_targets()
    if federation.is_mapped:
        return _checked(config, federation)
    if federation.test_x is None:
        federation = federation.split_tests(config.split.test_share, key=key)
    held_out = config.split.num_held_out
    if held_out >= federation.num_clients:
        raise ConfigError(
            f"`split.num_held_out` must be below the {federation.num_clients} clients, got {held_out}. Reduce it."
        )
    federation = federation.hold_out(held_out, key=key) if held_out else federation
    return federation.standardize() if config.data.standardize else federation


def _checked(config: Config, federation: Federation) -> Federation:
    """Check a memory-mapped federation; it must be split before it is saved, because splitting reads all of it."""
    if federation.test_x is None:
        raise ConfigError("The folder of `data.path` has no test data. Use `split_tests(...)` before `save(...)`.")
    if config.split.num_held_out:
        raise ConfigError("Clients of `data.path` cannot be held out. Use `hold_out(...)` before `save(...)`.")
    if config.data.standardize:
        raise ConfigError("The folder of `data.path` cannot be standardized. Use `standardize()` before `save(...)`.")
    return federation


def _divided(config: Config, pool: Pool, key: Array) -> Federation:
    """Divide a pool by `[partition]`; with `test_each`, the published test set in the same way."""
    if config.partition is None:
        raise ConfigError(f"`{config.data.kind}` data must be divided among clients. Add `[partition]`.")
    table = dict(config.partition.table)
    test_each = table.pop("test_each", None)
    divide = lambda table, labels: PARTITIONS.make(table, "partition", labels=labels, key=key)
    make = partial(Federation.from_partition, pool.x, pool.y, origin=f"{pool.name}.", schema=pool.schema)
    parts = divide(table, pool.y)
    if test_each is None:
        return make(*parts.split(config.split.test_share, key=key))
    if pool.test_y is None:
        raise ConfigError(f"{pool.name} has no published test set for `partition.test_each`. Omit it.")
    test = divide({**table, "num_each": test_each}, pool.test_y)
    return make(parts, test, test_x=pool.test_x, test_y=pool.test_y)


class Outputs(NamedTuple):
    """The kind and number of a model's outputs."""

    kind: str  # "classification" or "regression"
    num: int


def outputs_of(config: Config, federation: Federation) -> Outputs:
    """Return one output per class or per target."""
    schema, integers = federation.schema, np.issubdtype(federation.y.dtype, np.integer)
    kind = config.task.kind if config.task.kind != "auto" else "classification" if integers else "regression"
    if kind == "regression":
        return Outputs(kind, schema.num_targets)
    if not integers:
        raise ConfigError(f"Classification needs integer labels, got {federation.y.dtype}. Use `regression`.")
    if not schema.classes:
        raise ConfigError(
            f"Classes must be numbered from 0, got labels {federation.y.min()} to {federation.y.max()}. Renumber them, "
            'or use `task.kind = "regression"`.'
        )
    return Outputs(kind, len(schema.classes))


def make_task(config: Config, outputs: Outputs, target_scaling: Scaling | None = None) -> Task:
    """Make the model and its loss. Errors of scaled targets are measured in their original units."""
    return _task(config, make_network(config.model.table, outputs.num, config.model), outputs, target_scaling)


def _task(config: Config, model: Model, outputs: Outputs, target_scaling: Scaling | None) -> Task:
    if outputs.kind == "classification":
        return classification(model, config.task.l2)
    return regression(model, config.task.l2, None if target_scaling is None else target_scaling.deviation)


def task_of(config: Config, schema: Schema) -> Task:
    """Make the model and its loss for samples of a schema, without reading pretrained parameters."""
    kind = "classification" if schema.classes else "regression"
    outputs = Outputs(kind, schema.num_outputs)
    return _task(config, make_network(config.model.table, outputs.num), outputs, schema.target_scaling)


def starting_model(config: Config, schema: Schema) -> Model:
    """Make the model for samples of this schema, initialized from its file if it has one."""
    return make_network(config.model.table, schema.num_outputs, config.model)


def make_network(table: Mapping[str, Any], num_outputs: int, start: ModelSection | None = None) -> Model:
    """Make the network of a `[model]` table; with `start`, it is initialized from the file of that section, if any."""
    own = {name: item for name, item in table.items() if name != "lora"}
    made = MODELS.make(own, "model", num_outputs=num_outputs)
    if not isinstance(made, Model):
        got = type(made).__name__
        raise ConfigError(f"`model` must give a personax.Model (got {got}). Use an adapter such as `px.from_flax`.")
    try:
        hash(made)
    except TypeError as error:  # it must be hashable to compile only once
        raise ConfigError(f"`model`: its functions must be hashable: {error}. Use functions, not objects.") from error
    if start is not None and start.base is not None:
        made = pretrained(made, start.base, start.base_digest)
    if "lora" not in table:
        return made
    adapt = dual_lora if "mix" in table["lora"] else lora
    return call(adapt, table["lora"], "model.lora", ("model",), model=made)


def _merged(config: Config, name: str, entry: AlgorithmSection) -> AlgorithmSection:
    """Add the shared options that a recipe accepts to its entry."""
    table = recipe_table(name, entry)
    parameters = RECIPES.parameters(table, f"algorithms.{name}")
    check_names("local", config.local, ["lr", *_LOCAL])
    given = entry.options.keys() & {*LENGTHS}  # each replaces all
    shared = {key: item for key, item in config.local.items() if not (given and key in LENGTHS)}
    has_own = "lr" in parameters and parameters["lr"].default is not inspect.Parameter.empty
    if has_own and table["kind"] != "import":
        shared.pop("lr", None)  # ARUBA learns its step sizes
    return dataclasses.replace(entry, options={**shared, **entry.options})


def recipe_table(name: str, entry: AlgorithmSection) -> dict[str, Any]:
    """Return the table of a recipe, a registered name or an import, with the options of its entry."""
    where = f"algorithms.{name}"
    if isinstance(entry.recipe, str):
        check_names(where, [entry.recipe], RECIPES.kinds, "recipe")
        return {"kind": entry.recipe}
    check_names(f"{where}.recipe", entry.recipe, ["kind", "path"])
    return entry.recipe


def _with_baselines(config: Config, entries: dict[str, AlgorithmSection]) -> dict[str, AlgorithmSection]:
    """Add local training and FedAvg's global model to the entries if they are missing."""
    made = {name: with_scores(name, entry) for name, entry in entries.items()}
    has = lambda stands_for: any(
        stands_for(_algorithm(name, entry), str(score.get("model", Scoring.model)))
        for name, entry in made.items()
        for score in entry.scores.values()
    )
    taken = {*made, *(score for entry in made.values() for score in entry.scores)}
    options = _shared_or_first(config, list(made.values()))
    for name, recipe, model, stands_for in (
        ("Local", "local_only", "personal", is_local_baseline),
        ("FedAvg", "fedavg", "global", is_global_baseline),
    ):
        if not has(stands_for):
            if "lr" not in options:
                raise ConfigError(f"The comparison needs `{recipe}`, which has no `lr`. Set `local.lr`.")
            numbered = (f"{name} (baseline {i})" for i in range(2, len(taken) + 2))
            free = next(n for n in (name, f"{name} (baseline)", *numbered) if n not in taken)
            made[free] = AlgorithmSection(recipe, options, {free: {"model": model}})
    return made


def _shared_or_first(config: Config, entries: list[AlgorithmSection]) -> dict[str, Any]:
    """Return the baselines' local options: the shared ones, or those of the first algorithm with a step size."""
    first = next((entry.options for entry in entries if "lr" in entry.options), {})
    settled = (*config.local, "query_share", "phases", *(LENGTHS if config.local.keys() & {*LENGTHS} else ()))
    return {**{key: first[key] for key in ("lr", *_LOCAL) if key in first and key not in settled}, **config.local}


def with_scores(name: str, entry: AlgorithmSection) -> AlgorithmSection:
    """Give an entry its objective's default score if it has none."""
    if entry.scores:
        return entry
    return dataclasses.replace(entry, scores={name: _algorithm(name, entry).default_scoring()})


def implies_scores(name: str, entry: AlgorithmSection) -> bool:
    """Return True if an entry has no scores, so that its objective's default score applies."""
    return entry == with_scores(name, dataclasses.replace(entry, scores={}))


def make_training(name: str, entry: AlgorithmSection) -> Training:
    """Make an algorithm and its scorings from an entry with at least one score."""
    scorings = {
        score: call(Scoring, table, f"algorithms.{name}.scores.{score}") for score, table in entry.scores.items()
    }
    recipe = recipe_table(name, entry)
    return Training(name, recipe.get("path", recipe["kind"]), _algorithm(name, entry), scorings)


def _algorithm(name: str, entry: AlgorithmSection) -> Algorithm:
    where, table = f"algorithms.{name}", recipe_table(name, entry)
    options, sharing = dict(entry.options), None
    if "sharing" in options and "sharing" not in RECIPES.parameters(table, where):  # of any recipe
        sharing = construct(Sharing, options.pop("sharing"), f"{where}.sharing")
    made = RECIPES.build(RECIPES.kind_of(table, where), options, where)
    if not isinstance(made, Algorithm):
        raise ConfigError(f"`{where}` must be a recipe for an Algorithm (got {type(made).__name__}).")
    if sharing is not None and made.sharing.divides:
        raise ConfigError(f"`{where}.sharing`: this recipe divides the model itself. Leave it out.")
    return made if sharing is None else dataclasses.replace(made, sharing=sharing)


_LOCAL = [field.name for field in dataclasses.fields(Local) if field.name != "lr"]
