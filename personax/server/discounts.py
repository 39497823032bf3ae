"""Factors that reduce the weight of a stale update."""

from typing import Protocol

import jax.numpy as jnp

from personax.typing import Array, Scalar
from personax.values import DISCOUNTS, require_nonnegative, require_positive, value


@DISCOUNTS.describes
class Discount(Protocol):
    """A factor for an update that is `staleness` server versions old; 1 for a fresh one."""

    def __call__(self, staleness: Array) -> Scalar: ...


@DISCOUNTS.register()
@value
class Constant:
    """No discount, a factor of 1: PersA-FL Algorithm 1."""

    def __call__(self, staleness: Array) -> Scalar:
        return jnp.ones_like(staleness, dtype=float)


@DISCOUNTS.register()
@value
class Polynomial:
    """A polynomial discount, `(1 + s)^-power`: FedAsync (Xie 2019, section 5.2).

    Power 1/2 is FedBuff's `1 / sqrt(1 + s)`.
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        require_nonnegative("power", self.power)

    def __call__(self, staleness: Array) -> Scalar:
        return (1.0 + staleness) ** -self.power


@DISCOUNTS.register()
@value
class Hinge:
    """A hinge: 1 up to staleness `start`, then `1 / (slope (s - start) + 1)`: FedAsync (Xie 2019, section 5.2)."""

    slope: float
    start: float

    def __post_init__(self) -> None:
        require_positive("slope", self.slope)
        require_nonnegative("start", self.start)

    def __call__(self, staleness: Array) -> Scalar:
        return 1.0 / (self.slope * jnp.maximum(staleness - self.start, 0.0) + 1.0)
