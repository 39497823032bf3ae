"""Imports go one way."""

import ast
from pathlib import Path

import personax

LAYERS = """
typing values keys step_sizes curvature objectives optimizers partition describe parts federation datasets sampling
local server schedules algorithms convolution models tasks operations precision waves iterates checks store results
engine stream simulate protocol scores evaluate theory records folders citations config build catalogue checkpoint
summarise convergence tuning runs handover inspection reproduce report progress tensorboard compiled
bench live flower cli
"""
ORDER = LAYERS.split()


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("personax."):
            yield node.module.split(".")[1]


def test_modules_import_only_what_comes_before_them():
    root = Path(personax.__file__).parent
    for path in root.rglob("*.py"):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        if name != "__init__":
            earlier = ORDER[: ORDER.index(name) + 1]
            assert set(imported(path)) <= set(earlier), f"{path.name} imports from the right"


def test_public_names_are_documented_and_listed():
    assert sorted(set(personax.__all__)) == list(personax.__all__)
    for name in personax.__all__:
        item = getattr(personax, name)
        assert item.__doc__, name
