"""Several gradients of a network with few products by the kernel of its first dense layer.

A loss that sees the inputs x of a layer only as the product x W has the gradient x' d in W, where d is its derivative
in the product. So gradient steps from W on batches x_1, x_2, ... lead to W + sum_j x_j' a_j, and there another batch x
sees x W + sum_j (x x_j') a_j. W and its gradients, the largest arrays of most such networks, are not touched in
between: the steps take place in the small a_j, with the products of inputs by inputs.

In a `Span` no layer comes before, so that inputs and their products are the same at every model. In
`UnrolledSteps` other layers may: each step recomputes the inputs.
"""

from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import optax

from personax.curvature import Hvp
from personax.fast.backends import unroll_length
from personax.typing import Array, Batch, Batches, LayeredLoss, LossFn, Params, Scalar

Name = tuple[str, int]  # of a batch: its role, and which of them
WIDE = 2**20  # numbers of a kernel that no cache holds for each of many clients


class Place(NamedTuple):
    """A model that steps from the start of a span lead to, or a vector there.

    The kernel of a vector is `sum_j x_j' along[j]`, that of a model this added to the start's.
    """

    rest: Params
    along: dict[Name, Array]

    def plus(self, scale: Scalar, vector: "Place") -> "Place":
        """`self + scale vector`, in the types of self where it has them."""
        own = {name: self.along.get(name, jnp.zeros_like(along)) for name, along in vector.along.items()}
        rest, along = jax.tree.map(lambda a, b: (a + scale * b).astype(a.dtype), (self.rest, own), tuple(vector))
        return Place(rest, self.along | along)


class Span:
    """The models that gradient steps on these batches lead to from `start`."""

    def __init__(self, loss: LayeredLoss, start: Params, batches: Batches):
        self._loss = loss
        self._kernel, self._rest = loss.layer.split(start)
        self._batches = {
            (role, index): jax.tree.map(lambda leaf, index=index: leaf[index], of_role)
            for role, of_role in batches.items()
            for index in range(len(of_role.weight))
        }
        self._rows = {name: loss.rows(self._kernel, self._rest, batch) for name, batch in self._batches.items()}
        self._products = {name: rows @ self._kernel for name, rows in self._rows.items()}
        # Under `jit` those that nothing asks for are not computed.
        self._inner = {(a, b): x @ y.T for a, x in self._rows.items() for b, y in self._rows.items()}

    def start(self, *names: Name) -> Place:
        """The model that steps are taken from, with zeros along these batches."""
        return Place(self._rest, {name: jnp.zeros_like(self._products[name]) for name in names})

    def gradient(self, at: Place, name: Name) -> Place:
        """The gradient of the loss on a batch."""
        rest, along = jax.grad(self._loss.head)(self._seen(at, name), self._batches[name])
        return Place(rest, {name: along})

    def curvature(self, hvp: Hvp, at: Place, vector: Place, name: Name) -> Place:
        """The Hessian of the loss on a batch, applied to a vector."""
        changes = vector.rest, self._change(vector, name)
        product = hvp.given_norm(self.norm(vector))
        rest, along = product(self._loss.head, self._seen(at, name), changes, self._batches[name])
        return Place(rest, {name: along.astype(self._kernel.dtype)})

    def norm(self, vector: Place) -> Array:
        """The Euclidean norm, for a radius: where rows nearly cancel each other it has half the digits of a float.

        Products of rows by rows may be in TF32, which rounds the rows alone. Their sums are not: with the products
        rounded, too, it would have half the digits of TF32.
        """
        names = tuple(vector.along)
        inner = jnp.block([[self._inner[name, other] for other in names] for name in names])
        along = jnp.concatenate([vector.along[name] for name in names])
        squared = jnp.vdot(along, jnp.matmul(inner, along, precision="highest"), precision="highest")
        return jnp.sqrt(optax.tree.norm(vector.rest, squared=True) + jnp.maximum(squared, 0))

    def vector(self, vector: Place) -> Params:
        """A vector as a tree like the parameters."""
        kernel: Any = sum(self._rows[name].T @ along for name, along in vector.along.items())
        return self._loss.layer.join(kernel, vector.rest)

    def model(self, at: Place) -> Params:
        """A model as parameters."""
        kernel = sum((self._rows[name].T @ along for name, along in at.along.items()), self._kernel)
        return self._loss.layer.join(kernel, at.rest)

    def _seen(self, at: Place, name: Name) -> tuple[Params, Array]:
        return at.rest, self._products[name] + self._change(at, name)

    def _change(self, vector: Place, name: Name) -> Any:
        """What a vector adds to the products of a batch; 0 where it has no part along the kernel."""
        return sum(self._inner[name, other] @ along for other, along in vector.along.items())


class UnrolledSteps(NamedTuple):
    """Gradient steps from a model, the last of which may be skipped. The kernel is only put together at the end."""

    loss: LayeredLoss
    kernel: Array
    rest: Params
    steps: tuple[tuple[Array, Array, Scalar], ...] = ()  # x_j, a_j, and whether the step is taken

    def step(self, lr: Scalar, batch: Batch, is_active: Scalar = True) -> "UnrolledSteps":
        """Step by `-lr` times the gradient of the loss on a batch, unless the client has finished."""

        def head(rest: Params, change: Array) -> tuple[Scalar, Array]:
            rows = self.loss.rows(self.kernel, rest, batch)
            products = sum(((rows @ other.T) @ along for other, along, _ in self.steps), rows @ self.kernel)
            return self.loss.head((rest, products + change), batch), rows

        unchanged = jnp.zeros((len(batch.weight), self.kernel.shape[1]), self.kernel.dtype)
        (slope, along), rows = jax.grad(head, argnums=(0, 1), has_aux=True)(self.rest, unchanged)
        # Selected, not multiplied by zero: a client that has finished may have numbers here that are not finite.
        moved = lambda leaf: jnp.where(is_active, -lr * leaf, 0).astype(leaf.dtype)
        rest = jax.tree.map(lambda leaf, slope: leaf + moved(slope), self.rest, slope)
        return self._replace(rest=rest, steps=(*self.steps, (rows, moved(along), is_active)))

    def end(self) -> Params:
        """The model after all steps."""
        rows = jnp.concatenate([jnp.where(is_active, rows, 0) for rows, _, is_active in self.steps])
        along = jnp.concatenate([along for _, along, _ in self.steps])
        # Without the barrier XLA adds the kernel inside of the product, which takes twice as long on a GPU.
        change = jax.lax.optimization_barrier(rows.T @ along)
        return self.loss.layer.join(self.kernel + change, self.rest)


def shares_products(loss: LossFn, params: Params, num_rows: int) -> TypeGuard[LayeredLoss]:
    """Whether gradients on batches with `num_rows` rows in total need less arithmetic in a span.

    By count they do for a meta-gradient with batches of one size, and for three gradients or more on one batch.
    """
    if not isinstance(loss, LayeredLoss) or not loss.layer.is_first:
        return False
    num_inputs, num_outputs = loss.layer.split(params)[0].shape
    return num_rows * (num_inputs + num_outputs) <= 2 * num_inputs * num_outputs


def unrolls(loss: LossFn, params: Params, num_steps: int, batch_size: int) -> TypeGuard[LayeredLoss]:
    """Whether steps move less memory if unrolled: few steps, from a kernel far larger than all their rows.

    They need somewhat more arithmetic there, and each is compiled by itself.
    """
    if not isinstance(loss, LayeredLoss) or unroll_length(num_steps) < num_steps:
        return False
    num_inputs, num_outputs = loss.layer.split(params)[0].shape
    return num_inputs * num_outputs >= WIDE and num_steps * batch_size <= num_outputs
