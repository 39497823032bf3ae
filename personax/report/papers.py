"""Markdown pages of the reproductions, with figures: `python -m personax.report.papers docs/results docs`.

Reads the records that `personax reproduce` wrote. Writes the overview, `reproduction.md`, and in `reproduction/` a
page for each paper and a figure for each experiment.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from personax.report.comparison import (
    MARKS,
    NumberTable,
    comparisons,
    mark,
    reading_groups,
    reading_words,
    scorings_of,
    tables_of,
    verdicts_by_reading,
)
from personax.report.drawings import figure_of
from personax.report.overview import OverviewRow, findings_of, outdated, overview_rows, with_numbers
from personax.report.tables import NO_BREAK
from personax.reproduce import EXPERIMENTS
from personax.reproduce.outcome import REPRODUCTION, ReproductionRecord
from personax.reproduce.papers import PAPERS, Paper, paper_of

LONGEST = 26  # cells with at most this many characters stay on one line

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def pages(records: Sequence[ReproductionRecord]) -> dict[str, str]:
    """Return all files by their path relative to the docs folder."""
    experiments = {name: make(False) for name, make in EXPERIMENTS.items()}
    by_name = {record.name: record for record in records if not experiments[record.name].unavailable}
    papers = {key: with_numbers(paper, by_name) for key, paper in PAPERS.items()}
    rows = overview_rows(papers, by_name)
    missing = [name for name, one in experiments.items() if name not in by_name and not one.unavailable]
    signs = {sign: " or ".join(verdict for verdict, of in MARKS.items() if of == sign) for sign in MARKS.values()}
    used = {row.sign for of in rows.values() for row in of}
    signs = {sign: words for sign, words in signs.items() if sign in used}
    overview = TEMPLATES.get_template("overview.md.jinja")
    found = {"reproduction.md": overview.render(papers=papers, rows=rows, missing=missing, signs=signs)}
    for key, paper in papers.items():
        mine = [by_name[name] for name in experiments if name in by_name and paper_of(name) == key]
        found[f"reproduction/{key}.md"] = paper_page(paper, rows[key], mine)
        found |= {f"reproduction/{record.name}.svg": figure_of(record) for record in mine}
    return found


def paper_page(paper: Paper, rows: Sequence[OverviewRow], records: Sequence[ReproductionRecord]) -> str:
    """Render the page of a paper: findings, claims, and a section for each experiment."""
    by_name = {record.name: record for record in records}
    template = TEMPLATES.get_template("paper.md.jinja")
    return template.render(paper=paper, rows=rows, records=records, section=partial(section, records=by_name))


def section(record: ReproductionRecord, records: Mapping[str, ReproductionRecord] | None = None) -> str:
    """Render the section of an experiment: its figure, tables, findings, choices and comparisons.

    `records` has the records that the findings quote, by default this one.
    """
    experiment = EXPERIMENTS.get(record.name)
    aged = "" if experiment is None else outdated(record, experiment(False))
    findings = findings_of(record, records or {record.name: record})
    return TEMPLATES.get_template("experiment.md.jinja").render(record=record, findings=findings, outdated=aged)


def number_table(table: NumberTable) -> str:
    """Render a table of numbers with its caption above and its notes below."""
    head = [f"| {' | '.join(map(cell, table.heads))} |", "|---|" + "---:|" * (len(table.heads) - 1)]
    unbroken = lambda words: words if len(words) > LONGEST else words.replace(" ", NO_BREAK)
    lines = [f"| {' | '.join(unbroken(cell(words)) for words in row)} |" for row in table.rows]
    notes = [f"<sub>{'; '.join(table.notes)}</sub>\n"] if table.notes else []
    return "\n".join([f"**{table.caption}**\n", *head, *lines, "", *notes])


def cell(words: str) -> str:
    r"""Escape text for a cell of a Markdown table.

    >>> print(cell("|v| < 1"))
    \|v\| &lt; 1
    """
    return words.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _heading(record: ReproductionRecord) -> str:
    where = record.source.partition(", ")[2] or record.source
    return f"{where[0].upper()}{where[1:]}: {record.title}"


def _tables(record: ReproductionRecord) -> list[tuple[list[tuple[str, str]], list[NumberTable]]]:
    """Return each group of readings with its tables, and the readings' descriptions if there are several."""
    several = len(record.readings) > 1
    return [
        ([(one.name, reading_words(one)) for one in group] if several else [], list(tables_of(record, group)))
        for group in reading_groups(record)
    ]


def _other_scorings(record: ReproductionRecord) -> list[tuple[str, list[NumberTable]]]:
    found: dict[str, list[NumberTable]] = {}
    for group in reading_groups(record):
        for table in tables_of(record, group, first=False):
            found.setdefault(table.scoring, []).append(table)
    for scoring, tables in found.items():
        verdicts = verdicts_by_reading(record, scoring)
        tables += [] if verdicts is None else [verdicts]
    return list(found.items())


def _how(record: ReproductionRecord) -> str:
    """Format the command, size, date, machine and precision of a record."""
    machine = f"{record.machine['device']}, jax {record.machine['jax']}"
    return (
        f"<sub>`{record.command}`: {record.length}, {len(record.seeds)} seeds, {record.started[:10]}, {machine}, "
        f"{record.precision} matrix products, {record.seconds:.0f} s; [record](../results/{record.name}.json)</sub>"
    )


TEMPLATES.globals.update(
    mark=mark,
    cell=cell,
    comparisons=comparisons,
    verdicts_by_reading=verdicts_by_reading,
    number_table=number_table,
    heading=_heading,
    tables=_tables,
    other_scorings=_other_scorings,
    scorings=scorings_of,
    how=_how,
)


def read_records(folder: Path) -> list[ReproductionRecord]:
    """Read the committed records."""
    return [REPRODUCTION.validate_json(path.read_bytes()) for path in sorted(folder.glob("*.json"))]


def write_pages(results: Path, docs: Path) -> None:
    """Write all pages and figures, and remove figures without a record."""
    made = pages(read_records(results))
    (docs / "reproduction").mkdir(exist_ok=True)
    for path in (docs / "reproduction").glob("*.svg"):
        path.unlink()
    for name, text in made.items():
        (docs / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]), Path(sys.argv[2]))
