"""Reproductions as a page of Markdown: `python -m personax.reproduce.markdown docs/results > docs/reproduction.md`."""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from jinja2 import StrictUndefined, Template

from personax.reproduce import EXPERIMENTS
from personax.reproduce.outcome import (
    REPRODUCTION,
    CellRecord,
    ReproductionRecord,
    ScoringRecord,
    difference_shown,
    interval_shown,
    shown,
)

PAGE = Path(__file__).with_name("reproduction.md.jinja")
FINDINGS = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def page(records: Sequence[ReproductionRecord]) -> str:
    """All reproductions, one section for each, and those that were not run in full yet."""
    missing = [name for name in EXPERIMENTS if name not in {record.name for record in records}]
    text = PAGE.read_text(encoding="utf-8")
    template = Template(text, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    return template.render(sections=map(section, records), missing=missing)


def section(record: ReproductionRecord) -> str:
    """One reproduction: its tables, its claims, what was chosen."""
    machine = f"{record.machine['device']}, jax {record.machine['jax']}"
    summary = (
        f"`{record.command}`, {record.started[:10]}, {machine}, {record.seconds:.0f} s, {len(record.seeds)} seeds, "
    )
    rows = dict.fromkeys(cell.row for cell in record.cells)
    tables = [_table(row, [cell for cell in record.cells if cell.row == row]) for row in rows]
    claims = ["| claim | place | here | paired difference |", "|---|---|---|---|"]
    for claim in record.claims:
        found = "; ".join(f"{row.name}: {difference_shown(row)}" for one in claim.judged for row in one.contrasts)
        claims.append(f"| {claim.words} | {claim.place} | **{claim.verdict}** | {claim.reason or found} |")
    choices = [f"- {choice}" for choice in record.choices]
    data = [f"- Data, {name}: {origin}" for name, origin in record.data.items()]
    title = f"## {record.name}\n\n{record.source}: {record.title}."
    parts = [title, f"{summary}{record.length}.", *tables, "\n".join(claims)]
    findings = "\n".join(f"- {found}" for found in FINDINGS.get(record.name, ()))
    found = ["What was found:", findings] if findings else []
    return "\n\n".join(
        [*parts, *found, "What the paper does not say, and what was chosen:", "\n".join([*choices, *data]), ""]
    )


def _table(row: str, cells: Sequence[CellRecord]) -> str:
    names = list(dict.fromkeys(one.name for cell in cells for one in cell.scorings))
    lines = [f"| {row} | paper | {' | '.join(names)} | difference |", "|---" * (len(names) + 3) + "|"]
    for cell in cells:
        found = {one.name: one for one in cell.scorings}
        paper, away = "", ""
        if cell.paper is not None and cell.paper_interval is not None:
            paper = f"{shown(cell.paper, cell.metric)} ± {shown(cell.paper_interval, cell.metric)}"
            away = shown(cell.scorings[0].ours.mean - cell.paper, cell.metric, "+")
        name = f"{cell.column}, {cell.chosen}" if cell.chosen else cell.column
        ours = " | ".join(_number(found.get(name), cell.metric) for name in names)
        lines.append(f"| {name} | {paper} | {ours} | {away} |")
    return "\n".join(lines)


def _number(scoring: ScoringRecord | None, metric: str) -> str:
    if scoring is None:
        return ""
    return f"{interval_shown(scoring.ours, metric)}{' (!)' if scoring.flag else ''}"


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).glob("*.json"))
    sys.stdout.write(page([REPRODUCTION.validate_json(file.read_bytes()) for file in files]))
