"""Optax optimizers as values, for clients and for the server."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import optax

from personax.typing import Scalar
from personax.values import OPTIMIZERS, Static, require_imports_allowed, value


@OPTIMIZERS.register()
@value
class Optimizer:
    """An optax optimizer, given by name or as the import path `module:function` of a function that returns one.

    The step size is not included. It belongs to `Local` or `Server`, where it may follow a schedule.

    >>> optimizer("adam", b1=0.8)
    Optimizer(name='adam', options=(('b1', 0.8),))
    """

    name: Static[str] = "sgd"
    options: Static[tuple[tuple[str, Any], ...]] = ()

    def __post_init__(self) -> None:
        try:
            hash(self.options)
            self.at(0.1).init({})
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            raise ValueError(
                f"No optimizer can be made from name {self.name!r} and options {dict(self.options)}: {error}. "
                "Use an optax name such as 'sgd' or 'adam', or an importable function of a learning rate."
            ) from error

    @property
    def is_plain(self) -> bool:
        """True if its update is minus the step size times the direction."""
        return (self.name, self.options) == ("sgd", ())

    def at(self, lr: Scalar) -> optax.GradientTransformationExtraArgs:
        """Return the optax optimizer with this step size. Its state does not depend on the step size."""
        module, _, name = self.name.rpartition(":")
        if module:
            require_imports_allowed(self.name)
        make: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module or "optax"))
        return optax.with_extra_args_support(make(learning_rate=lr, **dict(self.options)))


def optimizer(make: str | Callable[..., optax.GradientTransformation] = "sgd", **options: Any) -> Optimizer:
    """Wrap an optax optimizer as a value: `optimizer("sgd", momentum=0.9)`, or any function of a `learning_rate`.

    >>> import personax as px
    >>> px.optimizer("sgd", momentum=0.9)
    Optimizer(name='sgd', options=(('momentum', 0.9),))
    """
    name = make if isinstance(make, str) else f"{make.__module__}:{make.__qualname__}"
    return Optimizer(name, tuple(sorted(options.items())))
