"""Optax optimizers as values, for clients and for the server."""

from collections.abc import Callable
from typing import Any

import optax

from personax.typing import Scalar
from personax.values import Static, value


@value
class Optimizer:
    """An optax optimizer by name, or any function `make(learning_rate, **options)` that returns one.

    The step size is not part of it: it belongs to `Local` or `Server`, where it may follow a clock.

    >>> optimizer("adam", b1=0.8)
    Optimizer(name='adam', options=(('b1', 0.8),))
    """

    name: Static[str | Callable[..., optax.GradientTransformation]] = "sgd"
    options: Static[tuple[tuple[str, Any], ...]] = ()

    def __post_init__(self) -> None:
        if isinstance(self.name, str) and not callable(getattr(optax, self.name, None)):
            raise ValueError(
                f"`name` must be an optimizer of optax, got {self.name!r}. "
                "Use one such as 'sgd' or 'adam', or pass a function that makes one from a learning rate."
            )
        try:
            self.at(0.1).init({})
        except TypeError as error:
            raise ValueError(f"`{self.name}` does not take these options: {dict(self.options)}: {error}.") from error

    def at(self, lr: Scalar) -> optax.GradientTransformationExtraArgs:
        """The optimizer with this step size. Optimizer states do not depend on it."""
        make = getattr(optax, self.name) if isinstance(self.name, str) else self.name
        return optax.with_extra_args_support(make(learning_rate=lr, **dict(self.options)))


def optimizer(name: str | Callable[..., optax.GradientTransformation] = "sgd", **options: Any) -> Optimizer:
    """An optax optimizer as a value: `optimizer("sgd", momentum=0.9)`."""
    return Optimizer(name, tuple(sorted(options.items())))
