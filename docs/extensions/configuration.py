"""Generate the configuration reference from the schema of a run and the registries of kinds.

`settings.toml`, next to this file, has a meaning and an example for each key. tests/test_configuration_reference.py
checks that none is missing and that every example parses.
"""

import dataclasses
import inspect
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tomli_w
from pydantic.fields import FieldInfo

import personax as px
from personax.experiment import config
from personax.values import axis_of

SETTINGS = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
SECTIONS = {  # the tables whose keys the schema lists, in the order of the page
    "": config.Config,
    "data": config.DataSection,
    "partition": config.Section,
    "model": config.Section,
    "split": config.Split,
    "task": config.TaskSection,
    "schedule": config.ScheduleSection,
    "evaluation": config.EvaluationSection,
    "tune": config.TuneSection,
    "live": config.Terms,
    "live.sample": config.Sample,
}
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
}
LOCAL = get_type_hints(px.LocalOptions)
BEHIND = {field.name: field.default for cls in (px.Server, px.Local) for field in dataclasses.fields(cls)}
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


def section_keys(section: str) -> Iterator[Key]:
    """Every key of one table of the schema."""
    cls = SECTIONS[section]
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        if field.name == "options" or f"{section}.{field.name}".strip(".") in (*SECTIONS, "local", "algorithms"):
            continue
        name = f"{section}.{field.name}".lstrip(".")
        entry = SETTINGS["keys"].get(name, {})
        default = _default(field)
        yield Key(name, describe(hints[field.name]), default, entry.get("meaning", ""), entry.get("example", ""))


def kind_keys(axis_name: str, kind: str) -> Iterator[Key]:
    """Every option of one kind of an axis."""
    axis, _ = AXES[axis_name]
    for name, one in axis.parameters({"kind": kind}, "reference").items():
        if axis is not px.values.RECIPES or name not in LOCAL:
            yield _option(f"{axis_name}.{kind}.{name}", name, one)


def local_keys() -> Iterator[Key]:
    """Every option of local training, which all recipes accept."""
    for name, one in px.values.parameters_of(px.Local).items():
        yield _option(f"local.{name}", name, one)


def scoring_keys() -> Iterator[Key]:
    """Every key of a score, `[algorithms.NAME.scores]`."""
    for name, one in px.values.parameters_of(px.Scoring).items():
        yield _option(f"scores.{name}", name, one)


def _option(full: str, name: str, one: inspect.Parameter) -> Key:
    """An option, whose meaning is that of its full name, or of the name in any kind."""
    entry = SETTINGS["options"].get(full) or SETTINGS["options"].get(name) or {}
    given = BEHIND.get(name) if one.default is None else one.default  # `Unpack` does not know the default
    default = "required" if given is one.empty else _show(given)
    example = f"{name} = {_toml(entry['example'])}" if "example" in entry else ""
    return Key(full, describe(one.annotation), default, entry.get("meaning", ""), example, one.annotation)


def describe(annotation: Any) -> str:
    """A type in words."""
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
    """A default as TOML, or in words."""
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
    parts.append("## [algorithms.NAME]\n\n" + SETTINGS["sections"]["algorithms"] + "\n")
    parts.append("## [local]\n\n" + SETTINGS["sections"]["local"] + "\n\n" + _table(local_keys()))
    parts.append("## [algorithms.NAME.scores]\n\n" + SETTINGS["sections"]["scores"] + "\n\n" + _table(scoring_keys()))
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
