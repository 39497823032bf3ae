"""Run a configuration into a folder: train and score each algorithm, and lose nothing when interrupted."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from personax.evaluation.evaluate import adaptation_curve, evaluate
from personax.evaluation.scores import Evaluation, show
from personax.experiment import checkpoint
from personax.experiment.build import Study, Training, build, make_schedules, outputs_of
from personax.experiment.config import Config, dump_run, load_run
from personax.experiment.convergence import Convergence, can_follow
from personax.experiment.folders import Folder, refuse_used, tidy
from personax.experiment.records import (
    RUN,
    SCHEMA_VERSION,
    AdaptationRecord,
    AlgorithmRecord,
    EvaluationRecord,
    RunRecord,
)
from personax.experiment.summaries import (
    activity_of,
    adaptation_record,
    citations_of,
    client_rows,
    data_citations,
    evaluation_of,
    evaluation_record,
    federation_record,
    headline_of,
    machine,
    name_of_personal_number,
    newcomer_scoring,
    personal_numbers,
    score_record,
    staleness_of,
    table_rows,
)
from personax.schedules import Schedule
from personax.simulation.checks import check_run
from personax.simulation.execution import Execution, Monitor
from personax.simulation.results import Result, Snapshot
from personax.simulation.simulate import simulate, state_shapes
from personax.values import to_dict

_PART = TypeAdapter(AlgorithmRecord)
_COMPILED = [0.0]  # seconds that XLA has compiled in this process


def _count_compilation(event: str, duration_secs: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED[0] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


class Watch(Protocol):
    """Receives the progress of a run."""

    def begin(self, name: str, num_rounds: int, done: int) -> None: ...
    def advance(self, name: str, done: int, latest: str) -> None: ...
    def end(self, name: str, seconds: dict[str, float]) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    """A watch that ignores everything."""

    def begin(self, name: str, num_rounds: int, done: int) -> None: ...
    def advance(self, name: str, done: int, latest: str) -> None: ...
    def end(self, name: str, seconds: dict[str, float]) -> None: ...
    def note(self, text: str) -> None: ...


class Work(NamedTuple):
    """A resolved configuration, and all that follows from it before anything is trained."""

    config: Config
    plan: Study
    schedules: dict[str, list[Schedule]]  # of each algorithm, one for each seed


def prepare(config: Config) -> Work:
    """Build what a run computes with; whatever does not fit together is an error."""
    plan = build(config)
    schedules = {}
    for name, _, algorithm, _ in plan.trainings:
        schedules[name] = make_schedules(config, algorithm, plan.federation.num_clients)
        check_run(algorithm, plan.federation, schedules[name], len(plan.keys), None)
    return Work(config, plan, schedules)


def start(config: Config, root: Path) -> Folder:
    """A new run folder with the resolved configuration in it."""
    refuse_used(root)
    folder = Folder(root)
    root.mkdir(parents=True, exist_ok=True)
    checkpoint.write_atomically(folder.config, dump_run(config).encode())
    return folder


Listener = Callable[[str, str, EvaluationRecord], None]  # algorithm, score, evaluation


def execute(
    folder: Folder,
    watch: Watch = Silent(),
    checkpoint_seconds: float = 10.0,
    listeners: Sequence[Listener] = (),
    work: Work | None = None,
) -> RunRecord:
    """Do what is left of a run, from wherever it stands, and write its results.

    Listeners are given each new evaluation. `work` is what `prepare` made of the folder's configuration, if it has.
    """
    config, plan, schedules = work or prepare(load_run(folder.config))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    folder.metrics.write_bytes(b"")
    for training in plan.trainings:
        if folder.part(training.name).exists():
            scores = _part(folder, training.name).scores
            _append_metrics(folder, training.name, {score.name: score.evaluations for score in scores})
        else:
            _train(config, plan, training, schedules[training.name], folder, watch, checkpoint_seconds, listeners)
    parts = [_part(folder, training.name) for training in plan.trainings]
    tables = {training.name: pq.read_table(folder.part_clients(training.name)) for training in plan.trainings}
    record = _record(config, plan, parts, tables, started)
    _write_table(folder.clients, pa.concat_tables(tables.values(), promote_options="default"))
    checkpoint.write_atomically(folder.results, RUN.dump_json(record, indent=1))
    tidy(folder)
    return record


class _Session:
    """What a run calls between its waves: score, record, save."""

    def __init__(
        self,
        ask: Callable[[Snapshot, str], Evaluation],
        training: Training,
        cohort: int,
        convergence: Convergence | None,
    ) -> None:
        self.ask, self.training, self.cohort, self.convergence = ask, training, cohort, convergence
        self.history: dict[str, list[EvaluationRecord]] = {name: [] for name in training.scorings}
        self.seconds = {"compile": 0.0, "train": 0.0, "evaluate": 0.0}
        self.found: dict[str, Evaluation] = {}
        self.seen: tuple[Snapshot, int] | None = None  # the last, and the number of evaluations up to it
        self.began = self.compiled = 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        self.began, self.compiled = time.perf_counter(), _COMPILED[0]

    def spend(self, on: str) -> None:
        """Count the time since the last call; what XLA compiled meanwhile is counted as that."""
        compiled = _COMPILED[0] - self.compiled
        self.seconds["compile"] += compiled
        self.seconds[on] += max(time.perf_counter() - self.began - compiled, 0.0)
        self.restart_clock()

    def observe(self, snapshot: Snapshot) -> None:
        """Score the run where it stands."""
        jax.block_until_ready(snapshot.params)
        self.spend("train")
        self.found = {name: self.ask(snapshot, name) for name in self.training.scorings}
        at, iterate = (None, None) if self.convergence is None else self.convergence.at(snapshot)
        self.spend("evaluate")
        own = personal_numbers(self.training.algorithm, snapshot)
        of_run = {
            "personal_number": None if own is None else np.atleast_1d(np.mean(own, axis=-1)).tolist(),
            "stationarity": at,
            "iterate_stationarity": iterate,
        }
        for name, found in self.found.items():
            record = evaluation_record(found, snapshot, self.cohort, self.seconds["train"], **of_run)
            self.history[name].append(record)
        self.seen = snapshot, self.num_evaluations  # at once: an interrupt may come anywhere, and these must agree

    @property
    def num_evaluations(self) -> int:
        return min(map(len, self.history.values()))

    @property
    def round(self) -> int:
        """Of the last evaluation."""
        return next(iter(self.history.values()))[-1].round

    def save(self, place: Path) -> None:
        """Write a checkpoint of the last observation, if there was one."""
        if self.seen is not None:
            snapshot, num = self.seen
            about = {
                "wave": snapshot.wave,
                "events": np.asarray(snapshot.num_events).tolist(),
                "time": np.asarray(snapshot.time).tolist(),
                "seconds": self.seconds,
                "history": {name: [asdict(one) for one in records[:num]] for name, records in self.history.items()},
            }
            checkpoint.save(place, snapshot.wave, snapshot.state, about)


def _train(
    config: Config,
    plan: Study,
    training: Training,
    schedules: list[Schedule],
    folder: Folder,
    watch: Watch,
    checkpoint_seconds: float,
    listeners: Sequence[Listener],
) -> None:
    """Train one algorithm from its last checkpoint to the end, and write its part of the results."""
    name, algorithm = training.name, training.algorithm
    run = (algorithm, plan.task, plan.federation)
    cohort = schedules[0].num_events // config.schedule.num_rounds
    ask = lambda snapshot, score: evaluate(*run, snapshot, training.scorings[score], key=plan.keys)
    wanted = config.evaluation.stationarity and can_follow(algorithm)
    session = _Session(ask, training, cohort, Convergence(plan, algorithm) if wanted else None)
    tracker = session.convergence.tracker if session.convergence is not None else None
    begin = _restore(session, plan, schedules, folder.checkpoints(name), watch)
    _append_metrics(folder, name, session.history)
    watch.begin(name, config.schedule.num_rounds, 0 if begin is None else session.round)
    saved = time.monotonic()

    def save() -> None:
        nonlocal saved
        session.save(folder.checkpoints(name))
        saved = time.monotonic()

    def observe(snapshot: Snapshot) -> None:
        session.observe(snapshot)
        latest = {score: history[-1:] for score, history in session.history.items()}
        _append_metrics(folder, name, latest)
        for listen, (score, history) in product(listeners, latest.items()):
            listen(name, score, history[-1])
        if time.monotonic() - saved >= checkpoint_seconds:
            save()
        watch.advance(name, session.round, _latest(session.found))
        session.restart_clock()

    every = config.evaluation.every * (1 if schedules[0].has_rounds else cohort)
    try:
        execution = Execution(cohort_chunk=config.schedule.cohort_chunk, precision=config.precision)
        monitor = Monitor(observe, every, tracker)
        result = simulate(*run, schedules, key=plan.keys, start=begin, monitor=monitor, execution=execution)
    except KeyboardInterrupt:
        save()
        raise
    if not session.found:  # the checkpoint was of the end
        session.found = {score: ask(result.snapshot, score) for score in training.scorings}
    session.seen = result.snapshot, session.num_evaluations
    save()
    _write_part(config, plan, training, schedules, folder, session, result)
    watch.end(name, session.seconds)


def _restore(session: _Session, plan: Study, schedules: list[Schedule], place: Path, watch: Watch) -> Snapshot | None:
    """The snapshot of the last checkpoint, if there is one, with the session's history up to it."""
    if not place.exists():
        return None
    algorithm = session.training.algorithm
    tracker = session.convergence.tracker if session.convergence is not None else None
    run = (algorithm, plan.task, plan.federation, schedules)
    shapes = lambda about: state_shapes(*run, key=plan.keys, tracker=tracker, num_events=about["events"])
    saved = checkpoint.load(place, shapes, notify=watch.note)
    if saved is None:
        return None
    session.history = {
        name: [EvaluationRecord(**one) for one in records] for name, records in saved.about["history"].items()
    }
    session.seconds = saved.about["seconds"]
    events, times = np.asarray(saved.about["events"]), np.asarray(saved.about["time"])
    return Snapshot(saved.tree, saved.about["wave"], events, times, tuple(schedules), plan.federation.ids)


def _write_part(
    config: Config,
    plan: Study,
    training: Training,
    schedules: list[Schedule],
    folder: Folder,
    session: _Session,
    result: Result,
) -> None:
    """The results of one algorithm: its record, and its clients' numbers."""
    name, algorithm = training.name, training.algorithm
    curves = {score: _newcomers(config, plan, training, score, result) for score in training.scorings}
    bound = None
    if session.convergence is not None:
        evaluated = [one.round for one in next(iter(session.history.values())) if one.round]
        end = jax.tree.map(lambda leaf: leaf[0], result.params)
        bound = session.convergence.bound(schedules[0], end, evaluated)
    session.spend("evaluate")
    scorings = training.scorings.items()
    record = AlgorithmRecord(
        name=name,
        recipe=training.recipe,
        definition=to_dict(algorithm),
        citations=citations_of(training.recipe, algorithm),
        mode="synchronous" if algorithm.server.is_synchronous else "asynchronous",
        personal_number=name_of_personal_number(algorithm, result.params),
        num_rounds=config.schedule.num_rounds,
        num_events=schedules[0].num_events,
        seconds=session.seconds,  # pyright: ignore[reportArgumentType]
        bytes_up=float(result.bytes_up[0].sum()),
        bytes_down=float(result.bytes_down[0].sum()),
        num_dropped=np.atleast_1d(result.num_dropped).tolist(),
        num_skipped=np.atleast_1d(result.num_skipped).tolist(),
        scores=[score_record(score, scoring, session.history[score], curves[score]) for score, scoring in scorings],
        staleness=staleness_of(algorithm, schedules[0]),
        active=activity_of(schedules[0]),
        bound=bound,
    )
    own = personal_numbers(algorithm, result.snapshot)
    rows = [
        client_rows(name, score, config.seed_list, plan.federation, found, own)
        for score, found in session.found.items()
    ]
    folder.parts.mkdir(exist_ok=True)
    _write_table(folder.part_clients(name), pa.concat_tables(rows, promote_options="default"))
    _export(config, plan, training, folder, result)
    checkpoint.write_atomically(folder.part(name), _PART.dump_json(record))


def _export(config: Config, plan: Study, training: Training, folder: Folder, result: Result) -> None:
    """The first seed's shared model, for `personax personalize` and for anyone who reads safetensors."""
    shared = dict(enumerate(jax.tree.leaves(result.shared)))
    first = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf[0]), tree)
    outputs = outputs_of(config, plan.federation)
    about = {
        "personax": version("personax"),
        "run": config.name,
        "algorithm": training.name,
        "seed": str(config.seed_list[0]),
        "task": outputs.kind,
        "num_outputs": str(outputs.num),
        "input_shape": json.dumps(plan.federation.x.shape[1:]),
        "input_dtype": str(plan.federation.x.dtype),
    }
    trees = {"params": first(result.params), "shared": {str(i): first(leaf) for i, leaf in shared.items()}}
    folder.models.mkdir(exist_ok=True)
    checkpoint.export(folder.model(training.name), trees, about)


def _newcomers(config: Config, plan: Study, training: Training, score: str, result: Result) -> AdaptationRecord | None:
    scoring = newcomer_scoring(training.algorithm, training.scorings[score])
    steps = config.evaluation.adaptation_steps
    if plan.federation.newcomers is None or scoring is None or not steps:
        return None
    run = (training.algorithm, plan.task, plan.federation, result)
    curve = adaptation_curve(*run, scoring, steps, key=plan.keys)
    return adaptation_record(scoring, curve)


def _record(
    config: Config, plan: Study, parts: list[AlgorithmRecord], tables: dict[str, pa.Table], started: str
) -> RunRecord:
    found = {
        score: evaluation_of(tables[training.name], score, scoring, len(config.seed_list))
        for training in plan.trainings
        for score, scoring in training.scorings.items()
    }
    metrics = list(dict.fromkeys(name for one in found.values() for name in one.metrics))
    algorithm_of = {score.name: part.name for part in parts for score in part.scores}
    return RunRecord(
        schema_version=SCHEMA_VERSION,
        personax=version("personax"),
        name=config.name,
        started=started,
        machine=machine(),
        seeds=config.seed_list,
        metrics=metrics,
        headline=headline_of(metrics),
        federation=federation_record(plan.federation, data_citations(config)),
        algorithms=parts,
        local_baseline=plan.local_baseline,
        global_baseline=plan.global_baseline,
        table=table_rows(algorithm_of, found, plan.local_baseline, plan.global_baseline),
    )


def _part(folder: Folder, name: str) -> AlgorithmRecord:
    return _PART.validate_json(folder.part(name).read_bytes())


def _append_metrics(folder: Folder, algorithm: str, histories: dict[str, list[EvaluationRecord]]) -> None:
    """A line for each evaluation, in the order in which they were made."""
    with folder.metrics.open("a", encoding="utf-8") as file:
        for records in zip(*histories.values(), strict=True):
            for score, one in zip(histories, records, strict=True):
                file.write(json.dumps({"algorithm": algorithm, "score": score, **asdict(one)}) + "\n")


def _write_table(path: Path, table: pa.Table) -> None:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    checkpoint.write_atomically(path, buffer.getvalue().to_pybytes())


def _latest(found: dict[str, Evaluation]) -> str:
    """The last numbers, for a progress bar."""
    metric = headline_of(list(next(iter(found.values())).metrics))
    return ", ".join(f"{show(float(np.mean(one.mean(metric))), metric)}" for one in found.values())
