"""Every key of a configuration has a meaning, and an example that parses."""

import dataclasses
import importlib.util
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import personax as px
from personax.experiment import config
from personax.values import construct

ROOT = Path(__file__).parents[1]


def generator():
    """The module that writes the page, which is not part of the package."""
    spec = importlib.util.spec_from_file_location("configuration", ROOT / "docs" / "extensions" / "configuration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = generator()
SCHEMA = [key for section in REFERENCE.SECTIONS for key in REFERENCE.section_keys(section)]
OPTIONS = list(REFERENCE.option_keys())


def test_every_key_has_a_meaning_and_an_example():
    lacking = [key.name for key in (*SCHEMA, *OPTIONS) if not (key.meaning and key.example)]
    assert not lacking, f"Add them to docs/extensions/settings.toml: {lacking}"


def beside(key):
    """The examples that a configuration needs to have this key: those of the required keys of the tables around it."""
    is_around = lambda one: f"{key.name.rpartition('.')[0]}.".startswith(f"{one.name.rpartition('.')[0]}.")
    required = [one.example for one in SCHEMA if one.default == "required" and is_around(one)]
    return [*required, key.example]


@pytest.mark.parametrize("key", SCHEMA, ids=lambda key: key.name)
def test_the_example_of_a_key_is_read(key):
    read = config.load(None, beside(key))
    found = tomllib.loads(config.dump(read))
    assert key.example.startswith(f"{key.name} = ")
    if key.name != "personax":  # which belongs to run folders and is not kept
        for part in key.name.split("."):
            found = found[part]


def test_the_example_of_an_option_is_built():
    for key in OPTIONS:
        (item,) = tomllib.loads(key.example).values()
        construct(key.annotation, item, key.name)


def test_no_entry_is_left_over():
    names = {key.name for key in SCHEMA}
    assert set(REFERENCE.SETTINGS["keys"]) == names
    used = {one for key in OPTIONS for one in (key.name, key.name.rpartition(".")[2])}
    assert set(REFERENCE.SETTINGS["options"]) <= used


def test_the_page_names_every_key():
    page = REFERENCE.page()
    for key in (*SCHEMA, *OPTIONS):
        assert f"`{key.name.rpartition('.')[2]}`" in page and key.meaning in page


def test_no_table_of_the_schema_and_no_axis_is_missing():
    own = (one for one in vars(config).values() if dataclasses.is_dataclass(one) and one.__module__ == config.__name__)
    classes = {*own} - {config.Section}
    assert classes <= set(REFERENCE.SECTIONS.values())
    axes = {one for one in vars(px.values).values() if isinstance(one, px.values.Axis)}
    assert {axis for axis, _ in REFERENCE.AXES.values()} == axes


def test_every_table_that_an_option_names_is_listed():
    named = {one for key in OPTIONS for one in classes_in(key.annotation) if px.values.axis_of(one) is None}
    assert named <= {cls for cls, _ in REFERENCE.TABLES.values()}


def classes_in(annotation):
    """The classes of values in an annotation."""
    inner = [one for part in get_args(annotation) for one in classes_in(part)]
    return [annotation, *inner] if dataclasses.is_dataclass(annotation) else inner
