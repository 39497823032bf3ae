"""What a server tells its clients to do: names and numbers of recipes that they have installed, within their limits.

No code crosses the wire. A recipe is the TOML of a configuration without its data: the model, the task, one algorithm
with its scores. A client's owner says which objectives it may run and how much work and memory one visit may cost.
"""

import contextlib
import hashlib
import json
import tomllib
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pydantic
import pydantic.dataclasses

from personax.algorithms import Algorithm
from personax.client.local import first_extra
from personax.data.schema import Schema
from personax.experiment.build import Training, make_training, task_of
from personax.experiment.config import (
    Config,
    ConfigError,
    Count,
    Flag,
    Positive,
    choose_algorithm,
    dump,
    imports_of,
    parse,
)
from personax.experiment.names import require_title_on_the_wire
from personax.live.messages import Layout
from personax.models.tasks import as_inputs
from personax.simulation.engine import first_params
from personax.typing import Extra, Params, Task
from personax.values import OBJECTIVES, check_names, imports_forbidden, imports_in, name_of

OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "yogi", "lion", "nadam", "adabelief", "noisy_sgd")
_MOST_TEXT = 1 << 20  # characters of a recipe, which names all columns and classes


class Refused(ValueError):
    """A recipe that the client's owner does not allow."""


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class Limits:
    """What a client's owner allows a server to ask for: the settings of a TOML file."""

    objectives: tuple[str, ...] | None = None  # by default all that personax has, and what `allow_imports` lets in
    max_steps: Count = 10_000  # gradients in one visit
    max_batch: Count = 4096  # samples in one batch
    max_bytes: Count = 256 << 20  # of one model, as it is sent
    max_updates: Count | None = None  # after which the client leaves
    patience: Positive = 3600.0  # seconds without the server before giving up
    allow_imports: Flag = False  # code of installed packages, by name: recipes, objectives, models, optimizers, ...
    share_moments: Flag = False  # the mean and spread of each column, from which a server fits a common scaling

    def __post_init__(self) -> None:
        check_names("objectives", (n for n in self.objectives or () if ":" not in n), OBJECTIVES.kinds, "objective")


def read_limits(path: Path) -> Limits:
    """The limits of a TOML file; a setting that it does not have is the default."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}. Repair that place.") from None
    check_names(str(path), table, (field.name for field in fields(Limits)), "limit")
    try:
        return Limits(**table)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"`{part}` is wrong: " for part in first["loc"][:1])
        raise ValueError(f"{path}: {where}{first['msg']}, got {first['input']!r:.80}.") from None


@dataclass(frozen=True, eq=False)
class Recipe:
    """One algorithm with all that server and clients must agree on."""

    config: Config  # one algorithm, resolved
    schema: Schema  # of a sample: known to the server without any data
    fits_scaling: bool = False  # the server still waits for the clients' moments, and nothing is trained

    @cached_property
    def training(self) -> Training:
        """The algorithm and how it is scored."""
        ((name, entry),) = self.config.algorithms.items()
        return make_training(name, entry)

    @property
    def algorithm(self) -> Algorithm:
        """What is run."""
        return self.training.algorithm

    @property
    def key(self) -> Any:
        """The run's key."""
        return jax.random.key(self.config.seed_list[0])

    @cached_property
    def task(self) -> Task:
        """The model and its loss."""
        return task_of(self.config, self.schema)

    def initial_params(self) -> Params:
        """The model before training: the simulator's, which depends on the shape of a sample and on no sample."""
        x = jnp.zeros((1, *self.schema.shape), self.schema.dtype)
        return first_params(self.task.model, x, self.key)

    @cached_property
    def params_shape(self) -> Params:
        """The shapes and types of the parameters."""
        x = jax.ShapeDtypeStruct((1, *self.schema.shape), jnp.dtype(self.schema.dtype))
        return jax.eval_shape(lambda x: self.task.model.init(jax.random.key(0), as_inputs(x)), x)

    @cached_property
    def extra_shape(self) -> Extra:
        """The shapes and types of what a client uploads beside its delta."""
        objective = self.algorithm.objective
        return jax.eval_shape(lambda w: first_extra(objective, w, objective.init_personal(w)), self.params_shape)

    @cached_property
    def down(self) -> Layout:
        """What clients download: the model and what the server broadcasts beside it."""
        shared = jax.eval_shape(self.algorithm.objective.init_shared, self.params_shape)
        return Layout.of({"params": self.params_shape, "shared": shared})

    @cached_property
    def up(self) -> Layout:
        """What clients upload, and all that they may: their delta, or their model where the server mixes models."""
        return Layout.of({self.uploads: self.params_shape, "extra": self.extra_shape})

    @property
    def uploads(self) -> str:
        """The name of what a client uploads."""
        return "delta" if self.algorithm.server.applies == "deltas" else "end"

    @property
    def counts_samples(self) -> bool:
        """Whether the server must know how many samples a client has."""
        return self.algorithm.server.weighting == "samples"

    @cached_property
    def digest(self) -> str:
        """A hash of the schema, by which a client says to which one its data conform."""
        return hashlib.sha256(json.dumps(self.schema.to_dict(), sort_keys=True).encode()).hexdigest()[:32]

    def to_text(self) -> str:
        """The recipe as it travels."""
        return self._text

    def layout_text(self) -> str:
        """Both layouts as they travel."""
        return json.dumps({"down": self.down.describe(), "up": self.up.describe()})

    @cached_property
    def _text(self) -> str:
        table = tomllib.loads(dump(self.config))
        kept = {name: table[name] for name in ("name", "seeds", "model", "task", "algorithms")}
        return json.dumps({"config": kept, "schema": self.schema.to_dict(), "fits_scaling": self.fits_scaling})


def read_recipe(text: str, layout: str, limits: Limits) -> Recipe:
    """The recipe that a server sent, if the client's owner allows it and this installation makes the same of it."""
    if len(text) > _MOST_TEXT:
        raise Refused(f"A recipe must have at most {_MOST_TEXT} characters, got {len(text)}. Ask who runs the server.")
    # The scan gives a clear message; the guard holds whatever a table looks like.
    with contextlib.nullcontext() if limits.allow_imports else imports_forbidden():
        return _read_recipe(text, layout, limits)


def _read_recipe(text: str, layout: str, limits: Limits) -> Recipe:
    try:
        content = json.loads(text)
        table = content["config"]
        _refuse_imports(table, limits)
        config = parse(table)
        _check_names(config)
        recipe = Recipe(config, Schema.from_dict(content["schema"]), bool(content["fits_scaling"]))
        _check_limits(recipe, limits)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"The server's recipe cannot be read: {error!s:.300}. Use the server's version of personax."
        ) from None
    agreed = json.loads(layout)
    recipe.down.require_same(agreed["down"], "The server's model")
    recipe.up.require_same(agreed["up"], "The upload")
    return recipe


def _refuse_imports(table: dict[str, Any], limits: Limits) -> None:
    """A name that would import a module is code by another way: only where the owner allows it."""
    if limits.allow_imports:
        return
    if paths := imports_in(table):
        raise Refused(
            f"The server's recipe imports {', '.join(paths)}, which this client does not allow (limit `allow_imports`)."
        )
    for name in _optimizers(table.get("algorithms", {})):
        if name not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise Refused(f"The server's optimizer must be one of {known}, got {name!r} (limit `allow_imports`).")


def _optimizers(item: Any) -> list[Any]:
    """The names of all optimizers in a table."""
    if isinstance(item, list):
        return [name for entry in item for name in _optimizers(entry)]
    if not isinstance(item, dict):
        return []
    found = [name for entry in item.values() for name in _optimizers(entry)]
    if item.get("kind") == "Optimizer":
        found.append(item.get("name", "sgd"))
    if isinstance(item.get("optimizer"), str):
        found.append(item["optimizer"])
    return found


def _check_limits(recipe: Recipe, limits: Limits) -> None:
    """Whether one visit stays within the owner's limits, whatever the client's data."""
    algorithm = recipe.algorithm
    name = name_of(algorithm.objective)
    if limits.objectives is not None and name not in limits.objectives:
        allowed = ", ".join(limits.objectives)
        raise Refused(f"The server's objective is {name}, which this client does not allow (it allows {allowed}).")
    largest = max(draw.size for draw in algorithm.local.draws(algorithm.objective))
    scorings = recipe.training.scorings.values()
    largest = max(largest, *(scoring.batch_size for scoring in scorings))
    if largest > limits.max_batch:
        raise Refused(f"The server asks for batches of {largest} samples, and this client allows {limits.max_batch}.")
    most = max(gradients(algorithm, 1), *(scoring.num_steps for scoring in scorings))
    if most > limits.max_steps:
        raise Refused(f"The server asks for {most} gradients in a visit, and this client allows {limits.max_steps}.")
    for layout in (recipe.down, recipe.up):
        if layout.num_bytes > limits.max_bytes:
            got = f"{layout.num_bytes:,} bytes"
            raise Refused(f"The server's model takes {got} to send, and this client allows {limits.max_bytes:,}.")


def gradients(algorithm: Algorithm, num_samples: int) -> int:
    """About how many gradients a visit of a client with so many samples computes."""
    return int(algorithm.local.steps_of(num_samples)) * algorithm.objective.gradients_per_step()


def require_within(recipe: Recipe, num_samples: int, limits: Limits) -> None:
    """The limit on steps once more, for a client whose visit is passes over its data."""
    most = gradients(recipe.algorithm, num_samples)
    if most > limits.max_steps:
        raise Refused(f"A visit to these data takes {most} gradients, and this client allows {limits.max_steps}.")


def _check_names(config: Config) -> None:
    """Require names that clients take."""
    for name, entry in config.algorithms.items():
        for title in (name, *entry.scores):
            require_title_on_the_wire(title)


def make_recipe(config: Config, schema: Schema, fits_scaling: bool = False) -> Recipe:
    """A recipe to serve, from a resolved configuration with one algorithm."""
    recipe = Recipe(replace(choose_algorithm(config, None), seeds=config.seed_list[:1]), schema, fits_scaling)
    _check_names(recipe.config)
    if not recipe.algorithm.objective.federated:
        name = recipe.training.name
        raise ConfigError(f"`{name}` shares nothing, so there is nothing to serve. Choose another with --algorithm.")
    if imports_of(config):
        return recipe
    for name in _optimizers(tomllib.loads(dump(config))["algorithms"]):
        if name not in OPTIMIZERS:
            raise ConfigError(f"Clients take one of the optimizers {', '.join(OPTIMIZERS)}, got {name!r}. Choose one.")
    return recipe
