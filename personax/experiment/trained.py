"""Trained models: a network, its parameters and the schema of its samples, for predictions and export."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from personax.data.datasets.inputs import read_inputs
from personax.data.schema import Notify, Schema
from personax.experiment.checkpoint import write_atomically
from personax.models.tasks import inputs_of
from personax.typing import Apply, Array, Model, Params
from personax.values import optional_import

_SLICE = 1 << 13  # samples to compute at once
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
CALL = (
    "from jax import export; export.deserialize(pathlib.Path({name!r}).read_bytes()).call(x), where x has one row per "
    "sample, in the original units of the data: the function includes the standardization."
)


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """A trained model, as returned by `px.load`.

    Args:
        network: the network.
        params: its parameters.
        schema: the schema of a sample: columns in order, classes, and standardization.
        title: a description of the algorithm and the owner of the model.
        words: a description of how the model was made.
        is_personal: True for a client's own model; exported files are then readable only by their owner.

    `x` always has samples in the original units of the data: an array with samples along its first axis, a pandas or
    Polars data frame, an Arrow table, or the path of a .csv, .parquet or .npz file. Columns are matched by name and
    standardized like the training data.

    >>> import jax.numpy as jnp, numpy as np, personax as px
    >>> schema = px.Schema((2,), "float32", features=("sleep", "steps"), classes=("rested", "tired"))
    >>> params = {"dense_0": {"kernel": jnp.array([[1.0, -1.0], [0.0, 0.0]]), "bias": jnp.zeros(2)}}
    >>> model = px.TrainedModel(px.logistic_regression(2), params, schema)
    >>> model.predict(np.array([[2.0, 0.0], [-3.0, 0.0]])).tolist()
    ['rested', 'tired']
    """

    network: Model
    params: Params
    schema: Schema
    title: str = "model"
    words: str = ""
    is_personal: bool = False

    @property
    def classes(self) -> np.ndarray:
        """Return the class names in the order of the outputs: integers if all of them are, otherwise strings."""
        names = self.schema.classes
        is_number = [name.isascii() and name.removeprefix("-").isdigit() and str(int(name)) == name for name in names]
        return np.array([int(name) for name in names] if all(is_number) else names)

    def predict(self, x: Any, *, notify: Notify = lambda text: None) -> np.ndarray:
        """Return the class name of each sample, or regression targets in their original units.

        Classes that are integers in the data are integers here. `notify` is called with the names of ignored columns.
        """
        outputs = self.outputs(x, notify=notify)
        return self.classes[outputs.argmax(axis=-1)] if self.schema.classes else self._targets(outputs)

    def probabilities(self, x: Any, *, notify: Notify = lambda text: None) -> np.ndarray:
        """Return the probability of each class, in the order of `classes`, for each sample."""
        if not self.schema.classes:
            raise ValueError("A regression has no class probabilities. Use `predict`.")
        return np.asarray(jax.nn.softmax(jnp.asarray(self.outputs(x, notify=notify))))

    def outputs(self, x: Any, *, notify: Notify = lambda text: None) -> np.ndarray:
        """Return the network's outputs for each sample: one number per class, or standardized targets."""
        rows = read_inputs(x, self.schema, notify)
        compute = lambda begin: _outputs(self.network.apply, self.params, rows[begin : begin + _SLICE])
        return np.concatenate([np.asarray(compute(begin)) for begin in range(0, len(rows), _SLICE)])

    def export(self, path: Path | str, *, num_samples: int | None = None, platforms: Sequence[str] = PLATFORMS) -> Path:
        """Write the model as StableHLO, which `jax.export.deserialize` can read without personax, and return its path.

        The function takes samples in the original units, `num_samples` of them or by default any number, and returns
        class probabilities or targets in their original units. `<path>.json` describes both: the order of the columns,
        their type, and the order of the classes.
        """
        optional_import("flatbuffers", "`export`", "export")
        from jax import export

        schema = self.schema
        num = "samples" if num_samples is None else num_samples
        shape = export.symbolic_shape(", ".join(map(str, [num, *schema.shape])))
        given = schema.dtype if schema.feature_scaling is None else "float32"
        samples = jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(given))
        try:
            found = export.export(jax.jit(self._whole), platforms=tuple(platforms))(samples)
        except Exception as error:  # errors of a user's network can be of any type
            many = "any number of" if num_samples is None else num_samples
            remedy = "Give `num_samples`, or fewer `platforms`."
            raise ValueError(f"The network cannot be exported for {many} samples. {remedy} {error}") from error
        place = Path(path)
        write_atomically(place, bytes(found.serialize()), private=self.is_personal)
        about = {
            "title": self.title,
            "call": CALL.format(name=place.name),
            "shape": [num, *schema.shape],
            "dtype": str(samples.dtype),
            "features": schema.features,
            "result": "the probability of each class" if schema.classes else "the targets in their original units",
            "classes": self.classes.tolist(),
            "jax": jax.__version__,
        }
        write_atomically(place.with_name(f"{place.name}.json"), json.dumps(about, indent=1).encode())
        return place

    def _whole(self, x: Array) -> Array:
        """Map samples in their original units to probabilities or targets."""
        scaling = self.schema.feature_scaling
        if scaling is not None:
            mean, deviation = (_row(part, self.schema.shape, x) for part in (scaling.mean, scaling.deviation))
            x = (x - mean) / deviation
        outputs = _outputs(self.network.apply, self.params, x)
        return jax.nn.softmax(outputs) if self.schema.classes else self._targets(outputs)

    def _targets(self, outputs: Any) -> Any:
        """The targets of a regression in their original units."""
        targets = outputs.reshape(outputs.shape[0], *self.schema.target_shape)
        scaling = self.schema.target_scaling
        if scaling is None:
            return targets
        mean, deviation = (_row(part, self.schema.target_shape, outputs) for part in (scaling.mean, scaling.deviation))
        return targets * deviation + mean

    def __repr__(self) -> str:
        return f"<TrainedModel: {self.title}; {self.schema.look}>"


def _row(numbers: Sequence[float], shape: tuple[int, ...], like: Any) -> np.ndarray:
    """Return the numbers of one sample as an array for computing with samples of this type."""
    return np.asarray(numbers, like.dtype).reshape(1, *shape)


@partial(jax.jit, static_argnums=0)
def _outputs(apply: Apply, params: Params, x: Array) -> Array:
    return apply(params, inputs_of(params, x))
