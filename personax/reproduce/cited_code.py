"""The network, loss and initialization of the public code that Fallah 2020 cites as [45], whole and in parts.

The paper states hidden layers of 80 and 60 units with ELU, and that its code is partly adopted from [45]. Public copies
of [45] also apply ELU to the output layer, use the loss `1/2 |o - onehot|^2`, and draw kernels from N(0, 2 / n_in) and
biases from N(0, 1).
"""

import functools
import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from personax.curvature import finite_difference, norm_unused
from personax.models import mlp
from personax.models.tasks import classification, inputs_of
from personax.typing import Array, Batch, LossFn, Metrics, Model, Params, Scalar, Task
from personax.values import Static, value

WIDTHS, NUM_CLASSES = (80, 60), 10


@functools.cache
def network(
    init: Literal["cited", "glorot", "fan_in"] = "cited", output: Literal["elu", "linear"] = "elu", elu: float = 1.0
) -> Model:
    """Return the network of [45] or a part of it; `elu` is the c in `c (exp(x) - 1)`, 0.2 in some copies."""
    base = mlp(WIDTHS, num_outputs=NUM_CLASSES, activation="elu", init="glorot" if init == "cited" else init)

    def start(key: Array, x: Array) -> Params:
        sizes = (math.prod(x.shape[1:]), *WIDTHS, NUM_CLASSES)
        params = {}
        for i, (num_in, num_out) in enumerate(itertools.pairwise(sizes)):
            kernel_key, bias_key = jax.random.split(jax.random.fold_in(key, i))
            kernel = math.sqrt(2 / num_in) * jax.random.normal(kernel_key, (num_in, num_out))
            params[f"dense_{i}"] = {"kernel": kernel, "bias": jax.random.normal(bias_key, (num_out,))}
        return params

    def apply(params: Params, x: Array, key: Array | None = None, /) -> Array:
        del key
        act = lambda x: jnp.where(x > 0, x, elu * jnp.expm1(jnp.minimum(x, 0)))
        x = x.reshape(len(x), -1)
        for i in range(len(WIDTHS) + 1):
            layer = params[f"dense_{i}"]
            x = (act(x) if i else x.astype(layer["kernel"].dtype)) @ layer["kernel"] + layer["bias"][None, :]
        return act(x) if output == "elu" else x

    return Model(start if init == "cited" else base.init, apply)


@functools.cache
def squared_error(model: Model) -> Task:
    """Return the task whose loss is half the squared distance to the one-hot label, averaged over the batch."""
    plain = classification(model)

    def loss(params: Params, batch: Batch) -> Scalar:
        outputs = model.apply(params, inputs_of(params, batch.x), batch.key)
        far = 0.5 * jnp.square(outputs - jax.nn.one_hot(batch.y, NUM_CLASSES, dtype=outputs.dtype)).sum(axis=-1)
        weight = batch.weight.astype(far.dtype)
        return jnp.sum(weight * far) / jnp.maximum(jnp.sum(weight), jnp.finfo(far.dtype).tiny)

    def metrics(params: Params, batch: Batch) -> Metrics:
        return {"loss": jnp.asarray(loss(params, batch)), "accuracy": plain.metrics(params, batch)["accuracy"]}

    return Task(model, loss, metrics, plain.check)


@value
class WithoutTwo:
    """The difference as printed in section 5, `[g(w + r v) - g(w - r v)] / r`: twice the Hessian-vector product."""

    radius: Static[float]
    needs_batch = True
    is_coordinate_free = True
    given_norm = norm_unused

    def __call__(self, loss: LossFn, params: Params, vector: Params, batch: Batch) -> Params:
        return jax.tree.map(lambda leaf: 2 * leaf, finite_difference(self.radius)(loss, params, vector, batch))
