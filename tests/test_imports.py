"""The package is a list: an entry imports only entries to its left."""

import ast
from pathlib import Path

import personax
from tests.sources import ROOT, parse, trees

LINE = """
typing values keys curvature sharing fast objectives data client schedules server algorithms models simulation
evaluation theory experiment inspection reproduce report bench cluster live flower cli
"""
ORDER = LINE.split()


def imported(path):
    """Every entry of the package that a file imports, in any form of import and at any place."""
    here = ["personax", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "personax" else [module]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("personax."))


def test_entries_import_only_what_is_to_their_left():
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if name != "__init__":
            wrong = set(imported(path)) - set(ORDER[: ORDER.index(name) + 1])
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}, which is to its right"


def test_the_tree_is_the_order():
    entries = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {path.stem for path in ROOT.glob("*.py")}
    assert entries - {"__init__"} == set(ORDER)
    assert len(ORDER) <= 25


def test_the_test_tree_mirrors_the_package_tree():
    """Tests of an entry are in the folder of its name; those of a single module may be one file beside them."""
    here = Path(__file__).parent
    packages = lambda root: {path.parent.name for path in root.glob("*/__init__.py")}
    assert packages(here) - {"reference"} == packages(ROOT)


NAMEDTUPLE_AND_JIT = {"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_cache_size"}
NOTEBOOKS = {"_repr_html_"}  # Jupyter calls it


def is_private(name):
    return (
        name.startswith("_") and not name.endswith("__") and name != "_" and name not in NAMEDTUPLE_AND_JIT | NOTEBOOKS
    )


def private_uses(tree):
    """Each private name that a test imports, reads from anything but itself, or passes to `setattr` and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) != "self":
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {
            "getattr",
            "setattr",
            "delattr",
        }:
            texts = [next(iter(arg.values)) if isinstance(arg, ast.JoinedStr) else arg for arg in node.args[:2]]
            dotted = [arg.value for arg in texts if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from (name for text in dotted for name in text.split(".") if is_private(name))


def test_tests_use_no_private_names():
    for path in Path(__file__).parent.rglob("*.py"):
        found = list(private_uses(ast.parse(path.read_text())))
        assert not found, f"{path.name} uses {found}: test through the public API, or make the name public"


def test_every_use_of_a_private_name_is_found():
    found = """
from personax.live.book import _table
module._one
book.state._two.x
monkeypatch.setattr(module, "_three", 1)
monkeypatch.delattr("personax.live.book._four")
getattr(module, f"_five_{name}")
"""
    assert set(private_uses(ast.parse(found))) == {"_table", "_one", "_two", "_three", "_four", "_five_"}
    allowed = "from __future__ import annotations\nself._own\npair._replace(x=1)\nclass_.__doc__\nsetattr(a, 'b', _c)"
    assert not list(private_uses(ast.parse(allowed)))


def test_every_form_of_import_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_imports.ROOT", tmp_path)
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "module.py"
    path.write_text(
        "import personax.cli\nfrom personax import theory\nfrom personax.live.book import Book\n"
        "from ..report import page\nfrom . import arrays\nfrom .. import bench\n"
        "def late():\n    import personax.flower as f\n"
    )
    assert set(imported(path)) == {"cli", "theory", "live", "report", "data", "bench", "flower"}


def test_each_class_name_means_one_thing():
    classes = [
        (node.name, str(path)) for path, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    places = {}
    for name, place in classes:
        places.setdefault(name.lstrip("_"), []).append(place)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_public_names_are_documented_and_listed():
    assert sorted(set(personax.__all__)) == list(personax.__all__)
    for name in personax.__all__:
        item = getattr(personax, name)
        assert item.__doc__ or name in ("LossFn", "Params"), name  # which are aliases, explained in typing.py
