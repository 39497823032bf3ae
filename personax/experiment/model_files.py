"""Model files: parameters in safetensors, with metadata that explains how to read them."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from personax.data.schema import Schema
from personax.experiment import checkpoint
from personax.experiment.build import make_network
from personax.experiment.config import Config
from personax.experiment.trained import TrainedModel
from personax.models.tasks import as_inputs
from personax.typing import Model, Params, Shared
from personax.values import ConfigError, imports_in

HOW_TO_READ = (
    "With personax: `personax predict FILE --data new.csv`, or in Python `px.load(FILE).predict(x)`. Without: read the "
    "arrays with any safetensors library. `network` (JSON) has the kind and the sizes of the network, `schema` (JSON) "
    "describes a sample. Its `features` are the columns in order; `feature_scaling`, unless null, has the mean and "
    "deviation of each: the input is (x - mean) / deviation. Bytes (dtype uint8) are divided by 255. The index of the "
    "largest output selects the name in `classes`. Without classes, the outputs are the targets, multiplied by the "
    "deviation of `target_scaling` plus its mean unless it is null. docs/models.md of personax has an example."
)
_NEEDED = ("schema", "network")


def describe_model(config: Config, schema: Schema, algorithm: str) -> dict[str, str]:
    """Return the metadata that makes a model file self-contained."""
    return {
        "personax": version("personax"),
        "algorithm": algorithm,
        "network": json.dumps(config.model.table),
        "schema": json.dumps(schema.to_dict()),
        "how_to_read": HOW_TO_READ,
    }


def write_shared(path: Path, about: dict[str, str], params: Params, shared: Shared) -> None:
    """Write a shared model and the server's shared state, under the names `params...` and `shared...`."""
    params, shared = jax.tree.map(np.asarray, (params, shared))
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(shared))}
    checkpoint.export(path, {"params": params, "shared": leaves}, {**about, "model": "shared"})


def write_personal(path: Path, about: dict[str, str], params: Params) -> None:
    """Write one client's own model, readable only by the owner of the file."""
    checkpoint.export(path, params, {**about, "model": "personal"}, private=True)


def read_trained(path: Path, *, allow_imports: bool = False) -> TrainedModel:
    """Read a model file. If its network is imported, it is code and requires `allow_imports`."""
    tree, about = checkpoint.read_model(path)
    missing = [name for name in _NEEDED if name not in about]
    if missing:
        raise ValueError(
            f"Missing {missing[0]} in {path}: it was written by an older version of personax or by another program. "
            "Export it again, or give the run folder instead."
        )
    try:
        table, schema = json.loads(about["network"]), Schema.from_dict(json.loads(about["schema"]))
    except ValueError as error:
        raise ValueError(f"Invalid metadata in {path}: {error} Export the file again.") from None
    if (paths := imports_in(table)) and not allow_imports:
        raise ConfigError(
            f"Reading {path} imports and runs {', '.join(paths)}, which makes its network. If you trust that code, "
            "use `allow_imports=True` (--allow-imports)."
        )
    if untrained := json.loads(about.get("untrained", "[]")):
        raise ConfigError(
            f"{path} is not a complete model: {', '.join(untrained)} is personal and still has its initial value. Use "
            "`personax personalize` to train it for a new client, or load the model of one of the run's clients."
        )
    network = make_network(table, schema.num_outputs)
    params = restore(network, tree["params"] if about.get("model") == "shared" else tree, schema)
    kind, words = about.get("model", "personal"), about.get("scoring", "").split(";")[0]
    title = f"{about.get('algorithm', 'unknown')}, {kind} model"
    return TrainedModel(network, params, schema, title, words, is_personal=kind == "personal")


def restore(network: Model, tree: Any, schema: Schema) -> Params:
    """Convert parameters that were read to the structure of the network."""
    x = jnp.zeros((1, *schema.shape), schema.dtype)
    shapes = jax.eval_shape(lambda: network.init(jax.random.key(0), as_inputs(x)))
    return checkpoint.in_structure_of(shapes, tree)
