"""Run a configuration into a folder: train and score each algorithm, and lose nothing when interrupted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import pyarrow as pa

from personax.algorithms import Algorithm
from personax.evaluation.evaluate import adaptation_curve, evaluate
from personax.evaluation.scores import Evaluation, show
from personax.experiment import checkpoint
from personax.experiment.build import Study, Training, build, make_schedules
from personax.experiment.config import Config, dump_run, load_run
from personax.experiment.convergence import Convergence, can_follow, tracker_of
from personax.experiment.folders import Folder, refuse_used, tidy
from personax.experiment.records import AdaptationRecord, BoundRecord, EvaluationRecord, RunRecord
from personax.experiment.results import (
    AlgorithmResult,
    algorithm_record,
    export_model,
    federation_rows,
    metrics_lines,
    read_part,
    write_part,
    write_run,
)
from personax.experiment.summaries import (
    activity_of,
    adaptation_record,
    data_citations,
    evaluation_record,
    federation_record,
    headline_of,
    name_of_personal_number,
    newcomer_scoring,
    personal_numbers,
    score_record,
    staleness_of,
)
from personax.experiment.suspicions import suspicions_of
from personax.schedules import Schedule
from personax.simulation.execution import Execution, Monitor
from personax.simulation.results import Result, Snapshot
from personax.simulation.simulate import PlannedRun, plan_run, run_plan

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
    """A resolved configuration, and everything that follows from it before training."""

    config: Config
    plan: Study
    runs: dict[str, PlannedRun]  # of each algorithm, all seeds together
    suspicions: list[str]  # about the data, for people


def prepare(config: Config) -> Work:
    """Build and check everything that a run computes with."""
    plan = build(config)
    execution = Execution(cohort_chunk=config.schedule.cohort_chunk, precision=config.precision)
    runs = {}
    for training in plan.trainings:
        algorithm = training.algorithm
        schedules = make_schedules(config, algorithm, plan.federation.num_clients)
        tracker = tracker_of(algorithm) if _follows(config, algorithm) else None
        given = (algorithm, plan.task, plan.federation, schedules)
        runs[training.name] = plan_run(*given, key=plan.keys, tracker=tracker, execution=execution)
    return Work(config, plan, runs, suspicions_of(plan))


def _follows(config: Config, algorithm: Algorithm) -> bool:
    """Return True if the stationarity of an algorithm is wanted and can be followed."""
    return config.evaluation.stationarity and can_follow(algorithm)


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
    work = work or prepare(load_run(folder.config))
    config, plan = work.config, work.plan
    for text in work.suspicions:
        watch.note(f"Warning: {text}")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    folder.metrics.write_bytes(b"")
    results = []
    for training in plan.trainings:
        if folder.part(training.name).exists():
            result = read_part(folder, training, len(config.seed_list))
            _append_metrics(folder, training.name, {score.name: score.evaluations for score in result.record.scores})
        else:
            result = _train(work, training, folder, watch, checkpoint_seconds, listeners)
            write_part(folder, result)
        results.append(result)
    about = federation_record(plan.federation, data_citations(config))
    record = write_run(folder, config, about, results, started, (plan.local_baseline, plan.global_baseline))
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
            position = int(np.atleast_1d(found.num_events)[0]) // self.cohort
            self.history[name].append(evaluation_record(found, position, self.seconds["train"], **of_run))
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
    work: Work,
    training: Training,
    folder: Folder,
    watch: Watch,
    checkpoint_seconds: float,
    listeners: Sequence[Listener],
) -> AlgorithmResult:
    """Train one algorithm from its last checkpoint to the end, write its model, and return its results."""
    (config, plan, runs), name, algorithm = work[:3], training.name, training.algorithm
    run, place = runs[name], folder.checkpoints(name)
    cohort = run.schedules[0].num_events // config.schedule.num_rounds
    scored = (algorithm, plan.task, plan.federation)
    ask = lambda snapshot, score: evaluate(*scored, snapshot, training.scorings[score], key=plan.keys)
    session = _Session(ask, training, cohort, Convergence(plan, algorithm) if _follows(config, algorithm) else None)
    begin = _restore(session, run, place, watch)
    _append_metrics(folder, name, session.history)
    watch.begin(name, config.schedule.num_rounds, 0 if begin is None else session.round)
    saved = time.monotonic()

    def observe(snapshot: Snapshot) -> None:
        nonlocal saved
        session.observe(snapshot)
        latest = {score: history[-1:] for score, history in session.history.items()}
        _append_metrics(folder, name, latest)
        for listen, (score, history) in product(listeners, latest.items()):
            listen(name, score, history[-1])
        if time.monotonic() - saved >= checkpoint_seconds:
            session.save(place)
            saved = time.monotonic()
        watch.advance(name, session.round, _latest(session.found))
        session.restart_clock()

    every = config.evaluation.every * (1 if run.schedules[0].has_rounds else cohort)
    try:
        result = run_plan(run, start=begin, monitor=Monitor(observe, every))
    except KeyboardInterrupt:
        session.save(place)
        raise
    if not session.found:  # the checkpoint was of the end
        session.found = {score: ask(result.snapshot, score) for score in training.scorings}
    session.seen = result.snapshot, session.num_evaluations
    session.save(place)
    found = _result(work, session, result)
    _export(config, plan, training, folder, result)
    watch.end(name, session.seconds)
    return found


def _restore(session: _Session, run: PlannedRun, place: Path, watch: Watch) -> Snapshot | None:
    """The snapshot of the last checkpoint, if there is one, with the session's history up to it."""
    if not place.exists():
        return None
    saved = checkpoint.load(place, lambda about: run.state_shapes(about["events"]), notify=watch.note)
    if saved is None:
        return None
    session.history = {
        name: [EvaluationRecord(**one) for one in records] for name, records in saved.about["history"].items()
    }
    session.seconds = saved.about["seconds"]
    events, times = np.asarray(saved.about["events"]), np.asarray(saved.about["time"])
    return Snapshot(saved.tree, saved.about["wave"], events, times, tuple(run.schedules), run.run.federation.ids)


def _result(work: Work, session: _Session, result: Result) -> AlgorithmResult:
    """The results of one algorithm: its record, its last scores and its clients' numbers."""
    config, plan, training = work.config, work.plan, session.training
    algorithm, schedule = training.algorithm, work.runs[training.name].schedules[0]
    curves = {score: _newcomers(config, plan, training, score, result) for score in training.scorings}
    bound = None if session.convergence is None else _bound(session, schedule, result)
    session.spend("evaluate")
    scorings = training.scorings.items()
    record = algorithm_record(
        training,
        personal_number=name_of_personal_number(algorithm, result.params),
        num_rounds=config.schedule.num_rounds,
        num_events=schedule.num_events,
        seconds=session.seconds,
        bytes_up=float(result.bytes_up[0].sum()),
        bytes_down=float(result.bytes_down[0].sum()),
        num_dropped=np.atleast_1d(result.num_dropped).tolist(),
        num_skipped=np.atleast_1d(result.num_skipped).tolist(),
        scores=[score_record(score, scoring, session.history[score], curves[score]) for score, scoring in scorings],
        staleness=staleness_of(algorithm, schedule),
        active=activity_of(schedule),
        bound=bound,
    )
    own = personal_numbers(algorithm, result.snapshot)
    rows = [
        federation_rows((training.name, score), config.seed_list, plan.federation, found, own)
        for score, found in session.found.items()
    ]
    return AlgorithmResult(record, session.found, pa.concat_tables(rows, promote_options="default"))


def _bound(session: _Session, schedule: Schedule, result: Result) -> BoundRecord:
    """The theorem's bound at the rounds that were evaluated."""
    assert session.convergence is not None  # or it was not wanted
    evaluated = [one.round for one in next(iter(session.history.values())) if one.round]
    return session.convergence.bound(schedule, jax.tree.map(lambda leaf: leaf[0], result.params), evaluated)


def _export(config: Config, plan: Study, training: Training, folder: Folder, result: Result) -> None:
    """Write the first seed's shared model."""
    model = jax.tree.map(lambda leaf: leaf[0], (result.params, result.shared))
    export_model(folder, config, training.name, plan.federation.schema, model)


def _newcomers(config: Config, plan: Study, training: Training, score: str, result: Result) -> AdaptationRecord | None:
    scoring = newcomer_scoring(training.algorithm, training.scorings[score])
    steps = config.evaluation.adaptation_steps
    if plan.federation.newcomers is None or scoring is None or not steps:
        return None
    run = (training.algorithm, plan.task, plan.federation, result)
    return adaptation_record(scoring, adaptation_curve(*run, scoring, steps, key=plan.keys))


def _append_metrics(folder: Folder, algorithm: str, histories: dict[str, list[EvaluationRecord]]) -> None:
    with folder.metrics.open("a", encoding="utf-8") as file:
        file.write(metrics_lines(algorithm, histories))


def _latest(found: dict[str, Evaluation]) -> str:
    """The last numbers, for a progress bar."""
    metric = headline_of(list(next(iter(found.values())).metrics))
    return ", ".join(f"{show(float(np.mean(one.mean(metric))), metric)}" for one in found.values())
