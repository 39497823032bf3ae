"""Every public name is in the API reference and has an example that a test runs."""

import inspect
import re
import types
from pathlib import Path

import personax as px
from tests.test_docs import PAGES

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference" / "api"
EXECUTED = ("README.md", "docs/models.md", "docs/extending.md")  # by test_readme.py and test_extending.py
NEED_A_DOWNLOAD = {"datasets.mnist", "datasets.cifar10", "datasets.write_stand_in"}  # shown, but not run


def public_names():
    """Each public name with its object: of the package, and of its namespaces."""
    for name in px.__all__:
        found = getattr(px, name)
        if not isinstance(found, types.ModuleType):
            yield name, found
            continue
        assert "__all__" in vars(found), f"State the public names of px.{name} in `__all__`"
        for inner in found.__all__:
            yield f"{name}.{inner}", getattr(found, inner)


def object_of(name):
    found = px
    for part in name.split("."):
        found = getattr(found, part)
    return found


def executed_code():
    """The Python code that tests run: fenced blocks, and the README's indented ones."""
    pages = [ROOT / page for page in EXECUTED] + [ROOT / "docs" / f"{page}.md" for page in PAGES]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    fenced = [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)]
    return "\n".join([*fenced, *re.findall(r"^    .*\bpx\..*$", texts[0], flags=re.MULTILINE)])


def docstrings_of(found):
    """The docstrings that belong to an object: its own and those of its methods, or of a module's functions."""
    if isinstance(found, types.ModuleType):
        return [inspect.getdoc(one) or "" for one in vars(found).values() if inspect.getmodule(one) is found]
    own = [found.__doc__ or ""] if isinstance(found, type | types.FunctionType) else []
    return own + [getattr(one, "__doc__", None) or "" for one in vars(found).values() if isinstance(found, type)]


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    named = re.findall(r"^\.\. (?:auto\w+|py:data):: personax\.([\w.]+)$", text, flags=re.MULTILINE)
    assert len(named) == len(set(named)), "a name is documented twice"
    documented = {id(object_of(name)) for name in named}
    missing = [name for name, found in public_names() if name not in named and id(found) not in documented]
    assert not missing, f"Add these to a page in docs/reference/api: {missing}"


def test_every_public_name_has_an_example_that_is_run():
    code = executed_code()
    lacking = []
    for name, found in public_names():
        examples = [line for text in docstrings_of(found) for line in text.splitlines() if ">>>" in line]
        is_run = any("+SKIP" not in line for line in examples)
        if name in NEED_A_DOWNLOAD:
            assert examples, name
        elif not is_run and not re.search(rf"\bpx\.{re.escape(name)}\b", code):
            lacking.append(name)
    assert not lacking, f"Add a doctest, or an example on a page that tests/test_docs.py runs: {lacking}"
