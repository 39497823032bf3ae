"""Run a reproduction: train with all seeds together, save each training's cells, then judge the claims."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from typing import Protocol as Interface

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.evaluation.evaluate import evaluate
from personax.evaluation.scores import Evaluation, higher_is_better, interval, is_share
from personax.evaluation.scoring import Scoring
from personax.evaluation.validation import validation_of
from personax.experiment.checkpoint import write_atomically
from personax.experiment.folders import slug
from personax.experiment.summaries import machine
from personax.experiment.tuning import run_all
from personax.fast.backends import runs_side_by_side
from personax.models.tasks import as_inputs
from personax.reproduce.experiment import Cell, Experiment, Measure, PaperTraining, Reading
from personax.reproduce.judging import judge
from personax.reproduce.measures import MeasuredRun
from personax.reproduce.outcome import (
    REPRODUCTION,
    TRAINING,
    CellRecord,
    CurveRecord,
    ReadingRecord,
    ReproductionRecord,
    ScoringRecord,
    TrainingRecord,
    left_out_words,
)
from personax.schedules import Schedule
from personax.simulation.execution import Execution, Monitor
from personax.simulation.results import Snapshot
from personax.simulation.simulate import simulate
from personax.typing import Array, Batch, Task
from personax.values import to_dict

NUM_PARTS = 20  # of a training: Ctrl-C takes effect, and progress is reported, after each part
Scores = dict[str, list[float]]  # the value of each seed, by metric
Progress = Callable[[int, int], None]  # of one training: the parts that are done, and their number


def silent(done: int, total: int) -> None:
    """Ignore progress."""


class _TrainingSetting(NamedTuple):
    training: PaperTraining
    schedules: list[Schedule]  # one per seed
    keys: Array


class CellCallback(Interface):
    """A callback for the cells of a finished training."""

    def __call__(self, cells: list[CellRecord]) -> None: ...


def reproduce(
    experiment: Experiment,
    folder: Path,
    *,
    num_seeds: int | None = None,
    command: str = "",
    notify: CellCallback = lambda cells: None,
    side_by_side: bool | None = None,
) -> ReproductionRecord:
    """Complete a reproduction and write its results. Finished trainings are reused.

    By default, trainings run concurrently on accelerators, where compilation takes longer than execution and leaves the
    device idle, and sequentially on a CPU. Matrix products are in float32 on every device.
    """
    with _in_float32():
        return _reproduce(experiment, folder, num_seeds, command, notify, side_by_side)


@contextmanager
def _in_float32() -> Iterator[None]:
    """Use full float32 products in all threads; `jax.default_matmul_precision` affects only the current one."""
    before = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def _reproduce(
    experiment: Experiment,
    folder: Path,
    num_seeds: int | None,
    command: str,
    notify: CellCallback,
    side_by_side: bool | None,
) -> ReproductionRecord:
    began, started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    seeds = list(range(num_seeds or experiment.num_seeds))
    federations = _federations(experiment, experiment.trainings)
    for federation in federations.values():  # copy to the device once, before several threads need it
        jax.block_until_ready((federation.train, federation.test))
    cells: list[CellRecord] = []
    one = partial(_training, federations, seeds, folder)
    apart = experiment.timed or (not (runs_side_by_side() if side_by_side is None else side_by_side))
    for found in map(one, experiment.trainings) if apart else _side_by_side(one, experiment.trainings):
        cells += found
        notify(found)
    record = ReproductionRecord(
        schema_version=3,
        personax=version("personax"),
        name=experiment.name,
        source=experiment.source,
        title=experiment.title,
        quick=experiment.quick,
        started=started,
        command=command,
        machine=machine(),
        precision="float32",
        seconds=time.perf_counter() - began,
        length=experiment.length,
        data={name: federation.origin for name, federation in federations.items()},
        seeds=seeds,
        readings=[reading_record(one) for one in experiment.readings],
        cells=cells,
        claims=[judge(claim, cells, experiment.readings) for claim in experiment.claims],
        choices=list(experiment.choices),
    )
    write_atomically(folder / "results.json", REPRODUCTION.dump_json(record, indent=1))
    return record


def _federations(experiment: Experiment, trainings: Sequence[PaperTraining]) -> dict[str, Federation]:
    """Make the data of these trainings."""
    needed = {training.data for training in trainings}
    return {name: make() for name, make in experiment.federations.items() if name in needed}


def name_of(training: PaperTraining) -> str:
    """Return the name of a training, which is that of its first cell."""
    return f"{training.cells[0].row} {training.cells[0].column}"


def reproduce_part(
    experiment: Experiment, folder: Path, name: str, num_seeds: int | None = None, progress: Progress = silent
) -> None:
    """Run one training of a reproduction and save its cells for `reproduce`, unless it has finished before."""
    training = next(one for one in experiment.trainings if name_of(one) == name)
    with _in_float32():
        seeds = list(range(num_seeds or experiment.num_seeds))
        _training(_federations(experiment, [training]), seeds, folder, training, progress)


def is_reproduced(experiment: Experiment, folder: Path, num_seeds: int | None = None) -> bool:
    """Return True if every training has finished with these seeds and settings, so that `reproduce` trains nothing."""
    seeds = list(range(num_seeds or experiment.num_seeds))
    saved = [_saved(folder, training) for training in experiment.trainings]
    if not all(one is not None and len(one.cells[0].scorings[0].of_seeds) == len(seeds) for one in saved):
        return False  # before the data of all trainings are loaded
    with _in_float32():
        federations = _federations(experiment, experiment.trainings)
        pairs = zip(experiment.trainings, saved, strict=True)
        current = lambda training: _fingerprint(training, federations[training.data], seeds)
        return all(one is not None and one.fingerprint == current(training) for training, one in pairs)


def _saved(folder: Path, training: PaperTraining) -> TrainingRecord | None:
    """Read the cells of a finished training, which may have had other settings."""
    path = _path_of(folder, training)
    return TRAINING.validate_json(path.read_bytes()) if path.exists() else None


def _path_of(folder: Path, training: PaperTraining) -> Path:
    return folder / "trainings" / f"{slug(name_of(training))}.json"


def _side_by_side(
    one: Callable[[PaperTraining], list[CellRecord]], trainings: Sequence[PaperTraining]
) -> Iterator[list[CellRecord]]:
    """Yield the cells of each training, in order; trainings that share a program run sequentially."""
    alike: dict[Any, list[int]] = {}
    for place, training in enumerate(trainings):
        structures = tuple(jax.tree.structure(algorithm) for algorithm in _candidates(training).values())
        alike.setdefault((training.data, training.task, structures), []).append(place)
    with ThreadPoolExecutor(8) as pool:
        work = lambda places: {place: one(trainings[place]) for place in places}
        chains = {place: pool.submit(work, places) for places in alike.values() for place in places[:1]}
        first = {place: places[0] for places in alike.values() for place in places}
        for place in range(len(trainings)):
            yield chains[first[place]].result()[place]


def _training(
    federations: Mapping[str, Federation],
    seeds: list[int],
    folder: Path,
    training: PaperTraining,
    progress: Progress = silent,
) -> list[CellRecord]:
    """Return the cells of one training, from its file if it finished before with the same fingerprint."""
    federation, saved = federations[training.data], _saved(folder, training)
    fingerprint = _fingerprint(training, federation, seeds)
    if saved is not None and saved.fingerprint == fingerprint:
        return saved.cells
    began = time.perf_counter()
    keys = _keys(seeds)
    setting = _TrainingSetting(training, [training.schedule(key=key) for key in keys], keys)
    chosen, algorithm = _choose(setting, federation)
    trained = _train(setting, algorithm, federation, progress)
    seconds = time.perf_counter() - began
    cells = [
        CellRecord(
            row=cell.row,
            column=cell.column,
            reading=cell.reading,
            metric=cell.metric,
            paper=None if cell.paper is None else cell.paper[0],
            paper_interval=None if cell.paper is None else cell.paper[1],
            scorings=[_scoring_record(name, one, cell, trained) for name, one in cell.scorings.items()],
            algorithm={} if cell.is_baseline else to_dict(algorithm),
            chosen="" if cell.is_baseline else chosen,
            seconds=seconds,
            is_baseline=cell.is_baseline,
            curve=trained.curves.get(at),
            **({} if cell.is_baseline else trained.left_out),
        )
        for at, cell in enumerate(training.cells)
    ]
    write_atomically(_path_of(folder, training), TRAINING.dump_json(TrainingRecord(fingerprint, cells)))
    return cells


def _keys(seeds: list[int]) -> Array:
    return jnp.stack([jax.random.key(seed) for seed in seeds])


def _fingerprint(training: PaperTraining, federation: Federation, seeds: list[int]) -> str:
    """Fingerprint a training by its network, algorithms, scorings and schedules."""
    keys = _keys(seeds)
    schedules = [training.schedule(key=key) for key in keys]
    if training.search is not None:
        schedules.append(training.search(key=keys[0]))
    algorithms = {name: to_dict(one) for name, one in _candidates(training).items()}
    measures = [
        (cell.metric, cell.at, name, repr(one)) for cell in training.cells for name, one in cell.scorings.items()
    ]
    stated = json.dumps([training.data, algorithms, measures, training.every], sort_keys=True)
    digest = hashlib.sha256(stated.encode())
    digest.update(_written_out(training.task, federation).encode())
    for schedule in schedules:
        for column in (schedule.client, schedule.started_at, schedule.time, schedule.aggregated):
            digest.update(column.tobytes())
    return digest.hexdigest()


def _written_out(task: Task, federation: Federation) -> str:
    """Return the network's initialization and loss as programs, which are independent of their names."""
    data, key = federation.train, jax.random.key(0)
    batch = Batch(data.x[:1], data.y[:1], jnp.ones(1), key)
    init = jax.jit(lambda key: task.model.init(key, as_inputs(batch.x)))
    programs = (init.lower(key), jax.jit(task.loss).lower(jax.eval_shape(init, key), batch))
    return "".join(program.as_text() for program in programs)


def _candidates(training: PaperTraining) -> dict[str, Algorithm]:
    return {"": training.algorithm} if isinstance(training.algorithm, Algorithm) else dict(training.algorithm)


class _TrainedScores(NamedTuple):
    """The scores at the start (if a cell needs them) and at the end, and the curve of each cell.

    `num_left_out` counts nonfinite updates, which are left out of the averages so that one diverging client does not
    end the run.
    """

    start: dict[Measure, Scores]
    end: dict[Measure, Scores]
    curves: dict[int, CurveRecord]
    num_left_out: int
    num_updates: int

    @property
    def left_out(self) -> dict[str, int]:
        """Return the number of updates that were left out and of all updates, if any was left out."""
        return {"num_left_out": self.num_left_out, "num_updates": self.num_updates} if self.num_left_out else {}


def _train(
    setting: _TrainingSetting, algorithm: Algorithm, federation: Federation, progress: Progress
) -> _TrainedScores:
    """Train with all seeds, and record the first scoring of each trained cell."""
    training, schedules, keys = setting
    cells, length = training.cells, _length(schedules[0])
    every = training.every or -(-length // NUM_PARTS)
    asked = lambda at: {one for cell in cells if cell.at == at for one in cell.scorings.values()}
    followed = {at: next(iter(cell.scorings.values())) for at, cell in enumerate(cells) if not cell.is_baseline}
    start: dict[Measure, Scores] = {}
    points, chunks, mark = [], [], [time.perf_counter()]

    def observe(snapshot: Snapshot) -> None:
        if not chunks and asked("start"):
            start.update(_score(setting, algorithm, federation, snapshot, asked("start")))
        jax.block_until_ready(snapshot.params)
        chunks.append(time.perf_counter() - mark[0])
        progress(len(chunks) - 1, -(-length // every))
        if training.every is not None:
            scored = _score(setting, algorithm, federation, snapshot, set(followed.values()))
            values = [scored[one][cells[at].metric] for at, one in followed.items()]
            points.append((int(np.min(snapshot.state.server.version)), float(np.mean(snapshot.time)), values))
        mark[0] = time.perf_counter()

    monitor = Monitor(observe, every)
    skips = Execution(on_nonfinite="skip")
    run = simulate(algorithm, training.task, federation, schedules, key=keys, monitor=monitor, execution=skips)
    end = run.snapshot
    found = _score(setting, algorithm, federation, end, asked("end"))
    curves = dict(zip(followed, _curves(points, chunks), strict=True)) if points else {}
    num_updates = sum(schedule.num_events for schedule in schedules)
    return _TrainedScores(start, found, curves, int(np.sum(end.state.faults.num)), num_updates)


def _length(schedule: Schedule) -> int:
    """Return the number of rounds or events of a run."""
    return int(schedule.round_ends.sum()) if schedule.has_rounds else schedule.num_events


def _score(
    setting: _TrainingSetting, algorithm: Algorithm, federation: Federation, at: Snapshot, measures: set[Measure]
) -> dict[Measure, Scores]:
    """Evaluate these measures for each seed."""
    training, schedules, keys = setting
    found = {}
    for one in measures:
        if isinstance(one, Scoring):
            found[one] = _of_seeds(evaluate(algorithm, training.task, federation, at, one, key=keys))
        else:
            found[one] = {one.metric: one.of_seeds(MeasuredRun(training.task, federation, schedules, at))}
    return found


def _curves(points: list[tuple[int, float, list[list[float]]]], chunks: list[float]) -> list[CurveRecord]:
    """Return a curve for each cell. Each chunk counts the median time, because the first one includes compilation."""
    rounds, times, values = (list(column) for column in zip(*points, strict=True))
    typical = float(np.median(chunks[2:] or chunks[1:]))
    seconds = [typical * at for at in range(len(points))]
    return [
        CurveRecord(rounds, seconds, times if any(times) else [], list(of_cell))
        for of_cell in zip(*values, strict=True)
    ]


def _choose(setting: _TrainingSetting, federation: Federation) -> tuple[str, Algorithm]:
    """Choose the candidate with the best validation mean, by the first scoring that does not adapt on scored data."""
    training, schedules, keys = setting
    candidates = _candidates(training)
    if len(candidates) == 1:
        return next(iter(candidates.items()))
    if training.search is not None:
        keys = keys[:1]
        schedules = [training.search(key=keys[0])]
    held = validation_of(federation, jax.random.key(0))
    cell, scores = training.cells[0], {}
    honest = next(one for one in cell.scorings.values() if not one.flag)
    sign = 1 if higher_is_better(cell.metric) else -1
    pauses = Monitor(lambda snapshot: None, every=-(-_length(schedules[0]) // NUM_PARTS))
    run = (list(candidates.values()), training.task, held, lambda algorithm: schedules, keys)
    for (name, algorithm), end in zip(candidates.items(), run_all(*run, monitor=pauses), strict=True):
        if end is not None:
            found = _score(_TrainingSetting(training, schedules, keys), algorithm, held, end, {honest})[honest]
            scores[name] = sign * float(np.mean(found[cell.metric]))
    if not scores:
        raise ValueError(
            f"All candidates of {cell.row}, {cell.column} diverged: {', '.join(candidates)}. Add smaller step sizes."
        )
    best = max(scores, key=lambda name: scores[name])
    return best, candidates[best]


def _of_seeds(found: Evaluation) -> Scores:
    """Return each metric's mean over clients for each seed, in the papers' units (accuracies in %)."""
    scale = lambda metric: 100.0 if is_share(metric) else 1.0
    return {metric: (scale(metric) * np.atleast_1d(found.mean(metric))).tolist() for metric in found.metrics}


def _scoring_record(name: str, measure: Measure, cell: Cell, trained: _TrainedScores) -> ScoringRecord:
    """Record one scoring of a cell, with the number of updates left out in its flag."""
    of_seeds = (trained.start if cell.at == "start" else trained.end)[measure][cell.metric]
    num = 0 if cell.is_baseline else trained.num_left_out
    left_out = left_out_words(num, trained.num_updates) if num else ""
    flag = "; ".join(filter(None, (measure.flag, left_out)))
    return ScoringRecord(name, measure.describe(), flag, interval(of_seeds), of_seeds)


def reading_record(reading: Reading) -> ReadingRecord:
    """Return the record of a reading."""
    return ReadingRecord(reading.name, reading.words, reading.source, reading.excluded)
