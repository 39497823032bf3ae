"""Configuration as values, and the tables of what a configuration can name.

A *value* is a frozen dataclass that prints, compares and hashes, and whose numbers are pytree leaves. A field annotated
`Static[...]` is part of the program (a count, a name): changing it recompiles. Every other field is a number or another
value: changing it does not recompile, and `vmap` can sweep over it.

An *axis* is one table of kinds (all objectives, all partitions, ...). Each kind is registered next to its class or
function. `Axis.make` builds one from a TOML table, as the annotations of its parameters ask for.

`personax compare --tune` varies by default the parameters annotated `Tuned[...]` (a positive number, such as a step
size) or `TunedShare[...]` (a number from 0 to 1).
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    Unpack,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import jax
import numpy as np

_STATIC = "static"
_SCALE, _SHARE = "scale", "share"
T = TypeVar("T")
Static = Annotated[T, _STATIC]
Tuned = Annotated[T, _SCALE]
TunedShare = Annotated[T, _SHARE]


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a pytree.

    `__post_init__` validates what a person constructs. JAX rebuilds values without calling it, because tracers and
    swept arrays pass through there. Values are final: compose them instead of inheriting.

    >>> @value
    ... class Step:
    ...     lr: float
    ...     num: Static[int] = 1
    >>> jax.tree.leaves(Step(0.1, num=3))
    [0.1]
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    static = tuple(f.name for f in dataclasses.fields(cls) if _is_static(f.type))  # pyright: ignore[reportArgumentType]
    dynamic = tuple(f.name for f in dataclasses.fields(cls) if f.name not in static)  # pyright: ignore[reportArgumentType]

    def flatten(self: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in dynamic]
        return children, tuple(getattr(self, name) for name in static)

    def unflatten(aux: tuple[Any, ...], children: Any) -> T:
        self = object.__new__(cls)
        for name, item in zip(dynamic + static, (*children, *aux), strict=True):
            object.__setattr__(self, name, item)
        return self

    def refuse_subclass(subclass: type, **_: Any) -> None:
        raise TypeError(f"{cls.__name__} is final: what it states about itself need not hold for {subclass.__name__}.")

    cls.__init_subclass__ = classmethod(refuse_subclass)  # pyright: ignore[reportAttributeAccessIssue]
    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    _VALUES.add(cls)
    return cls


_VALUES: set[type] = set()


def _is_static(annotation: Any) -> bool:
    if isinstance(annotation, str):  # of a module with `from __future__ import annotations`
        return "Static[" in annotation
    return _STATIC in getattr(annotation, "__metadata__", ())


class ConfigError(ValueError):
    """A configuration that cannot be run: what is wrong, what was given, and what to do."""


@dataclass(frozen=True)
class Kind:
    """A named member of an axis: what makes it, one line about it, its source, and keys of the papers to cite."""

    name: str
    make: Callable[..., Any]
    summary: str = ""
    source: str = ""
    citations: tuple[str, ...] = ()


class Axis:
    """One table of kinds. `supplied` names the parameters that a run gives to a kind, not the configuration.

    >>> colors = Axis("color")
    >>> @colors.register(summary="The color of grass")
    ... def green(shade: int = 1) -> str:
    ...     return f"green {shade}"
    >>> colors.make({"kind": "green", "shade": 2}, "color")
    'green 2'
    """

    def __init__(self, name: str, supplied: tuple[str, ...] = (), shorthand: str = "") -> None:
        self.name, self.supplied = name, supplied
        self.shorthand = shorthand  # the kind that a plain string is the `name` of; by default the string is the kind
        self.kinds: dict[str, Kind] = {}

    def register(
        self, name: str | None = None, *, summary: str = "", source: str = "", citations: tuple[str, ...] = ()
    ) -> Callable[[T], T]:
        """Register the decorated class or function, by default under its own name."""

        def add(make: Any) -> Any:
            own = name or make.__name__
            if own in self.kinds:
                raise ValueError(f"There are two kinds of {self.name} called `{own}`. Rename one of them.")
            if own == "import":
                raise ValueError("The name `import` is reserved: it imports a kind by its path.")
            self.kinds[own] = Kind(own, make, summary, source, citations)
            if isinstance(make, type):
                self.describes(make)
                _NAMES[make] = own
            return make

        return add

    def describes(self, annotation: T) -> T:
        """Build parameters with this annotation (a protocol or a class) from this axis."""
        _AXES[annotation] = self
        return annotation

    def kind_of(self, table: Mapping[str, Any], where: str) -> Kind:
        """Look up the kind that a table names, importing it for `kind = "import"`."""
        name = str(table.get("kind"))
        if name == "import":
            path = table.get("path")
            if not isinstance(path, str):
                raise ConfigError(f'`{where}` has `kind = "import"` and needs a `path` such as "my_module:name".')
            return Kind(path, imported(path, where))
        check_names(where, [name], [*self.kinds, "import"], "kind")
        return self.kinds[name]

    def make(self, table: Mapping[str, Any] | str, where: str, **supplied: Any) -> Any:
        """Build what a table describes; `where` names the table in messages."""
        if isinstance(table, str):
            table = {"kind": self.shorthand, "name": table} if self.shorthand else {"kind": table}
        return self.build(self.kind_of(table, where), options_of(table), where, **supplied)

    def build(self, kind: Kind, options: Mapping[str, Any], where: str, **supplied: Any) -> Any:
        """Call a kind with options. Whatever something imported raises is reported with its name."""
        try:
            return call(kind.make, options, where, self.supplied, **supplied)
        except ConfigError:
            raise
        except Exception as error:
            if self.kinds.get(kind.name) is kind:
                raise
            raise ConfigError(f"`{where}`: {kind.name} failed: {type(error).__name__}: {error}") from error

    def parameters(self, table: Mapping[str, Any], where: str) -> dict[str, inspect.Parameter]:
        """The parameters that a configuration can give to the kind that a table names."""
        made = parameters_of(self.kind_of(table, where).make)
        return {name: one for name, one in made.items() if name not in self.supplied}


_ALLOWED: ContextVar[bool] = ContextVar("imports are allowed", default=True)
_AXES: dict[Any, Axis] = {}  # by annotation
_NAMES: dict[type, str] = {}  # of registered classes

RECIPES = Axis("recipe")
OBJECTIVES = Axis("objective")
CURVATURES = Axis("curvature")
STEP_SIZES = Axis("step size")
OPTIMIZERS = Axis("optimizer", shorthand="Optimizer")
BATCH_SIZES = Axis("batch size")
SERVERS = Axis("server")
DISCOUNTS = Axis("discount")
DELAYS = Axis("delays", supplied=("num_clients", "key"))
DELAY_TIMES = Axis("delay")
DATASETS = Axis("data set", supplied=("test_share", "key"))
PARTITIONS = Axis("partition", supplied=("labels", "key"))
MODELS = Axis("model", supplied=("num_outputs",))


def options_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a table: everything except its kind and, for an import, its path."""
    reserved = ("kind", "path") if table.get("kind") == "import" else ("kind",)
    return {name: item for name, item in table.items() if name not in reserved}


def imports_in(item: Any) -> list[str]:
    """The paths of everything that a nested table would import.

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
    """Raise for every import that a configuration asks for, for configurations that come from elsewhere."""
    token = _ALLOWED.set(False)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def require_imports_allowed(path: str) -> None:
    """Raise inside `imports_forbidden()`."""
    if not _ALLOWED.get():
        raise ConfigError(f"Importing {path!r} is not allowed here.")


def imported(path: str, where: str) -> Any:
    """Import `module:name`; modules are also looked up in the current folder."""
    require_imports_allowed(path)
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.append("")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a user's module raises
        raise ConfigError(f"`{where}`: cannot import {path!r}: {type(error).__name__}: {error}") from error


class NotInstalled(ModuleNotFoundError):
    """An optional dependency that is not installed; the message has the command that installs it."""


def optional_import(module: str, what: str, extra: str) -> Any:
    """Import a module of an extra when `what` first needs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = f'{what} needs {module}, which is not installed. Run `pip install "personax[{extra}]"`.'
        raise NotInstalled(message, name=error.name) from error


def parameters_of(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a function or class with their annotations evaluated.

    `**options: Unpack[Options]` of a `TypedDict` counts as the parameters that it names.
    """
    target = make.func if isinstance(make, functools.partial) else make
    is_plain_class = isinstance(target, type) and target not in _VALUES
    try:
        hints = get_type_hints(target.__init__ if is_plain_class else target, include_extras=True)
        given = inspect.signature(make).parameters
    except Exception as error:  # names that exist only for type checkers, builtins without a signature
        raise ConfigError(f"The signature of {target} cannot be read: {error}. Annotate what TOML sets.") from error
    found: dict[str, inspect.Parameter] = {}
    for name, one in given.items():
        hint = hints.get(name, Any)
        if one.kind is one.VAR_KEYWORD and get_origin(hint) is Unpack:
            for key, inner in get_type_hints(get_args(hint)[0], include_extras=True).items():
                found[key] = inspect.Parameter(key, one.KEYWORD_ONLY, default=None, annotation=inner)
        elif one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            found[name] = one.replace(annotation=hint)
    return found


def call(
    make: Callable[..., Any], table: Mapping[str, Any], where: str, reserved: tuple[str, ...] = (), **supplied: Any
) -> Any:
    """Call `make` with the options of a table, each built as its annotation asks for.

    `supplied` parameters are passed where `make` takes them; `reserved` ones cannot be configured.
    """
    parameters = parameters_of(make)
    check_names(where, table, [name for name in parameters if name not in reserved])
    options = {name: construct(parameters[name].annotation, item, f"{where}.{name}") for name, item in table.items()}
    given = {name: item for name, item in supplied.items() if name in parameters}
    needed = [name for name, one in parameters.items() if one.default is one.empty]
    if missing := [name for name in needed if name not in options and name not in given]:
        raise ConfigError(f"`{where}` needs `{missing[0]}`. Add it.")
    try:
        return make(**options, **given)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`{where}`: {error}") from error


def construct(annotation: Any, item: Any, where: str) -> Any:
    """Build a parameter from TOML as its annotation asks for: a number or string as it is, a table by its `kind`."""
    options, axis = _alternatives(annotation), axis_of(annotation)
    is_plain = any(one in (int, float, str, bool, Any) or get_origin(one) is Literal for one in options)
    if axis is not None and (isinstance(item, Mapping) or (isinstance(item, str) and not is_plain)):
        made, classes = axis.make(item, where), tuple(one for one in options if one in _NAMES)
        if classes and not isinstance(made, classes):
            raise ConfigError(f"`{where}` must be {' or '.join(_NAMES[one] for one in classes)}, got {name_of(made)}.")
        return made
    if axis is not None and not is_plain:
        kinds = ", ".join(sorted(axis.kinds))
        raise ConfigError(f"`{where}` must be a kind or a table with a `kind`, got {item!r:.80}. Name one: {kinds}.")
    nested = next((one for one in options if one in _VALUES), None)
    if nested is not None and isinstance(item, Mapping):
        return call(nested, options_of(item), where)
    if isinstance(item, list):
        entries = next((get_args(one) or (Any,) for one in options if get_origin(one) in (tuple, list, Sequence)), None)
        if entries is None and Any not in options:
            raise ConfigError(f"`{where}` must be one value, got the list {item!s:.80}. To try several use `tune`.")
        if entries is not None and len(entries) > 1 and Ellipsis not in entries and len(entries) != len(item):
            raise ConfigError(f"`{where}` must be a list of {len(entries)}, got {item!s:.80}. Change it.")
        return tuple(construct(one, entry, f"{where}.{i}") for i, (one, entry) in enumerate(_paired(entries, item)))
    if isinstance(item, Mapping) and not any((get_origin(one) or one) in (dict, Any) for one in options):
        raise ConfigError(f"`{where}` must be one value, got the table {item!s:.80}. Change it.")
    _require_type(options, item, where)
    return Path(item) if Path in options and str not in options and isinstance(item, str) else item


def axis_of(annotation: Any) -> Axis | None:
    """The axis that a parameter with this annotation is built from, if it is from one."""
    options = _alternatives(annotation)
    return next((_AXES[one] for one in options if _is_hashable(one) and one in _AXES), None)


def tuned_as(annotation: Any) -> Literal["scale", "share"] | None:
    """Return how a parameter with this annotation is tuned by default, or None if it is not.

    >>> tuned_as(Tuned[float]), tuned_as(TunedShare[float]), tuned_as(float)
    ('scale', 'share', None)
    """
    return next((mark for mark in getattr(annotation, "__metadata__", ()) if mark in (_SCALE, _SHARE)), None)


def _paired(entries: tuple[Any, ...] | None, items: list[Any]) -> list[tuple[Any, Any]]:
    """Each item of a list with its annotation: `tuple[int, str]` has one for each, `tuple[int, ...]` one for all."""
    if entries is not None and Ellipsis not in entries and len(entries) == len(items) > 1:
        return list(zip(entries, items, strict=True))
    return [((entries or (Any,))[0], item) for item in items]


def _require_type(options: list[Any], item: Any, where: str) -> None:
    """Raise unless a plain item has one of the plain types that are asked for."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path"}
    is_int = isinstance(item, int) and not isinstance(item, bool)
    fits = {int: is_int, float: is_int or isinstance(item, float), bool: isinstance(item, bool)}
    fits |= {str: isinstance(item, str), Path: isinstance(item, str)}
    if not isinstance(item, Mapping) and all(
        get_origin(one) in (tuple, list, Sequence) or one is type(None) for one in options
    ):
        raise ConfigError(f"`{where}` must be a list, got {item!r:.80}. Change it.")
    literals = [choice for one in options if get_origin(one) is Literal for choice in get_args(one)]
    known = [one for one in options if one in fits]
    named = any(type(item) is type(one) and item == one for one in literals)
    if named or not (known or literals) or any(fits[one] for one in known) or Any in options:
        return
    must = " or ".join(dict.fromkeys([*(words[one] for one in known), *map(repr, literals)]))
    raise ConfigError(f"`{where}` must be {must}, got {item!r:.80}. Change it.")


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, without `Static[...]` and other annotations around them."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [one for part in get_args(annotation) for one in _alternatives(part)]
    return [annotation]


def _is_hashable(item: Any) -> bool:
    try:
        hash(item)
    except TypeError:
        return False
    return True


def name_of(item: Any) -> str:
    """The name of a value's kind: as it was registered, or the path to import it by.

    >>> name_of(Kind("a", print))
    'Kind'
    """
    cls = type(item)
    is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    return _NAMES.get(cls) or (cls.__name__ if is_ours else f"{cls.__module__}:{cls.__qualname__}")


def short_repr(item: Any) -> str:
    """A value as its constructor, without the fields that have their default.

    >>> @value
    ... class Step:
    ...     lr: float
    ...     num: Static[int] = 1
    >>> short_repr(Step(0.1)), short_repr(Step(0.1, 2))
    ('Step(lr=0.1)', 'Step(lr=0.1, num=2)')
    """
    if type(item) not in _VALUES:
        return repr(item)
    given = [(f.name, getattr(item, f.name)) for f in dataclasses.fields(item) if not _is_default(item, f)]
    return f"{type(item).__name__}({', '.join(f'{name}={short_repr(one)}' for name, one in given)})"


def _is_default(item: Any, field: dataclasses.Field) -> bool:
    """Return True if a field has its default; arrays of swept numbers never do."""
    given = getattr(item, field.name)
    return type(given) is type(field.default) and np.ndim(given) == 0 and bool(given == field.default)


def to_dict(item: Any) -> Any:
    """A value as plain tables, lists, numbers and strings, which TOML and JSON can hold.

    A field that is None is left out. What is not part of personax is written as an import.
    """
    if type(item) in _VALUES:
        name = name_of(item)
        kind = {"kind": "import", "path": name} if ":" in name else {"kind": name}
        given = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
        return {**kind, **{k: to_dict(v) for k, v in given.items() if v is not None}}
    if isinstance(item, tuple | list):
        return [to_dict(entry) for entry in item]
    if isinstance(item, int | float | str):
        return item
    return np.asarray(item).tolist()


def check_names(where: str, given: Iterable[str], known: Iterable[str], what: str = "setting") -> None:
    """Raise for a name that is not known, and suggest the nearest that is."""
    known = set(known)
    for name in given:
        if name not in known:
            raise ConfigError(unknown_name(where, name, known, what))


def unknown_name(where: str, name: str, known: Iterable[str], what: str = "setting") -> str:
    """One sentence about an unknown name, with the nearest known one."""
    known = sorted(known)
    listed = f"There are: {', '.join(known)}." if known else "There are none."
    return f"`{where}` has no {what} `{name}`.{did_you_mean(name, known)} {listed}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A space and a question that suggests the nearest known name, whatever its case; nothing where none is near.

    >>> did_you_mean("MNST", ["mnist", "cifar10"])
    ' Did you mean `mnist`?'
    """
    by_lower = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1, 0.5)
    return f" Did you mean `{by_lower[near[0]]}`?" if near else ""


def require(
    condition: Callable[[Any], Any],
    name: str,
    given: Any,
    must: str,
    hint: str = "",
    *,
    error: type[ValueError] = ValueError,
) -> None:
    """Raise an `error` that says what must hold, what was given and what to do, unless `condition` holds.

    `given` may be an array of swept numbers: the condition must hold for all of them.
    """
    if given is None:
        return
    try:
        holds = bool(np.all(condition(np.asarray(given))))
    except TypeError:  # not a number at all
        holds = False
    if not holds:
        raise error(" ".join(filter(None, [f"`{name}` must {must}, got {given}.", hint])))


def require_positive(name: str, given: Any, hint: str = "") -> None:
    """Require a finite number above zero; `None` means that it was not given."""
    require(lambda v: np.isfinite(v) & (v > 0), name, given, "be positive", hint)


def require_nonnegative(name: str, given: Any, hint: str = "") -> None:
    """Require a finite number of at least zero; `None` means that it was not given."""
    require(lambda v: np.isfinite(v) & (v >= 0), name, given, "not be negative", hint)


def require_count(name: str, given: Any, least: int = 1, hint: str = "") -> None:
    """Require a whole number of at least `least`; `None` means that it was not given."""
    whole = lambda v: np.issubdtype(v.dtype, np.integer) & (v >= least)
    require(whole, name, given, f"be a whole number of at least {least}", hint)


def require_one_of(name: str, given: Any, options: tuple[str, ...]) -> None:
    """Require one of the named options."""
    if given not in options:
        hint = did_you_mean(str(given), options)
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, options))}, got {given!r}.{hint}")
