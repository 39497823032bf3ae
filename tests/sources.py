"""The package's source, parsed once for the tests that read it."""

import ast
import functools
import gc
from pathlib import Path

import personax

ROOT = Path(personax.__file__).parent


@functools.cache
def trees():
    """Every module as (path within the package, syntax tree)."""
    return [(path.relative_to(ROOT), parse(path)) for path in sorted(ROOT.rglob("*.py"))]


def parse(path):
    """Parse a file without collecting garbage meanwhile: CPython 3.11 may lose count of its depth (gh-106905)."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except SystemError:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()
