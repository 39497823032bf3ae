"""Imports requested by a configuration, and optional dependencies."""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from personax.values.checks import ConfigError

_ALLOWED: ContextVar[bool] = ContextVar("imports are allowed", default=True)


def imports_in(item: Any) -> list[str]:
    """The paths of all imports in a nested table.

    >>> imports_in({"model": {"kind": "import", "path": "nets:small"}, "optimizer": "adam"})
    ['nets:small']
    """
    if isinstance(item, list | tuple):
        return [path for entry in item for path in imports_in(entry)]
    if not isinstance(item, Mapping):
        return []
    own = [str(item.get("path"))] if item.get("kind") == "import" else []
    optimizers = [item.get("optimizer"), item.get("name") if item.get("kind") == "Optimizer" else None]
    own += [name for name in optimizers if isinstance(name, str) and ":" in name]
    return own + [path for entry in item.values() for path in imports_in(entry)]


@contextlib.contextmanager
def imports_forbidden() -> Iterator[None]:
    """Forbid imports requested by a configuration, for configurations from untrusted sources.

    >>> import personax as px
    >>> with px.values.imports_forbidden():
    ...     px.values.imported("math:sqrt", "model")
    Traceback (most recent call last):
        ...
    personax.values.checks.ConfigError: Importing 'math:sqrt' is not allowed here.
    """
    token = _ALLOWED.set(False)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def require_imports_allowed(path: str) -> None:
    """Raise if called inside `imports_forbidden()`.

    >>> import personax as px
    >>> px.values.require_imports_allowed("my_module:name")
    """
    if not _ALLOWED.get():
        raise ConfigError(f"Importing {path!r} is not allowed here.")


def imported(path: str, where: str) -> Any:
    """Import `module:name`; modules are also looked up in the current folder.

    >>> import personax as px
    >>> px.values.imported("math:sqrt", "model")(9.0)
    3.0
    """
    require_imports_allowed(path)
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.append("")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"`{where}`: cannot import {path!r}: {type(error).__name__}: {error}") from error


class NotInstalled(ModuleNotFoundError):
    """An optional dependency that is not installed. The message has the command that installs it.

    >>> import personax as px
    >>> issubclass(px.values.NotInstalled, ModuleNotFoundError)
    True
    """


def optional_import(module: str, what: str, extra: str) -> Any:
    """Import a module of an extra on first use by `what`.

    >>> import personax as px
    >>> px.values.optional_import("math", "`my_function`", "extra").pi > 3
    True
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = f'{what} needs {module}, which is not installed. Run `pip install "personax[{extra}]"`.'
        raise NotInstalled(message, name=error.name) from error
