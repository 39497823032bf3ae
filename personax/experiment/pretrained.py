"""Networks that are initialized from a safetensors file."""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
from jax import Array

from personax.experiment.tensors import leaves_by_name, read_header, read_tensors
from personax.sharing import dotted
from personax.typing import Model, Params
from personax.values import ConfigError


def pretrained(model: Model, path: str | Path, digest: str | None = None) -> Model:
    """Initialize a network from the parameters of a safetensors file instead of at random.

    The file has an array for each parameter of the network, with its name and shape, such as `dense_0.kernel`; a model
    file of a run folder works. Values are converted to the dtypes of the network's own parameters. The file is read
    when a run begins, so that no copy of it stays in memory.

    Args:
        model: the network.
        path: the file.
        digest: the expected SHA-256 of the file in hexadecimal digits.

    >>> import jax, numpy as np, personax as px, safetensors.numpy, tempfile
    >>> path = tempfile.mkdtemp() + "/base.safetensors"
    >>> safetensors.numpy.save_file({"dense_0.kernel": np.eye(2), "dense_0.bias": np.ones(2)}, path)
    >>> model = px.lora(px.pretrained(px.mlp((), 2), path), rank=1)
    >>> model.init(jax.random.key(0), jax.numpy.zeros((1, 2)))["base"]["dense_0"]["kernel"].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    found = digest_of(path)
    if digest is not None and digest != found:
        raise ConfigError(
            f"{path} is not the base of this model: its SHA-256 is {found}, not {digest}. Restore the file."
        )
    return _pretrained(model, Path(path).absolute(), found)


def digest_of(path: str | Path) -> str:
    """Return the SHA-256 of a base file in hexadecimal digits."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ConfigError(f"File not found: {path}. It has the initial parameters of the model.") from None


@functools.cache
def _pretrained(model: Model, path: Path, digest: str) -> Model:
    def init(key: Array, x: Array) -> Params:
        shapes = jax.eval_shape(model.init, key, x)
        names = _places(path, leaves_by_name(shapes, dotted))
        # Use a callback, because a constant of the compiled program would stay in memory.
        read = lambda: _read(path, digest, names)
        return jax.tree.unflatten(jax.tree.structure(shapes), jax.pure_callback(read, tuple(names.values())))

    return model._replace(init=init)


def _read(path: Path, digest: str, names: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ConfigError(f"{path} has changed since this model was created. Restore the file, or recreate the model.")
    arrays = read_tensors(content)
    return tuple(np.asarray(arrays[name], shape.dtype) for name, shape in names.items())


def _places(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's parameters by their names in a file, which must have exactly these."""
    try:
        found, about = read_header(path)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}. Write it again.") from None
    before = "params." if about.get("model") == "shared" else ""
    given = {name.removeprefix(before): shape for name, shape in found.items() if name.startswith(before)}
    wrong = {
        "missing": [name for name in wanted if name not in given],
        "unexpected": [name for name in given if name not in wanted],
        "with a different shape": [
            f"{name} ({list(given[name])} in the file, {list(leaf.shape)} in the model)"
            for name, leaf in wanted.items()
            if name in given and given[name] != leaf.shape
        ],
    }
    if any(wrong.values()):
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in wrong.items() if names)
        raise ConfigError(
            f"The parameters in {path} do not match the model. {listed[0].upper()}{listed[1:]}. Configure the "
            "network that the file was written from."
        )
    return {before + name: leaf for name, leaf in wanted.items()}
