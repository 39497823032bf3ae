"""Factors that reduce the weight of a stale update."""

from typing import Protocol

import jax.numpy as jnp

from personax.typing import Array, Scalar
from personax.values import DISCOUNTS, require_nonnegative, require_positive, value

__all__ = [
    "Constant",
    "Discount",
    "Hinge",
    "Polynomial",
]


@DISCOUNTS.describes
class Discount(Protocol):
    """A factor for an update that is `staleness` server versions old; 1 for a fresh one.

    >>> import jax.numpy as jnp, personax as px
    >>> @px.value
    ... class Cutoff:
    ...     limit: float
    ...     def __call__(self, staleness):
    ...         return jnp.where(staleness <= self.limit, 1.0, 0.0)
    >>> px.asynchronous(discount=Cutoff(3.0)).discount(jnp.array([2, 5])).tolist()
    [1.0, 0.0]
    """

    def __call__(self, staleness: Array) -> Scalar: ...


@DISCOUNTS.register()
@value
class Constant:
    """No discount, a factor of 1: PersA-FL Algorithm 1.

    >>> import jax.numpy as jnp, personax as px
    >>> px.discounts.Constant()(jnp.array([0, 4])).tolist()
    [1.0, 1.0]
    """

    def __call__(self, staleness: Array) -> Scalar:
        return jnp.ones_like(staleness, dtype=float)


@DISCOUNTS.register()
@value
class Polynomial:
    """A polynomial discount, `(1 + s)^-power`: FedAsync (Xie 2019, section 5.2).

    Power 1/2 is FedBuff's `1 / sqrt(1 + s)`.

    >>> import jax.numpy as jnp, personax as px
    >>> px.discounts.Polynomial(0.5)(jnp.array([0, 3])).tolist()
    [1.0, 0.5]
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        require_nonnegative("power", self.power)

    def __call__(self, staleness: Array) -> Scalar:
        return (1.0 + staleness) ** -self.power


@DISCOUNTS.register()
@value
class Hinge:
    """A hinge: 1 up to staleness `start`, then `1 / (slope (s - start) + 1)`: FedAsync (Xie 2019, section 5.2).

    >>> import jax.numpy as jnp, personax as px
    >>> px.discounts.Hinge(slope=1.0, start=2.0)(jnp.array([0, 2, 3])).tolist()
    [1.0, 1.0, 0.5]
    """

    slope: float
    start: float

    def __post_init__(self) -> None:
        require_positive("slope", self.slope)
        require_nonnegative("start", self.start)

    def __call__(self, staleness: Array) -> Scalar:
        return 1.0 / (self.slope * jnp.maximum(staleness - self.start, 0.0) + 1.0)
