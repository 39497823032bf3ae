"""How a Hessian is applied: `(loss, params, vector, batch) -> H(w) v`.

`needs_batch` says whether a product looks at data at all; objectives draw no curvature batches when it does not.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
import optax

from personax.typing import Batch, LossFn, Params, Scalar
from personax.values import require_positive, value


class Hvp(Protocol):
    """A Hessian-vector product, exact or approximate."""

    @property
    def needs_batch(self) -> bool: ...

    def __call__(self, loss: LossFn, params: Params, vector: Params, batch: Batch) -> Params: ...


@value
class Exact:
    """The exact product, as the directional derivative of the gradient: no Hessian is formed.

    Fallah (5), gMeta (8). Departures from the paper: none.
    """

    needs_batch = True

    def __call__(self, loss: LossFn, params: Params, vector: Params, batch: Batch) -> Params:
        return jax.jvp(lambda w: jax.grad(loss)(w, batch), (params,), (vector,))[1]


@value
class FirstOrder:
    """Zero: the Hessian is dropped. Fallah (112), gMeta (31). Departures from the paper: none."""

    needs_batch = False

    def __call__(self, loss: LossFn, params: Params, vector: Params, batch: Batch) -> Params:
        return optax.tree.zeros_like(vector)


@value
class FiniteDifference:
    """`[g(w + r v) - g(w - r v)] / 2r` with a fixed radius r: Fallah (119), gMeta (34).

    Departures from the paper: none from these equations. Fallah section 5 and PersA-FL (D1) print the same
    difference without the 2, which would double the Hessian.
    """

    radius: float
    needs_batch = True

    def __post_init__(self) -> None:
        require_positive("radius", self.radius, "For no curvature at all use `first_order`.")

    def __call__(self, loss: LossFn, params: Params, vector: Params, batch: Batch) -> Params:
        return _central_difference(loss, params, vector, batch, self.radius)


@value
class RelativeDifference:
    """`FiniteDifference` with the radius `r / |v|`, and zero for v = 0.

    Departures from the paper: the step `r v / |v|` has length r whatever the length of v. With the papers' fixed
    radius a short v drowns in float32 rounding, and a long one leaves the region where the difference is a
    derivative.
    """

    radius: float
    needs_batch = True

    def __post_init__(self) -> None:
        require_positive("radius", self.radius, "For no curvature at all use `first_order`.")

    def __call__(
        self, loss: LossFn, params: Params, vector: Params, batch: Batch, norm: Scalar | None = None
    ) -> Params:
        """`norm` is the vector's, where the vector is given in other coordinates."""
        norm = optax.tree.norm(vector) if norm is None else norm
        radius = jnp.where(norm > 0, self.radius / jnp.where(norm > 0, norm, 1), 1)
        return _central_difference(loss, params, vector, batch, radius)


def _central_difference(loss: LossFn, params: Params, vector: Params, batch: Batch, radius: Scalar) -> Params:
    ends = [jax.tree.map(lambda w, v, r=r: w + r * v, params, vector) for r in (radius, -radius)]
    ahead, behind = (jax.grad(loss)(end, batch) for end in ends)
    return jax.tree.map(lambda a, b: (a - b) / (2 * radius), ahead, behind)


exact = Exact()
first_order = FirstOrder()
# Linear in the vector but for its norm, so that they may be told it in other coordinates.
KNOWN = (Exact, FirstOrder, FiniteDifference, RelativeDifference)


def finite_difference(radius: float) -> FiniteDifference:
    """The papers' central difference with a fixed radius."""
    return FiniteDifference(radius)


def relative_difference(radius: float) -> RelativeDifference:
    """The central difference with a radius relative to the vector's norm; what float32 wants."""
    return RelativeDifference(radius)
