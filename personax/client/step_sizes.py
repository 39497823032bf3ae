"""Step sizes that follow a clock. A plain number is a constant step size.

Two clocks: `"step"` counts all local steps, t = round * num_steps + step, and `"round"` counts rounds. The round is
the server's version that the client downloaded, so asynchronous runs read the same clock.
"""

from typing import Protocol

import jax.numpy as jnp

from personax.typing import Clock, ClockName, Scalar
from personax.values import (
    STEP_SIZES,
    Static,
    Tuned,
    require,
    require_nonnegative,
    require_one_of,
    require_positive,
    value,
)


@STEP_SIZES.describes
class StepSize(Protocol):
    """A step size as a function of the clock."""

    def __call__(self, clock: Clock) -> Scalar: ...


def step_size_at(lr: "StepSize | Scalar", clock: Clock) -> Scalar:
    """Read a step size at a time; a number is constant.

    >>> float(step_size_at(Decay(0.1, rate=0.5), Clock(1, 1, 2)))
    0.0125
    """
    return lr(clock) if callable(lr) else lr


def require_step_size(name: str, lr: "StepSize | Scalar | None", hint: str = "") -> None:
    """Require a positive number or a schedule (which has validated itself)."""
    if not callable(lr):
        require_positive(name, lr, hint)


@STEP_SIZES.register()
@value
class Decay:
    """`initial (1 - rate)^t`. APFL section 5: "at each iteration the learning rate is decreased by 1 %"."""

    initial: Tuned[float]
    rate: float
    clock: Static[ClockName] = "step"

    def __post_init__(self) -> None:
        require_positive("initial", self.initial)
        require(lambda v: (v >= 0) & (v < 1), "rate", self.rate, "lie in [0, 1)")
        require_one_of("clock", self.clock, ("step", "round"))

    def __call__(self, clock: Clock) -> Scalar:
        return self.initial * (1 - self.rate) ** clock.ticks(self.clock)


@STEP_SIZES.register()
@value
class InverseDecay:
    """`initial / (1 + rate t)`: the linear decay of Bottou 2012 that APFL section 5 names as its source."""

    initial: Tuned[float]
    rate: float
    clock: Static[ClockName] = "step"

    def __post_init__(self) -> None:
        require_positive("initial", self.initial)
        require_nonnegative("rate", self.rate)
        require_one_of("clock", self.clock, ("step", "round"))

    def __call__(self, clock: Clock) -> Scalar:
        return self.initial / (1 + self.rate * clock.ticks(self.clock))


@STEP_SIZES.register()
@value
class InverseSqrt:
    """`scale / sqrt(num_steps * k)` with k = 1, 2, ... the round: Fallah Remark G.1.

    On the clock of local steps the root is of the local steps taken, this one included.
    """

    scale: Tuned[float] = 1.0
    clock: Static[ClockName] = "round"

    def __post_init__(self) -> None:
        require_positive("scale", self.scale)
        require_one_of("clock", self.clock, ("step", "round"))

    def __call__(self, clock: Clock) -> Scalar:
        passed = clock.num_steps * (clock.round + 1) if self.clock == "round" else clock.ticks("step") + 1
        return self.scale / jnp.sqrt(1.0 * passed)


@STEP_SIZES.register()
@value
class StronglyConvex:
    """`scale / (mu (t + a))` with t = 1, 2, ... the iterate that the step makes: APFL Theorems 2 and 7.

    mu is `strong_convexity`; a is `offset`: max(128 L / mu, num_steps) in Theorem 2, and max(64 L / mu, num_steps) with
    the `scale` 8 in Theorem 7.
    """

    strong_convexity: float
    offset: float
    clock: Static[ClockName] = "step"
    scale: float = 16.0

    def __post_init__(self) -> None:
        require_positive("strong_convexity", self.strong_convexity)
        require_nonnegative("offset", self.offset)
        require_positive("scale", self.scale)
        require_one_of("clock", self.clock, ("step", "round"))

    def __call__(self, clock: Clock) -> Scalar:
        return self.scale / (self.strong_convexity * (clock.ticks(self.clock) + 1 + self.offset))
