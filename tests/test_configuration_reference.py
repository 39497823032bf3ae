"""Every key of a configuration has a meaning, and an example that parses."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

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
OPTIONS = [
    *(
        key
        for name, (axis, _) in REFERENCE.AXES.items()
        for kind in axis.kinds
        for key in REFERENCE.kind_keys(name, kind)
    ),
    *REFERENCE.local_keys(),
    *REFERENCE.scoring_keys(),
]


def test_every_key_has_a_meaning_and_an_example():
    lacking = [key.name for key in (*SCHEMA, *OPTIONS) if not (key.meaning and key.example)]
    assert not lacking, f"Add them to docs/extensions/settings.toml: {lacking}"


@pytest.mark.parametrize("key", SCHEMA, ids=lambda key: key.name)
def test_the_example_of_a_key_is_read(key):
    read = config.load(None, [key.example])
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
