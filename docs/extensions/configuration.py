"""Generate the configuration reference from the schema of a run and the registries of kinds.

`settings.toml`, next to this file, has a meaning and an example for each key. tests/test_configuration_reference.py
checks that none is missing and that every example parses.
"""

import dataclasses
import inspect
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tomli_w
from pydantic.fields import FieldInfo

import personax as px
from personax.experiment import config
from personax.values import axis_of

SETTINGS = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
AXES = {  # the registries, with the key that names a kind
    "data sets": (px.values.DATASETS, "data.kind"),
    "partitions": (px.values.PARTITIONS, "partition.kind"),
    "models": (px.values.MODELS, "model.kind"),
    "recipes": (px.values.RECIPES, "algorithms.NAME.recipe"),
    "objectives": (px.values.OBJECTIVES, "objective"),
    "curvatures": (px.values.CURVATURES, "hvp"),
    "servers": (px.values.SERVERS, "server"),
    "discounts": (px.values.DISCOUNTS, "discount"),
    "step sizes": (px.values.STEP_SIZES, "lr"),
    "optimizers": (px.values.OPTIMIZERS, "optimizer"),
    "batch sizes": (px.values.BATCH_SIZES, "batch_size"),
    "delays": (px.values.DELAYS, "schedule.delays"),
    "delay times": (px.values.DELAY_TIMES, "download, compute, upload, pause"),
    "controllers": (px.values.CONTROLLERS, "controller.kind"),
}
TABLES = {  # values of no axis, whose keys are those of a table
    "scores": (px.Scoring, "algorithms.NAME.scores.NAME"),
    "sharing": (px.Sharing, "algorithms.NAME.sharing"),
    "phases": (px.Phase, "algorithms.NAME.phases"),
}
LOCAL = get_type_hints(px.LocalOptions)
BEHIND = {field.name: field.default for cls in (px.Server, px.Local) for field in dataclasses.fields(cls)}
BEHIND |= {name: one.default for name, one in inspect.signature(px.traces.generate).parameters.items()}
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path", Any: "any"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class Key(NamedTuple):
    """One key of a configuration."""

    name: str  # as it is looked up in settings.toml
    type: str
    default: str
    meaning: str
    example: str
    annotation: Any = None


def sections(cls: Any = config.Config, name: str = "") -> dict[str, Any]:
    """The tables of the schema by name, in its order. A class that several keys name is listed at the first."""
    found = {name: cls}
    for key, annotation in get_type_hints(cls).items():
        inside = f"{name}.{key}".lstrip(".")
        place = f"{inside}.NAME" if get_origin(annotation) is dict else inside
        for one in _classes(annotation):
            if one not in found.values():
                found |= {at: nested for at, nested in sections(one, place).items() if nested not in found.values()}
    return found


def _classes(annotation: Any) -> list[Any]:
    """The classes of tables in an annotation."""
    if dataclasses.is_dataclass(annotation):
        return [annotation]
    return [one for part in get_args(annotation) for one in _classes(part)]


SECTIONS = sections()


def section_keys(section: str) -> Iterator[Key]:
    """Every key of one table of the schema. Other tables, and the options of kinds, have their own sections."""
    cls = SECTIONS[section]
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        name = f"{section}.{field.name}".lstrip(".")
        if field.name == "options" or name in (*SECTIONS, "local") or f"{name}.NAME" in SECTIONS:
            continue
        entry = SETTINGS["keys"].get(name, {})
        default = _default(field)
        yield Key(name, describe(hints[field.name]), default, entry.get("meaning", ""), entry.get("example", ""))
    if cls is config.AlgorithmSection:  # an option of every recipe
        entry = SETTINGS["keys"].get(f"{section}.sharing", {})
        yield Key(f"{section}.sharing", "table", "none", entry.get("meaning", ""), entry.get("example", ""))


def kind_keys(axis_name: str, kind: str) -> Iterator[Key]:
    """Every option of one kind of an axis."""
    axis, _ = AXES[axis_name]
    parameters = axis.parameters({"kind": kind}, "reference")
    for name, one in parameters.items():
        if axis is not px.values.RECIPES or name not in LOCAL:
            yield _option(f"{axis_name}.{kind}.{name}", name, one, BEHIND)
    if axis is px.values.PARTITIONS and "num_each" in parameters:  # `personax.experiment.build` reads it
        one = inspect.Parameter("test_each", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=int)
        yield _option(f"{axis_name}.{kind}.test_each", "test_each", one)


def local_keys() -> Iterator[Key]:
    """Every option of local training, which all recipes accept."""
    for name, one in px.values.parameters_of(px.Local).items():
        yield _option(f"local.{name}", name, one)


def table_keys(table: str) -> Iterator[Key]:
    """Every key of a table that is a value of no axis."""
    for name, one in px.values.parameters_of(TABLES[table][0]).items():
        yield _option(f"{table}.{name}", name, one)


def option_keys() -> Iterator[Key]:
    """Every option of every kind, of local training, and of the tables that they name."""
    for name, (axis, _) in AXES.items():
        for kind in axis.kinds:
            yield from kind_keys(name, kind)
    yield from local_keys()
    for table in TABLES:
        yield from table_keys(table)


def _option(full: str, name: str, one: inspect.Parameter, behind: Mapping[str, Any] = MappingProxyType({})) -> Key:
    """An option, whose meaning is that of its full name, or of the name in any kind.

    `behind` has the defaults of options that `Unpack` passes on, which it does not know.
    """
    entry = SETTINGS["options"].get(full) or SETTINGS["options"].get(name) or {}
    given = behind.get(name) if one.default is None else one.default
    default = "required" if given is one.empty else _show(given)
    example = f"{name} = {_toml(entry['example'])}" if "example" in entry else ""
    return Key(full, describe(one.annotation), default, entry.get("meaning", ""), example, one.annotation)


def describe(annotation: Any) -> str:
    """Describe a type."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(describe(inner[0]), inner[1:])
    axis = axis_of(annotation)
    if axis is not None and origin not in (Union, types.UnionType):
        return f"{axis.name}: name or table"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(one) for one in inner if one is not type(None)))
    if origin is Literal:
        return ", ".join(f'`"{one}"`' if isinstance(one, str) else f"`{one}`" for one in inner)
    if origin in (list, tuple) or getattr(origin, "__name__", "") == "Sequence":
        return f"list of: {describe(inner[0])}" if inner else "list"
    if origin is dict or annotation is dict:
        return "table"
    if dataclasses.is_dataclass(annotation):
        return "table"
    return WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounded(words: str, notes: tuple[Any, ...]) -> str:
    """A type with its bounds, which pydantic keeps in a `Field`."""
    found = [note for one in notes if isinstance(one, FieldInfo) for note in one.metadata]
    limits = [(word, getattr(note, name)) for note in found for name, word in BOUNDS.items() if hasattr(note, name)]
    shown = [f"{word} {limit:g}" for word, limit in limits if limit < 2**31]
    return f"{words}, {' and '.join(shown)}" if shown else words


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return _show(field.default_factory())
    return "required" if field.default is dataclasses.MISSING else _show(field.default)


def _show(default: Any) -> str:
    """A default as TOML, or as text."""
    if default is None or default == () or default == {}:
        return "none"
    table = px.values.to_dict(default)
    if isinstance(table, dict):
        kind = table.get("kind", "")
        return f"`{kind}`" if kind else "table"
    return f"`{_toml(table)}`"


def _toml(item: Any) -> str:
    """An item as the right side of an assignment in TOML."""
    if isinstance(item, dict):
        return "{ " + ", ".join(f"{name} = {_toml(one)}" for name, one in item.items()) + " }"
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(_toml, item))}]"
    return tomli_w.dumps({"key": item}).removeprefix("key = ").strip()


def page() -> str:
    """The whole reference in Markdown."""
    parts = [_section(section) for section in SECTIONS]
    parts.append("## [local]\n\n" + SETTINGS["sections"]["local"] + "\n\n" + _table(local_keys()))
    for table, (_, key) in TABLES.items():
        parts.append(f"## [{key}]\n\n" + SETTINGS["sections"][table] + "\n\n" + _table(table_keys(table)))
    for axis_name, (axis, key) in AXES.items():
        parts.append(f"## Kinds of {axis_name}\n\n{SETTINGS['sections'][axis_name]} Set by: `{key}`.\n")
        for kind, made in axis.kinds.items():
            options = list(kind_keys(axis_name, kind))
            about = f"{made.summary}. {made.source}.".strip(". ") if made.summary else ""
            about = f"{about}.\n\n" if about else ""
            parts.append(f"### {kind}\n\n{about}" + (_table(options) if options else "No options.\n"))
    return "\n".join(parts)


def _section(section: str) -> str:
    title = f"[{section}]" if section else "Top level"
    return f"## {title}\n\n{SETTINGS['sections'][section or 'top']}\n\n{_table(section_keys(section))}"


def _table(keys: Any) -> str:
    """A definition list: the key, then its meaning, type, default and example."""
    lines = []
    for key in keys:
        last = key.name.rpartition(".")[2]
        lines += [f"`{last}`", f": {key.meaning}", f"  *Type:* {key.type}. *Default:* {key.default}.", ""]
        lines += [f"  Example: `{key.example}`", ""]
    return "\n".join(lines)
