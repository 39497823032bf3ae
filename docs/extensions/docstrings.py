"""Convert the package's docstrings, which are plain text with some Markdown, to reStructuredText for autodoc."""

import re

DOCTEST, SECTION = re.compile(r"\s*>>> "), re.compile(r"\s*(Args|Returns|Raises):$")


def process(app, what, name, obj, options, lines: list[str]) -> None:
    """Rewrite a docstring in place: a handler of `autodoc-process-docstring`."""
    lines[:] = _tables(_equations(lines))


def skip(app, what, name, obj, would_skip, options) -> bool | None:
    """Leave out members whose documentation Python generated: a handler of `autodoc-skip-member`."""
    generated = (getattr(obj, "__doc__", None) or "").startswith(("Alias for field number", "str(object"))
    return True if generated or name in ("count", "index") else None


def _equations(lines: list[str]) -> list[str]:
    """Put an indented block after a blank line, an equation, into a literal block, and escape everything else."""
    made, block, in_section, in_doctest = [], False, False, False
    for number, line in enumerate(lines):
        after_blank = not number or not lines[number - 1].strip()
        in_doctest = bool(DOCTEST.match(line)) or (in_doctest and bool(line.strip()))
        if SECTION.match(line):
            in_section = True
        elif line.strip() and not line.startswith(" "):
            in_section = block = False
        if line.startswith("    ") and after_blank and not (in_section or in_doctest or block):
            made += ["::", ""]
            block = True
        plain = block or in_doctest or line.lstrip().startswith(("| ", "|---"))
        made.append(line if plain else _escaped(line))
    return made


def _escaped(line: str) -> str:
    """Escape the characters that reStructuredText would read as markup, outside of code."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([*|]|_\\b|_(?=\\W|$))", r"\\\1", part) for part in parts)


def _tables(lines: list[str]) -> list[str]:
    """Convert tables of Markdown."""
    made, rows = [], []
    for line in [*lines, ""]:
        if line.startswith(("| ", "|---")):
            rows.append([cell.strip() for cell in line.strip("| ").split(" | ")])
            continue
        if rows:
            made += [".. list-table::", "   :header-rows: 1", ""]
            for row in (rows[0], *rows[2:]):
                made += [f"   {'*' if not at else ' '} - {_escaped(cell)}" for at, cell in enumerate(row)]
            made.append("")
            rows = []
        made.append(line)
    return made
