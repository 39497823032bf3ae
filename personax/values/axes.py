"""Axes: tables of kinds, and the construction of their values from TOML tables by the annotations of parameters."""

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from personax.values.checks import ConfigError, check_names
from personax.values.fields import is_value_class
from personax.values.imports import imported

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """A named member of an axis: its constructor, a summary, its source, and the keys of papers to cite.

    >>> import personax as px
    >>> px.values.Kind("square", lambda side: side**2, summary="The area of a square").make(3)
    9
    """

    name: str
    make: Callable[..., Any]
    summary: str = ""
    source: str = ""
    citations: tuple[str, ...] = ()


class Axis:
    """A table of kinds. `supplied` names the parameters that the run sets, not the configuration.

    >>> colors = Axis("color")
    >>> @colors.register(summary="The color of grass")
    ... def green(shade: int = 1) -> str:
    ...     return f"green {shade}"
    >>> colors.make({"kind": "green", "shade": 2}, "color")
    'green 2'
    """

    def __init__(self, name: str, supplied: tuple[str, ...] = (), shorthand: str = "") -> None:
        self.name, self.supplied = name, supplied
        self.shorthand = shorthand  # the kind whose `name` a plain string is; by default the string is the kind
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
        """Build the value that a table describes; `where` names the table in messages."""
        if isinstance(table, str):
            table = {"kind": self.shorthand, "name": table} if self.shorthand else {"kind": table}
        return self.build(self.kind_of(table, where), options_of(table), where, **supplied)

    def build(self, kind: Kind, options: Mapping[str, Any], where: str, **supplied: Any) -> Any:
        """Call a kind with options. Errors of imported code are reported with its name."""
        try:
            return call(kind.make, options, where, self.supplied, **supplied)
        except ConfigError:
            raise
        except Exception as error:
            if self.kinds.get(kind.name) is kind:
                raise
            raise ConfigError(f"`{where}`: {kind.name} failed: {type(error).__name__}: {error}") from error

    def parameters(self, table: Mapping[str, Any], where: str) -> dict[str, inspect.Parameter]:
        """The parameters of a table's kind that a configuration can set."""
        made = parameters_of(self.kind_of(table, where).make)
        return {name: one for name, one in made.items() if name not in self.supplied}


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
DELAYS = Axis("delays", supplied=("num_clients", "key", "work"))
DELAY_TIMES = Axis("delay")
DATASETS = Axis("data set", supplied=("test_share", "key"))
PARTITIONS = Axis("partition", supplied=("labels", "key"))
MODELS = Axis("model", supplied=("num_outputs",))
CONTROLLERS = Axis("controller")


def options_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a table: everything except its kind and, for an import, its path.

    >>> import personax as px
    >>> px.values.options_of({"kind": "import", "path": "my_module:name", "width": 8})
    {'width': 8}
    """
    reserved = ("kind", "path") if table.get("kind") == "import" else ("kind",)
    return {name: item for name, item in table.items() if name not in reserved}


def parameters_of(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a function or class with their annotations evaluated.

    `**options: Unpack[Options]` of a `TypedDict` counts as the parameters that it names.

    >>> import personax as px
    >>> list(px.values.parameters_of(px.mlp))
    ['widths', 'num_outputs', 'activation', 'init', 'norm']
    """
    target = make.func if isinstance(make, functools.partial) else make
    is_plain_class = isinstance(target, type) and not is_value_class(target)
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
    """Call `make` with the options of a table, each built according to its annotation.

    `supplied` parameters are passed if `make` takes them; `reserved` ones cannot be configured.

    >>> import personax as px
    >>> px.values.call(px.Proximal, {"strength": 0.1}, "objective")
    Proximal(strength=0.1)
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
    """Build a parameter from TOML according to its annotation: a number or string unchanged, a table by its `kind`.

    >>> import personax as px
    >>> px.values.construct(px.Objective, {"kind": "Proximal", "strength": 0.1}, "objective")
    Proximal(strength=0.1)
    """
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
    nested = next((one for one in options if is_value_class(one)), None)
    if nested is not None and isinstance(item, Mapping):
        return call(nested, options_of(item), where)
    if isinstance(item, list):
        entries = next((get_args(one) or (Any,) for one in options if get_origin(one) in (tuple, list, Sequence)), None)
        if entries is None and Any not in options:
            raise ConfigError(f"`{where}` must be one value, got the list {item!s:.80}. To try several use `tune`.")
        if entries is not None and len(entries) > 1 and Ellipsis not in entries and len(entries) != len(item):
            raise ConfigError(f"`{where}` must be a list of {len(entries)}, got {item!s:.80}. Correct its length.")
        return tuple(construct(one, entry, f"{where}.{i}") for i, (one, entry) in enumerate(_paired(entries, item)))
    if isinstance(item, Mapping) and not any((get_origin(one) or one) in (dict, Any) for one in options):
        raise ConfigError(f"`{where}` must be one value, got the table {item!s:.80}. Give a number or a string.")
    _require_type(options, item, where)
    return Path(item) if Path in options and str not in options and isinstance(item, str) else item


def axis_of(annotation: Any) -> Axis | None:
    """The axis from which a parameter with this annotation is built, or None.

    >>> import personax as px
    >>> px.values.axis_of(px.Objective).name
    'objective'
    """
    options = _alternatives(annotation)
    return next((_AXES[one] for one in options if _is_hashable(one) and one in _AXES), None)


def _paired(entries: tuple[Any, ...] | None, items: list[Any]) -> list[tuple[Any, Any]]:
    """Pair the items of a list with annotations: `tuple[int, str]` has one per item, `tuple[int, ...]` one for all."""
    if entries is not None and Ellipsis not in entries and len(entries) == len(items) > 1:
        return list(zip(entries, items, strict=True))
    return [((entries or (Any,))[0], item) for item in items]


def _require_type(options: list[Any], item: Any, where: str) -> None:
    """Raise unless a plain item has one of the expected plain types."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path"}
    is_int = isinstance(item, int) and not isinstance(item, bool)
    fits = {int: is_int, float: is_int or isinstance(item, float), bool: isinstance(item, bool)}
    fits |= {str: isinstance(item, str), Path: isinstance(item, str)}
    if not isinstance(item, Mapping) and all(
        get_origin(one) in (tuple, list, Sequence) or one is type(None) for one in options
    ):
        raise ConfigError(f"`{where}` must be a list, got {item!r:.80}. Put it in brackets: [{item!r:.40}].")
    literals = [choice for one in options if get_origin(one) is Literal for choice in get_args(one)]
    known = [one for one in options if one in fits]
    named = any(type(item) is type(one) and item == one for one in literals)
    if named or not (known or literals) or any(fits[one] for one in known) or Any in options:
        return
    must = " or ".join(dict.fromkeys([*(words[one] for one in known), *map(repr, literals)]))
    raise ConfigError(f"`{where}` must be {must}, got {item!r:.80}.{_remedy(item, known)}")


def _remedy(item: Any, known: list[Any]) -> str:
    """Return a hint about missing or needless quotes; "" for other mistakes."""
    if not isinstance(item, str):
        return " Put it in quotes." if {str, Path} & set(known) else ""
    is_number = re.fullmatch(r"[+-]?[\d._]+(e[+-]?\d+)?|true|false", item)
    return " Remove the quotes." if is_number and {int, float, bool} & set(known) else ""


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, without `Static[...]` and other wrappers."""
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
    """The name of a value's kind: its registered name, or its import path.

    >>> name_of(Kind("a", print))
    'Kind'
    """
    cls = type(item)
    is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    return _NAMES.get(cls) or (cls.__name__ if is_ours else f"{cls.__module__}:{cls.__qualname__}")
