"""Model files: parameters in safetensors, with metadata that state how to read them."""

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
    "describes a sample. Its `features` are the columns in order; `feature_scaling`, unless null, is the mean and "
    "deviation of each: the input is (x - mean) / deviation. Bytes (dtype uint8) are divided by 255. The largest "
    "output is the class, named by its place in `classes`. Without classes the outputs are the targets, times the "
    "deviation of `target_scaling` plus its mean unless that is null. docs/models.md of personax has an example."
)
_NEEDED = ("schema", "network")


def describe_model(config: Config, schema: Schema, algorithm: str) -> dict[str, str]:
    """The metadata with which a model file can be read by itself."""
    return {
        "personax": version("personax"),
        "algorithm": algorithm,
        "network": json.dumps(config.model.table),
        "schema": json.dumps(schema.to_dict()),
        "how_to_read": HOW_TO_READ,
    }


def write_shared(path: Path, about: dict[str, str], params: Params, shared: Shared) -> None:
    """Write a shared model, and what the server broadcasts beside it, by the names `params...` and `shared...`."""
    params, shared = jax.tree.map(np.asarray, (params, shared))
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(shared))}
    checkpoint.export(path, {"params": params, "shared": leaves}, {**about, "model": "shared"})


def write_personal(path: Path, about: dict[str, str], params: Params) -> None:
    """Write one client's own model, which only the owner of the file may read."""
    checkpoint.export(path, params, {**about, "model": "personal"}, private=True)


def read_trained(path: Path, *, allow_imports: bool = False) -> TrainedModel:
    """Read a model file. One whose network is imported is code, and is read only with `allow_imports`."""
    tree, about = checkpoint.read_model(path)
    missing = [name for name in _NEEDED if name not in about]
    if missing:
        raise ValueError(
            f"{path} does not state its {missing[0]}: an older version of personax wrote it, or another program. Write "
            "it again, or give the run folder instead."
        )
    try:
        table, schema = json.loads(about["network"]), Schema.from_dict(json.loads(about["schema"]))
    except ValueError as error:
        raise ValueError(f"The metadata of {path} cannot be read: {error} Write the file again.") from None
    if (paths := imports_in(table)) and not allow_imports:
        raise ConfigError(
            f"To read {path} is to import and run {', '.join(paths)}, which makes its network. If you trust that code, "
            "use `allow_imports=True` (--allow-imports)."
        )
    network = make_network(table, schema.num_outputs)
    params = restore(network, tree["params"] if about.get("model") == "shared" else tree, schema)
    kind, words = about.get("model", "personal"), about.get("scoring", "").split(";")[0]
    title = f"{about.get('algorithm', 'unknown')}, {kind} model"
    return TrainedModel(network, params, schema, title, words, is_personal=kind == "personal")


def restore(network: Model, tree: Any, schema: Schema) -> Params:
    """Parameters that were read, in the structure that the network has."""
    x = jnp.zeros((1, *schema.shape), schema.dtype)
    shapes = jax.eval_shape(lambda: network.init(jax.random.key(0), as_inputs(x)))
    return checkpoint.in_structure_of(shapes, tree)
