"""Step size schedules. A plain number is a constant step size.

There are two clocks: `"step"` counts local steps, t = round * num_steps + step, and `"round"` counts rounds. The round
is the server version that the client downloaded, so asynchronous runs use the same clock.
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

__all__ = [
    "Decay",
    "InverseDecay",
    "InverseSqrt",
    "StepSize",
    "StronglyConvex",
    "require_step_size",
    "step_size_at",
]


@STEP_SIZES.describes
class StepSize(Protocol):
    """A step size as a function of the clock.

    >>> import personax as px
    >>> @px.value
    ... class Halving:
    ...     initial: float
    ...     def __call__(self, clock):
    ...         return self.initial / 2**clock.round
    >>> px.step_sizes.step_size_at(Halving(0.4), px.Clock(round=2, step=0, num_steps=5))
    0.1
    """

    def __call__(self, clock: Clock) -> Scalar: ...


def step_size_at(lr: "StepSize | Scalar", clock: Clock) -> Scalar:
    """Evaluate a step size at a given time; a number is constant.

    >>> float(step_size_at(Decay(0.1, rate=0.5), Clock(1, 1, 2)))
    0.0125
    """
    return lr(clock) if callable(lr) else lr


def require_step_size(name: str, lr: "StepSize | Scalar | None", hint: str = "") -> None:
    """Require a positive number or a schedule, which has validated itself.

    >>> import personax as px
    >>> px.step_sizes.require_step_size("lr", px.step_sizes.Decay(0.1, rate=0.01))
    >>> px.step_sizes.require_step_size("lr", -1.0)
    Traceback (most recent call last):
        ...
    ValueError: `lr` must be positive, got -1.0.
    """
    if not callable(lr):
        require_positive(name, lr, hint)


@STEP_SIZES.register()
@value
class Decay:
    """Exponential decay, `initial (1 - rate)^t`: APFL section 5, "the learning rate is decreased by 1%" each step.

    >>> import personax as px
    >>> float(px.step_sizes.Decay(0.1, rate=0.5)(px.Clock(round=1, step=0, num_steps=2)))
    0.025
    """

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
    """Inverse decay, `initial / (1 + rate t)`: the linear decay of Bottou 2012, which APFL section 5 cites.

    >>> import personax as px
    >>> px.step_sizes.InverseDecay(0.1, rate=1.0)(px.Clock(round=0, step=1, num_steps=2))
    0.05
    """

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
    """Inverse square root decay, `scale / sqrt(num_steps * k)` in round k = 1, 2, ...: Fallah Remark G.1.

    With the `"step"` clock, the root is of the number of local steps taken, including the current one.

    >>> import personax as px
    >>> float(px.step_sizes.InverseSqrt(1.0)(px.Clock(round=3, step=0, num_steps=4)))
    0.25
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
    """The step size of APFL Theorems 2 and 7, `scale / (mu (t + a))`, for the step that produces iterate t = 1, 2, ...

    mu is `strong_convexity` and a is `offset`: max(128 L / mu, num_steps) in Theorem 2; max(64 L / mu, num_steps), with
    `scale` 8, in Theorem 7.

    >>> import personax as px
    >>> px.step_sizes.StronglyConvex(strong_convexity=0.5, offset=31)(px.Clock(round=0, step=0, num_steps=1))
    1.0
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
