"""What is installed is all that the code reads."""

import tomllib

from tests.sources import ROOT


def test_every_data_file_is_part_of_the_package():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["personax"]
    packed = {pattern: {path for path in ROOT.glob(pattern) if path.is_file()} for pattern in patterns}
    assert all(packed.values()), [pattern for pattern, paths in packed.items() if not paths]
    files = {path for path in ROOT.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == set().union(*packed.values())
