"""Lower bounds on the work of a round: operations of matrix products, and bytes of memory traffic.

Operations are those of the gradients in a local step, counted in the traced gradient of the plain loss; a
Hessian-vector product counts as two gradients. If gradients share products with the first kernel (`fast/near.py`), the
shared products and those between batches count, but not the small products that replace the others. A convolution
counts as the matrix products that compute it, including the zeros in windows (`convolution.py`). Bytes are those that
no cache can avoid: every batch is read once, and every member of a cohort reads and writes its model and its personal
model once per round.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from personax.bench.ours import SEQUENCES, make_task
from personax.bench.setting import BenchSetting
from personax.fast.flops import operations_of
from personax.fast.near import saves, shared_product
from personax.fast.passes import optimized
from personax.models.tasks import as_inputs
from personax.typing import Batch

GRADIENTS = {"fedavg": 1, "first_order": 2, "hessian_free": 4, "exact": 4, "apfl": 2}  # per local step
# Per local step with shared products: products with the first kernel, and products of one batch with another.
SHARED = {"first_order": (3, 1), "hessian_free": (5, 3), "exact": (5, 2), "moreau": (2, 1)}
BATCHES = {"first_order": 2, "hessian_free": 3, "exact": 3}  # per local step, if not one
MODELS = {"apfl": 2, "moreau": 2}  # per client, if not one


class Floor(NamedTuple):
    """The operations and bytes of one round or event."""

    operations: float
    bytes: float


def floor_of(setting: BenchSetting) -> Floor:
    """Compute the least work of one round of all clients and seeds."""
    task = optimized(make_task(setting))
    loss = task.loss
    dtype = jnp.int32 if setting.network in SEQUENCES else jnp.uint8
    x = jnp.zeros((setting.batch_size, *setting.input_shape), dtype)
    y, weight = jnp.zeros(setting.batch_size, int), jnp.ones(setting.batch_size)
    batch = Batch(x, y, weight, jax.random.key(0))
    params = jax.eval_shape(task.model.init, batch.key, as_inputs(x))
    traced = jax.make_jaxpr(jax.grad(loss))(params, batch)
    num_gradients = GRADIENTS.get(setting.algorithm, setting.num_prox_steps)
    operations = num_gradients * operations_of(traced.jaxpr)
    num_batches = BATCHES.get(setting.algorithm, 1)
    is_shared = setting.algorithm in SHARED and (setting.algorithm != "moreau" or num_gradients > 2)
    product = shared_product(loss, params, batch) if is_shared else None
    if product is not None and saves(product, num_batches * setting.batch_size):
        num_products, num_inner = SHARED[setting.algorithm]
        num_inputs, num_outputs = product.shape
        columns = (num_products - 2 * num_gradients) * num_outputs + num_inner * setting.batch_size
        operations += 2 * setting.batch_size * num_inputs * columns
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    steps = setting.steps_per_round
    batches = steps * num_batches * (x.nbytes + y.nbytes)
    models = steps // setting.num_steps * MODELS.get(setting.algorithm, 1) * 2 * num_bytes
    return Floor(float(steps * operations), float(batches + models))
