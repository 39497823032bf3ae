"""Run a reproduction: each cell with all seeds together, kept as it ends, then the claims."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Protocol as Interface

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.checkpoint import write_atomically
from personax.evaluate import evaluate
from personax.federation import Federation
from personax.folders import slug
from personax.reproduce.experiment import Cell, Claim, Experiment, Verdict
from personax.reproduce.outcome import (
    CELL,
    REPRODUCTION,
    CellRecord,
    ClaimRecord,
    CurveRecord,
    ReadingRecord,
    ReproductionRecord,
    RowVerdict,
)
from personax.results import NonFiniteUpdate, Snapshot
from personax.schedules import rounds
from personax.scores import Evaluation, interval
from personax.simulate import simulate
from personax.summarise import machine
from personax.tuning import validation_of
from personax.values import to_dict

PERCENT = 100.0  # the papers print accuracies in %


class Told(Interface):
    """Who is told when a cell has ended."""

    def __call__(self, cell: CellRecord) -> None: ...


def reproduce(
    experiment: Experiment,
    folder: Path,
    *,
    num_seeds: int | None = None,
    command: str = "",
    told: Told = lambda cell: None,
) -> ReproductionRecord:
    """Do what is left of a reproduction and write its results. Cells that have ended are kept."""
    began, started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    seeds = list(range(num_seeds or experiment.num_seeds))
    federations = {name: make() for name, make in experiment.federations.items() if _needed(experiment, name)}
    for federation in federations.values():  # copied to the device before several threads ask for it
        jax.block_until_ready((federation.train, federation.test))
    one = partial(_cell, experiment, federations, seeds, folder)
    # Compiling takes longer than running on a GPU, and leaves it free: cells side by side. A CPU has better to do.
    workers = 1 if jax.default_backend() == "cpu" or experiment.timed else 8
    with ThreadPoolExecutor(workers) as pool:
        cells = []
        for record in pool.map(one, experiment.cells):
            cells.append(record)
            told(record)
    record = ReproductionRecord(
        schema_version=1,
        personax=version("personax"),
        name=experiment.name,
        source=experiment.source,
        title=experiment.title,
        quick=experiment.quick,
        started=started,
        command=command,
        machine=machine(),
        seconds=time.perf_counter() - began,
        num_rounds=experiment.num_rounds,
        seeds=seeds,
        cells=cells,
        claims=[_judged(claim, cells, experiment.num_rounds) for claim in experiment.claims],
        choices=list(experiment.choices),
    )
    write_atomically(folder / "results.json", REPRODUCTION.dump_json(record, indent=1))
    return record


def _needed(experiment: Experiment, name: str) -> bool:
    return any(cell.data == name for cell in experiment.cells)


def _cell(
    experiment: Experiment, federations: Mapping[str, Federation], seeds: list[int], folder: Path, cell: Cell
) -> CellRecord:
    """One cell: from its file if it has ended before with the same seeds, rounds and algorithm."""
    path = folder / "cells" / f"{slug(f'{cell.row} {cell.column}')}-{experiment.num_rounds}-{len(seeds)}.json"
    if path.exists():
        kept = CELL.validate_json(path.read_bytes())
        if kept.algorithm in [to_dict(one) for one in _candidates(cell).values()]:
            return kept
    began = time.perf_counter()
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    run = partial(_train, experiment, cell, keys)
    chosen, algorithm = _choose(cell, federations[cell.data], run)
    found, curve = run(algorithm, federations[cell.data], cell.every)
    record = CellRecord(
        row=cell.row,
        column=cell.column,
        paper=None if cell.paper is None else cell.paper[0],
        paper_interval=None if cell.paper is None else cell.paper[1],
        readings=[_reading(experiment.metric, name, one) for name, one in found.items()],
        algorithm=to_dict(algorithm),
        chosen=chosen,
        seconds=time.perf_counter() - began,
        curve=curve,
    )
    write_atomically(path, CELL.dump_json(record))
    return record


def _candidates(cell: Cell) -> dict[str, Algorithm]:
    return {"": cell.algorithm} if isinstance(cell.algorithm, Algorithm) else dict(cell.algorithm)


def _train(
    experiment: Experiment, cell: Cell, keys: jax.Array, algorithm: Algorithm, federation: Federation, every: int | None
) -> tuple[dict[str, Evaluation], CurveRecord | None]:
    """Train with all seeds; the readings at the end, and the first one over the rounds."""
    schedules = [rounds(federation.num_clients, experiment.num_rounds, experiment.cohort_size, key=key) for key in keys]
    task = experiment.task
    score = lambda at, reading: evaluate(algorithm, task, federation, at, cell.protocols[reading], key=keys)
    first = next(iter(cell.protocols))
    points, chunks, mark = [], [], [time.perf_counter()]

    def observe(snapshot: Snapshot) -> None:
        jax.block_until_ready(snapshot.params)
        chunks.append(time.perf_counter() - mark[0])
        means = PERCENT * score(snapshot, first).mean(experiment.metric)
        points.append((int(np.min(snapshot.num_events)) // experiment.cohort_size, means.tolist()))
        mark[0] = time.perf_counter()

    watched = {} if every is None else {"every": every, "observe": observe}
    result = simulate(algorithm, task, federation, schedules, key=keys, **watched)
    found = {reading: score(result, reading) for reading in cell.protocols}
    return found, None if every is None else _curve(points, chunks, every)


def _curve(points: list[tuple[int, list[float]]], chunks: list[float], every: int) -> CurveRecord:
    """The points with their times: the median chunk's, because the first has compilation in it."""
    per_round = float(np.median(chunks[2:] or chunks[1:])) / every
    numbers, values = (list(column) for column in zip(*points, strict=True))
    return CurveRecord(numbers, [per_round * num for num in numbers], values)


def _choose(cell: Cell, federation: Federation, run: Callable) -> tuple[str, Algorithm]:
    """The candidate with the best mean on validation data, under the last reading, which sees no test data."""
    candidates = _candidates(cell)
    if len(candidates) == 1:
        return next(iter(candidates.items()))
    held = validation_of(federation, jax.random.key(0))
    scores = {}
    for name, algorithm in candidates.items():
        try:
            found = run(algorithm, held, None)[0]
        except NonFiniteUpdate:
            continue
        scores[name] = float(np.mean(list(found.values())[-1].mean("accuracy")))
    best = max(scores, key=lambda name: scores[name])
    return best, candidates[best]


def _reading(metric: str, name: str, found: Evaluation) -> ReadingRecord:
    of_seeds = PERCENT * np.atleast_1d(found.mean(metric))
    ends = interval(of_seeds)
    low, high = (None, None) if ends.num_seeds == 1 else (ends.low, ends.high)
    return ReadingRecord(name, found.protocol.describe(), found.protocol.flag, ends.mean, low, high, of_seeds.tolist())


def _judged(claim: Claim, cells: list[CellRecord], num_rounds: int) -> ClaimRecord:
    """A claim holds in a row whose paired interval is above 0, and fails where it is below."""
    verdicts = [_in_row(claim, row, cells, num_rounds) for row in claim.rows]
    return ClaimRecord(claim.words, claim.place, _overall([one.verdict for one in verdicts]), verdicts)


def _overall(of_rows: list[Verdict]) -> Verdict:
    if len(set(of_rows)) == 1:
        return of_rows[0]
    return "holds in part" if "holds" in of_rows else "does not hold"


def _in_row(claim: Claim, row: str, cells: list[CellRecord], num_rounds: int) -> RowVerdict:
    of = {cell.column: _values(cell, claim.at, num_rounds) for cell in cells if cell.row == row}
    found = interval(of[claim.better] - of[claim.worse])
    low, high = (None, None) if found.num_seeds == 1 else (found.low, found.high)
    if low is None or high is None or low <= 0 <= high:
        return RowVerdict(row, found.mean, low, high, "undecided")
    return RowVerdict(row, found.mean, low, high, "holds" if low > 0 else "does not hold")


def _values(cell: CellRecord, at: float, num_rounds: int) -> np.ndarray:
    """The compared reading of each seed, at the end or at a share of the rounds."""
    if at == 1.0 or cell.curve is None:
        return np.asarray(cell.readings[0].of_seeds)
    nearest = int(np.argmin(np.abs(np.asarray(cell.curve.rounds) - at * num_rounds)))
    return np.asarray(cell.curve.of_seeds[nearest])
