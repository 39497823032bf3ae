"""The recipe that a server sends to its clients: names and numbers of code that the clients have installed.

No code is sent. A recipe is the TOML of a configuration without its data: the model, the task, and one algorithm with
its scores. A client's owner decides which objectives are allowed and how much work and memory a visit may cost.
"""

import hashlib
import json
import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from personax.algorithms import Algorithm
from personax.data.schema import Schema
from personax.experiment.build import Training, make_training, starting_model, task_of
from personax.experiment.config import (
    Config,
    ConfigError,
    choose_algorithm,
    dump,
    imports_of,
)
from personax.experiment.names import require_title_on_the_wire
from personax.live.messages import Layout
from personax.models.tasks import as_inputs
from personax.sharing import fingerprint
from personax.simulation.checks import check_statistics
from personax.simulation.engine import first_params
from personax.typing import Extra, Params, Task

OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "yogi", "lion", "nadam", "adabelief", "noisy_sgd")


@dataclass(frozen=True, eq=False)
class Recipe:
    """One algorithm with everything on which server and clients must agree."""

    config: Config  # one algorithm, resolved
    schema: Schema  # the schema of a sample, which the server knows without any data
    fits_scaling: bool = False  # True while the server waits for the clients' moments and nothing is trained

    @cached_property
    def training(self) -> Training:
        """The algorithm and its scorings."""
        ((name, entry),) = self.config.algorithms.items()
        return make_training(name, entry)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm to run."""
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
        """The model before training, as in the simulator. It depends on the shape of a sample and on the base file, if
        any.
        """
        x = jnp.zeros((1, *self.schema.shape), self.schema.dtype)
        return first_params(starting_model(self.config, self.schema), x, self.key)

    @cached_property
    def unshared(self) -> Params:
        """The parameters that are never sent: the frozen ones and the initial values of each client's personal part."""
        sharing = self.algorithm.sharing
        return sharing.rest(self.initial_params()) if sharing.divides else None

    @cached_property
    def unshared_fingerprint(self) -> str:
        """The fingerprint of the parameters that never travel; "" if all are shared."""
        return fingerprint(self.unshared)

    @cached_property
    def whole_shape(self) -> Params:
        """The shapes and types of all parameters."""
        x = jax.ShapeDtypeStruct((1, *self.schema.shape), jnp.dtype(self.schema.dtype))
        return jax.eval_shape(lambda x: self.task.model.init(jax.random.key(0), as_inputs(x)), x)

    @cached_property
    def params_shape(self) -> Params:
        """The shapes and types of the shared parameters, which are the ones that are sent."""
        self.algorithm.require_model(self.whole_shape)
        return self.algorithm.sharing.shared(self.whole_shape)

    @cached_property
    def extra_shape(self) -> Extra:
        """The shapes and types of the extra that a client uploads beside its delta."""
        return jax.eval_shape(self.algorithm.divided.first_extra, self.whole_shape)

    @cached_property
    def down(self) -> Layout:
        """The layout of downloads: the model and the shared state broadcast beside it."""
        shared = jax.eval_shape(self.algorithm.divided.init_shared, self.whole_shape)
        return Layout.of({"params": self.params_shape, "shared": shared})

    @cached_property
    def up(self) -> Layout:
        """The layout of uploads: the delta, or the model if the server mixes models, and the extra. Nothing else."""
        return Layout.of({self.uploads: self.params_shape, "extra": self.extra_shape})

    @property
    def uploads(self) -> str:
        """The name of the uploaded parameters: "delta" or "end"."""
        return "delta" if self.algorithm.server.applies == "deltas" else "end"

    @property
    def counts_samples(self) -> bool:
        """True if the server must know each client's number of samples."""
        return self.algorithm.server.weighting == "samples"

    @cached_property
    def digest(self) -> str:
        """A hash of the schema. A client sends it to state which schema its data conform to."""
        return hashlib.sha256(json.dumps(self.schema.to_dict(), sort_keys=True).encode()).hexdigest()[:32]

    def to_text(self) -> str:
        """The recipe as sent."""
        return self._text

    def layout_text(self) -> str:
        """Both layouts as sent."""
        return json.dumps({"down": self.down.describe(), "up": self.up.describe()})

    @cached_property
    def _text(self) -> str:
        table = tomllib.loads(dump(self.config))
        kept = {name: table[name] for name in ("name", "seeds", "model", "task", "algorithms")}
        kept["model"].pop("base", None)  # each client has its own copy of the file
        about = {"config": kept, "schema": self.schema.to_dict(), "fits_scaling": self.fits_scaling}
        return json.dumps({**about, "unshared": self.unshared_fingerprint})


def optimizers_in(item: Any) -> list[Any]:
    """The names of all optimizers in a table."""
    if isinstance(item, list):
        return [name for entry in item for name in optimizers_in(entry)]
    if not isinstance(item, dict):
        return []
    found = [name for entry in item.values() for name in optimizers_in(entry)]
    if item.get("kind") == "Optimizer":
        found.append(item.get("name", "sgd"))
    if isinstance(item.get("optimizer"), str):
        found.append(item["optimizer"])
    return found


def check_names_on_the_wire(config: Config) -> None:
    """Require names that clients accept."""
    for name, entry in config.algorithms.items():
        for title in (name, *entry.scores):
            require_title_on_the_wire(title)


def make_recipe(config: Config, schema: Schema, fits_scaling: bool = False) -> Recipe:
    """Make the recipe to serve from a resolved configuration with one algorithm."""
    recipe = Recipe(replace(choose_algorithm(config, None), seeds=config.seed_list[:1]), schema, fits_scaling)
    check_names_on_the_wire(recipe.config)
    if config.controller is not None or any(entry.controller for entry in config.algorithms.values()):
        raise ConfigError("Controllers work in simulations only. Remove `controller` from the configuration.")
    if any(entry.schedule for entry in config.algorithms.values()):
        raise ConfigError("Schedules of single algorithms work in simulations only. Use `[schedule]` and `[live]`.")
    if not recipe.algorithm.objective.federated:
        name = recipe.training.name
        raise ConfigError(f"`{name}` shares nothing, so there is nothing to serve. Choose another with --algorithm.")
    x = jax.ShapeDtypeStruct((1, *schema.shape), jnp.dtype(schema.dtype))
    check_statistics(recipe.algorithm, recipe.task, x, jax.ShapeDtypeStruct((1,), jnp.int32))
    if imports_of(config):
        return recipe
    for name in optimizers_in(tomllib.loads(dump(config))["algorithms"]):
        if name not in OPTIMIZERS:
            raise ConfigError(
                f"The optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}. Choose one of them."
            )
    return recipe
