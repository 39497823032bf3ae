"""The Markdown page of the benchmarks, with plots: `python -m personax.bench.markdown docs`.

Reads `docs/benchmarks/*.json`, which `personax bench --out` writes, and writes `docs/performance.md` and the plots.
"""

import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from jinja2 import StrictUndefined, Template

from personax.bench.curves import draw
from personax.bench.record import BENCH, BenchRecord, RowRecord
from personax.bench.show import COLUMNS, cells, figures, peer_words, start_words

PAGE = Path(__file__).with_name("performance.md.jinja")

WORKLOADS = {
    "mnist": "Fallah's MNIST setting",
    "cifar": "pfl-research's CIFAR-10 setting",
    "apfl": "APFL, with the states of all clients",
    "persafl": "PersA-FL, in waves and sequentially",
    "own": "User networks: our networks written in Flax, and others",
    "scale": "From a thousand clients to a million",
    "growth-cohort": "More clients per round",
    "growth-steps": "More local steps",
    "growth-width": "Larger models",
}
PFLLIB = 2.6e-3  # seconds of a first-order step of PFLlib with its 784-100-10 network, measured once on 2 cores
NUM_ROUNDS = 1500  # in pfl-research's published run


class GrowthAxis(NamedTuple):
    """A size that a workload varies: its name, and its value in a row."""

    words: str
    of: Callable[[RowRecord], float]


AXES = {
    "scale": GrowthAxis("clients", lambda row: row.setting.num_clients),
    "growth-cohort": GrowthAxis("clients per round", lambda row: row.setting.cohort_size),
    "growth-steps": GrowthAxis("local steps", lambda row: row.setting.num_steps),
    "growth-width": GrowthAxis("parameters", lambda row: num_parameters(row)),
}


def num_parameters(row: RowRecord) -> int:
    """Count the parameters of a fully connected network."""
    sizes = (math.prod(row.setting.input_shape), *row.setting.widths, 10)
    return sum((fan_in + 1) * out for fan_in, out in pairwise(sizes))


def page(records: dict[str, BenchRecord]) -> str:
    """Render the page from all records, given by file name."""
    text = PAGE.read_text(encoding="utf-8")
    template = Template(text, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    return template.render(sections=[section(name, record) for name, record in records.items()])


def plots(records: dict[str, BenchRecord]) -> dict[str, str]:
    """Draw the plots of all records as SVG, by file name."""
    found = {}
    for name, record in records.items():
        for workload, axis in AXES.items():
            chosen = [row for row in record.rows if row.workload == workload]
            if len(chosen) > 1:
                times = [(axis.of(row), 1e3 * row.seconds_per_round) for row in chosen]
                floors = [(axis.of(row), 1e3 * row.floor_seconds) for row in chosen]
                lines = {"one round": times, "floor": floors}
                found[f"{name}-{workload}.svg"] = draw(WORKLOADS[workload], axis.words, "ms", lines)
    return found


def section(name: str, record: BenchRecord) -> str:
    """Render one record: the machine and date, then a table for each workload."""
    machine = record.machine
    peaks = f"{machine.operations_per_second / 1e9:,.0f} GFLOP/s and {machine.bytes_per_second / 1e9:,.0f} GB/s"
    where = f"{machine.device} ({machine.backend}), {machine.cores} cores, {machine.system}, jax {machine.jax}"
    summary = (
        f"`{record.command}`, {record.started[:10]}, {where}, {machine.precision} precision, {record.seconds:.0f} s. "
        f"Measured peaks: {peaks}. Load at the start: {record.load:.1f}. {record.note}"
    )
    parts = [f"## {name}", summary.strip()]
    if record.start is not None:
        parts.append(f"Startup with the default digits: {start_words(record.start)}.")
    drawn = plots({name: record})
    for workload, words in WORKLOADS.items():
        chosen = [row for row in record.rows if row.workload == workload]
        if chosen:
            parts += [f"### {words}", table(chosen), *_remarks(workload, chosen)]
            picture = f"{name}-{workload}.svg"
            parts += [f"![{words}](benchmarks/{picture})"] if picture in drawn else []
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[RowRecord]) -> str:
    """Render rows with their peers, and their descriptions below."""
    lines = [f"| | {' | '.join(COLUMNS)} | peers |", "|---" * (len(COLUMNS) + 2) + "|"]
    lines += [f"| {row.name} | {' | '.join(cells(row))} | {'; '.join(map(peer_words, row.peers))} |" for row in rows]
    words = dict.fromkeys(row.words for row in rows)
    return "\n".join([*lines, "", *(f"- {one}" for one in words)])


def _remarks(workload: str, rows: Sequence[RowRecord]) -> list[str]:
    """Return remarks that the table itself does not show."""
    found = []
    for row in rows:
        if row.name == "mnist-fo-784-100-10":
            step = 1 / row.local_steps_per_second
            found.append(
                f"A first-order step takes {figures(1e3 * step)} ms; PFLlib's took 2.6 ms (measured once on 2 cores), "
                f"{figures(PFLLIB / step)} times as long."
            )
        if workload == "cifar":
            found.append(f"At this speed, {NUM_ROUNDS} rounds take {figures(NUM_ROUNDS * row.seconds_per_round)} s.")
        other = next((one for one in rows if row.name == one.name.replace("waves", "one-by-one") != one.name), None)
        if other is not None:
            ratio = row.seconds_per_round / other.seconds_per_round
            found.append(
                f"{row.setting.num_clients} clients: {figures(ratio)} times as fast in waves; waves of consecutive "
                f"events have a mean length of {figures(other.mean_wave or 1)}."
            )
    return ["\n".join(f"- {one}" for one in found)] if found else []


def read_records(docs: Path) -> dict[str, BenchRecord]:
    """Read the committed records, by file name."""
    paths = sorted(path for path in (docs / "benchmarks").glob("*.json") if path.name != "schema.json")
    return {path.stem: BENCH.validate_json(path.read_bytes()) for path in paths}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    committed = read_records(folder)
    (folder / "performance.md").write_text(page(committed), encoding="utf-8")
    for file, drawn_one in plots(committed).items():
        (folder / "benchmarks" / file).write_text(drawn_one, encoding="utf-8")
