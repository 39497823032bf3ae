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
    """An optax optimizer by name, or by the import path `module:function` of anything that makes one.

    The step size is not part of it: it belongs to `Local` or `Server`, where it may follow a clock.

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
                f"`name` and `options` must make an optimizer, got {self.name!r} with {dict(self.options)}: {error}. "
                "Use a name of optax such as 'sgd' or 'adam', or a function of a learning rate that can be imported."
            ) from error

    @property
    def is_plain(self) -> bool:
        """True if its change is minus the step size times the direction."""
        return (self.name, self.options) == ("sgd", ())

    def at(self, lr: Scalar) -> optax.GradientTransformationExtraArgs:
        """The optimizer with this step size. Optimizer states do not depend on it."""
        module, _, name = self.name.rpartition(":")
        if module:
            require_imports_allowed(self.name)
        make: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module or "optax"))
        return optax.with_extra_args_support(make(learning_rate=lr, **dict(self.options)))


def optimizer(make: str | Callable[..., optax.GradientTransformation] = "sgd", **options: Any) -> Optimizer:
    """An optax optimizer as a value: `optimizer("sgd", momentum=0.9)`, or any function of a `learning_rate`."""
    name = make if isinstance(make, str) else f"{make.__module__}:{make.__qualname__}"
    return Optimizer(name, tuple(sorted(options.items())))
