"""The package has every file that it reads, and versions and locks agree."""

import re
import tomllib
from importlib.metadata import version

import pytest

import personax
from tests.sources import ROOT

PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_data_file_is_part_of_the_package():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["personax"]
    packed = {pattern: {path for path in ROOT.glob(pattern) if path.is_file()} for pattern in patterns}
    assert all(packed.values()), [pattern for pattern, paths in packed.items() if not paths]
    files = {path for path in ROOT.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == set().union(*packed.values())


def locked(name):
    """The versions of a lock, and the number of hashes of each package."""
    text = (ROOT.parent / "locks" / f"{name}.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, flags=re.MULTILINE)
    assert len(entries) == text.count("==") and "://" not in text
    return {package: version for package, version, _ in entries}


def pinned(name):
    """The versions of a constraints file, by normalized names."""
    lines = (ROOT.parent / name).read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    return {normalized(package): version for package, version in pins}


def normalized(package):
    return re.sub(r"[-_.]+", "-", package).lower()


ENVIRONMENTS = {"constraints.txt": ("base", "test", "lint", "dist"), "constraints-flower.txt": ("flower",)}
ENVIRONMENTS |= {
    "constraints-loggers.txt": ("loggers",),
    "constraints-docs.txt": ("docs",),
    "constraints-cluster.txt": ("cluster",),
}


@pytest.mark.parametrize("constraints", ENVIRONMENTS)
def test_locks_have_the_versions_of_the_constraints(constraints):
    pins = pinned(constraints)
    for lock in ENVIRONMENTS[constraints]:
        versions = locked(lock)
        assert {name: version for name, version in versions.items() if pins.get(name) != version} == {}, lock
        assert "torch" not in versions


def test_the_base_lock_has_every_dependency():
    needed = {normalized(re.match(r"[\w.-]+", one)[0]) for one in PROJECT["project"]["dependencies"]}
    assert needed | {"setuptools"} <= locked("base").keys()


def test_the_version_is_stated_once_and_repeated_correctly():
    release = personax.__version__
    assert version("personax") == release and "version" in PROJECT["project"]["dynamic"]
    assert f"\nversion: {release}\n" in (ROOT.parent / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \((\S+)\)$", (ROOT.parent / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    assert newest[1] == release and re.fullmatch(r"\d{4}-\d\d-\d\d", newest[2])
    assert f"\ndate-released: {newest[2]}\n" in (ROOT.parent / "CITATION.cff").read_text(encoding="utf-8")


def test_the_page_on_installing_lists_every_extra_for_users():
    page = (ROOT.parent / "docs" / "install.md").read_text(encoding="utf-8")
    listed = set(re.findall(r'^\| `pip install "personax\[([\w-]+)\]"` \|', page, flags=re.MULTILINE))
    extras = PROJECT["project"]["optional-dependencies"].keys()
    assert listed == {name for name in extras if not name.startswith("test")} - {"dist", "docs", "lint"}
