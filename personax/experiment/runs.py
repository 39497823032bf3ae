"""Run a configuration into a folder: train and score each algorithm, and resume after interruptions."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import pyarrow as pa

from personax.algorithms import Algorithm
from personax.data.locks import taking_turns
from personax.evaluation.classes import count_classes
from personax.evaluation.evaluate import adaptation_curve, evaluate
from personax.evaluation.scores import Evaluation, is_share, show
from personax.experiment import checkpoint
from personax.experiment.build import Study, Training, build, make_schedules
from personax.experiment.config import Config, ConfigError, dump_run, load_run
from personax.experiment.control import check_control, control_of, controller_citations, end_records, from_json
from personax.experiment.convergence import Convergence, can_follow, tracker_of, why_not
from personax.experiment.divergence import diverged_seeds, divergence_records, named_error
from personax.experiment.folders import Folder, refuse_used, tidy
from personax.experiment.loggers.events import Evaluated, Listener, announced, send, started
from personax.experiment.provenance import Provenance, digest_data, provenance_of
from personax.experiment.records import (
    AdaptationRecord,
    BoundRecord,
    ClassesRecord,
    EvaluationRecord,
    RunRecord,
    read_results,
)
from personax.experiment.results import (
    AlgorithmResult,
    algorithm_record,
    export_model,
    federation_rows,
    metrics_lines,
    write_part,
    write_run,
)
from personax.experiment.session import Session
from personax.experiment.state import finished, forget, owning, refuse_lost
from personax.experiment.summaries import (
    activity_of,
    adaptation_record,
    classes_record,
    data_citations,
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
from personax.sharing import require_same_base
from personax.simulation.execution import Execution, Monitor
from personax.simulation.results import NonFiniteUpdate, Result, Snapshot
from personax.simulation.simulate import PlannedRun, plan_run, run_plan
from personax.simulation.speed import explain_speed
from personax.simulation.work import work_of


class Watch(Protocol):
    """A receiver of a run's progress."""

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
    """A resolved configuration with everything that is prepared before training."""

    config: Config
    plan: Study
    runs: dict[str, PlannedRun]  # one per algorithm, for all seeds together
    suspicions: list[str]  # warnings about the data
    devices: Sequence[Any] | None = None  # that share each cohort


def prepare(config: Config, only: str | None = None, devices: Sequence[Any] | None = None) -> Work:
    """Build and check everything that a run, or one of its algorithms, needs."""
    plan = build(config)
    chosen = [training for training in plan.trainings if only in (None, training.name)]
    runs = {training.name: planned(config, plan, training, devices) for training in chosen}
    for training in chosen:
        check_control(config, plan, training, runs[training.name].schedules)
    return Work(config, plan, runs, suspicions_of(plan), devices)


def planned(config: Config, plan: Study, training: Training, devices: Sequence[Any] | None = None) -> PlannedRun:
    """Plan the run of one algorithm; several devices share each cohort."""
    algorithm = training.algorithm
    how = "raise" if config.on_nonfinite == "raise" else "skip"  # a diverged seed keeps running but does not count
    chunk, precision = config.schedule.cohort_chunk, config.precision
    execution = Execution(chunk, on_nonfinite=how, precision=precision, devices=devices)
    work = work_of(algorithm, plan.task, plan.federation)
    own = config.scheduled_for(training.name)
    schedules = make_schedules(own, algorithm, plan.federation.num_clients, work)
    tracker = tracker_of(algorithm) if _follows(config, plan, algorithm) else None
    given = (algorithm, plan.task, plan.federation, schedules)
    return plan_run(*given, key=plan.keys, tracker=tracker, execution=execution)


def _follows(config: Config, plan: Study, algorithm: Algorithm) -> bool:
    """Return True if the stationarity of an algorithm is requested and can be tracked."""
    return config.evaluation.stationarity and can_follow(algorithm) and not why_not(plan, algorithm)


def start(config: Config, root: Path) -> Folder:
    """Create a run folder with the resolved configuration."""
    return _create(root, Folder(root).config, config)


def start_search(config: Config, root: Path) -> Folder:
    """Create a run folder with a resolved configuration whose options jobs will search for."""
    return _create(root, Folder(root).untuned, config)


def end_search(config: Config, folder: Folder) -> None:
    """Replace the configuration of a search with the one that has the options found."""
    checkpoint.write_atomically(folder.config, dump_run(config).encode())
    folder.untuned.unlink()


def _create(root: Path, path: Path, config: Config) -> Folder:
    refuse_used(root)
    folder = Folder(root)
    with _merging(folder):
        refuse_used(root)  # check again: another process may have been faster
        checkpoint.write_atomically(path, dump_run(config).encode())
    return folder


def _merging(folder: Folder) -> AbstractContextManager[None]:
    """Hold the lock on the parts that all algorithms of a run share: configuration and results."""
    folder.merging.parent.mkdir(parents=True, exist_ok=True)
    return taking_turns(folder.merging, lambda: None)


def execute(
    folder: Folder,
    watch: Watch = Silent(),
    checkpoint_seconds: float = 10.0,
    listeners: Sequence[Listener] = (),
    work: Work | None = None,
    fresh: Sequence[str] = (),
) -> RunRecord:
    """Complete a run from its current state, and write its results.

    Results and states that were computed with different settings or data are an error, except those of the algorithms
    in `fresh`, which are retrained. Listeners receive the events of `loggers.events`. `work` is the result of `prepare`
    for the folder's configuration, if the caller has it.
    """
    work = work or prepare(load_run(folder.config))
    config, plan = work.config, work.plan
    for text in work.suspicions:
        watch.note(f"Warning: {text}")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with owning(folder, [training.name for training in plan.trainings]):
        for name in fresh:
            forget(folder, name)
        provenances = provenances_of(work)
        done = finished(folder, plan.trainings, provenances, len(config.seed_list), watch.note)
        _retract(folder, watch, is_done=len(done) == len(plan.trainings))
        results = []
        for training in plan.trainings:
            result = done.get(training.name)
            if result is None:
                result = train(work, training, folder, watch, checkpoint_seconds, listeners, provenances)
                write_part(folder, result, provenances[training.name])
            else:
                _append_metrics(folder, training.name, _histories(result))
            results.append(result)
        return merge(work, folder, results, started)


def provenances_of(work: Work) -> dict[str, Provenance]:
    """Return the provenance of each algorithm's results with the current configuration and data."""
    data = digest_data(work.plan.federation)
    return {training.name: provenance_of(work.config, training.name, data) for training in work.plan.trainings}


def merge(work: Work, folder: Folder, results: Sequence[AlgorithmResult], started: str) -> RunRecord:
    """Write the results of a run whose algorithms have all ended."""
    config, plan = work.config, work.plan
    with _merging(folder):
        lines = "".join(metrics_lines(one.record.name, _histories(one)) for one in results)
        checkpoint.write_atomically(folder.metrics, lines.encode())
        about = federation_record(plan.federation, data_citations(config))
        baselines = (plan.local_baseline, plan.global_baseline)
        record = write_run(folder, config, about, results, started, baselines)
        tidy(folder)
    return record


def _retract(folder: Folder, watch: Watch, is_done: bool) -> None:
    """Restart the stream of metrics, and remove results that are damaged or incomplete."""
    folder.metrics.write_bytes(b"")
    if not is_done:
        folder.results.unlink(missing_ok=True)
    elif folder.results.exists():
        try:
            read_results(folder.root)
        except ValueError:
            watch.note(f"{folder.results} is damaged. Rebuilding it from the parts.")


def _histories(result: AlgorithmResult) -> dict[str, list[EvaluationRecord]]:
    return {score.name: score.evaluations for score in result.record.scores}


def train(
    work: Work,
    training: Training,
    folder: Folder,
    watch: Watch,
    checkpoint_seconds: float,
    listeners: Sequence[Listener],
    provenances: dict[str, Provenance],
) -> AlgorithmResult:
    """Train one algorithm from its last checkpoint to the end, write its model, and return its results."""
    config, plan, name, algorithm = work.config, work.plan, training.name, training.algorithm
    run, place = work.runs[name], folder.checkpoints(name)
    cohort = run.schedules[0].num_events // config.schedule.num_rounds
    scored = (algorithm, plan.task, plan.federation)
    ask = lambda snapshot, score: evaluate(*scored, snapshot, training.scorings[score], key=plan.keys)
    convergence = Convergence(plan, algorithm) if _follows(config, plan, algorithm) else None
    diverged = lambda snapshot: diverged_seeds(config, snapshot)
    session = Session(ask, diverged, training, cohort, convergence, provenances[name])
    control = control_of(config, plan, training, cohort)
    every = config.evaluation.every * (1 if run.schedules[0].has_rounds else cohort)
    try:
        begin = _restore(session, work, place, watch, every)
    except checkpoint.AllDamaged as problem:
        raise refuse_lost(folder, name, problem, provenances) from None
    _append_metrics(folder, name, session.history)
    watch.begin(name, config.schedule.num_rounds, 0 if begin is None else session.round)
    saved = time.monotonic()

    def observe(snapshot: Snapshot) -> None:
        nonlocal saved
        is_new = session.observe(snapshot)
        latest = {score: history[-1:] if is_new else [] for score, history in session.history.items()}
        _append_metrics(folder, name, latest)
        for score, history in latest.items() if is_new else ():
            send(listeners, Evaluated(name, score, history[-1]))
        if time.monotonic() - saved >= checkpoint_seconds:
            session.save(place)
            saved = time.monotonic()
        watch.advance(name, session.round, _latest(session.found))
        session.restart_clock()

    try:
        with announced(listeners, started(folder.root, config, name, session.history)):
            monitor = Monitor(observe, every, until=session.has_ended, control=control)
            result = run_plan(run, start=begin, monitor=monitor)
    except KeyboardInterrupt:
        session.save(place)
        raise
    except NonFiniteUpdate as error:
        raise named_error(name, error, config, plan.federation, cohort) from None
    if not session.found:  # the checkpoint was at the end, or all seeds diverged
        session.found = {score: session.score(result.snapshot, score) for score in training.scorings}
    session.seen = result.snapshot, session.num_evaluations
    session.save(place)
    found = _result(work, session, result)
    _export(config, plan, training, folder, result)
    watch.end(name, session.seconds)
    num_visits = run.schedules[0].num_events * len(run.schedules)
    if slow := explain_speed(*scored, num_visits, session.seconds["train"]):
        watch.note(f"{name}: {slow}")
    return found


def _restore(session: Session, work: Work, place: Path, watch: Watch, every: int) -> Snapshot | None:
    """Restore the last checkpoint of this run, if any, and the session's history up to it."""
    name = session.training.name
    run = work.runs[name]
    shapes, accept = lambda about: shapes_of(run, about), _on_the_way(work, session.training)
    saved = checkpoint.load(place, shapes, notify=watch.note, accept=accept)
    if saved is None:
        if checkpoint.peek(place) is not None:
            watch.note(f"Training {name} from the beginning: its last models are incomplete on disk.")
        checkpoint.discard(place)
        return None
    checkpoint.discard(place, above=saved.number)
    run = run.controlled(from_json(saved.about))
    pauses = run.pauses(every)  # a shorter run may have ended at a point where this one does not pause
    if run.has_ended:
        pauses.append(saved.about["events"])
    session.history = {
        score: [EvaluationRecord(**one) for one in records if one["events"] in pauses]
        for score, records in saved.about["history"].items()
    }
    session.seconds = saved.about["seconds"]
    return snapshot_of(run, saved)


def shapes_of(run: PlannedRun, about: dict[str, Any]) -> Any:
    """Return the shapes of the state in a checkpoint, from its metadata."""
    return run.controlled(from_json(about)).state_shapes(about["events"])


def snapshot_of(run: PlannedRun, saved: checkpoint.Checkpoint) -> Snapshot:
    """Rebuild the snapshot of a checkpoint."""
    run = run.controlled(from_json(saved.about))
    events, times = np.asarray(saved.about["events"]), np.asarray(saved.about["time"])
    unshared = run.unshared()
    remedy = "Restore the base of the model, or retrain with --fresh."
    require_same_base(unshared.fingerprint, saved.about.get("base", ""), "The checkpoint", remedy)
    at = (saved.about["wave"], events, times)
    return Snapshot(saved.tree, *at, tuple(run.schedules), run.run.federation.ids, unshared, run.control)


def _on_the_way(work: Work, training: Training) -> Callable[[dict[str, Any]], bool]:
    """Make a predicate that is True if a checkpoint, possibly of a shorter run, is a state of this run."""
    config, plan, run = work.config, work.plan, work.runs[training.name]

    @cache
    def shorter(num_rounds: int) -> PlannedRun:
        schedule = replace(config.schedule, num_rounds=num_rounds)
        found = planned(replace(config, schedule=schedule), plan, training, work.devices)
        if not all(map(Schedule.begins_with, run.schedules, found.schedules)):
            raise ConfigError(
                f"`{training.name}` was trained for {num_rounds} rounds, but the schedule of the longer run starts "
                "differently. Restore `schedule.num_rounds`, or retrain it with --fresh."
            )
        return found

    def accept(about: dict[str, Any]) -> bool:
        num_rounds = about["provenance"]["num_rounds"]
        return num_rounds == config.schedule.num_rounds or run.shares(shorter(num_rounds), about["wave"])

    return accept


def _result(work: Work, session: Session, result: Result) -> AlgorithmResult:
    """Collect the results of one algorithm: its record, its final scores and its clients' values."""
    config, plan, training = work.config, work.plan, session.training
    algorithm, schedule = training.algorithm, result.snapshot.schedules[0]
    num_events, diverged = int(np.max(result.snapshot.num_events)), session.diverged(result.snapshot)
    curves = {score: _newcomers(config, plan, training, score, result) for score in training.scorings}
    classes = {score: _classes(plan, session, score, result) for score in training.scorings}
    bound = None if session.convergence is None else _bound(session, schedule, result)
    if config.evaluation.stationarity and (reason := why_not(plan, algorithm)):
        bound = BoundRecord(f"No theorem covers this run, and its stationarity is not tracked: {reason}", [], [])
    session.spend("evaluate")
    scorings = training.scorings.items()
    record = algorithm_record(
        training,
        controller_citations(config, training.name),
        personal_number=name_of_personal_number(algorithm, result.params),
        num_rounds=num_events // session.cohort,
        num_events=num_events,
        seconds=session.seconds,
        bytes_up=float(result.bytes_up.sum(axis=1).mean()),
        bytes_down=float(result.bytes_down.sum(axis=1).mean()),
        num_dropped=np.atleast_1d(result.num_dropped).tolist(),
        num_skipped=np.atleast_1d(result.num_skipped).tolist(),
        scores=[
            score_record(
                score, scoring, session.history[score], curves[score], diverged, classes[score], algorithm.divided
            )
            for score, scoring in scorings
        ],
        staleness=staleness_of(algorithm, schedule),
        active=activity_of(schedule),
        bound=bound,
        divergences=divergence_records(config, plan.federation, result.snapshot, session.cohort),
        ended=end_records(config, result.snapshot, session.cohort),
    )
    own = personal_numbers(algorithm, result.snapshot)
    rows = [
        federation_rows((training.name, score), config.seed_list, plan.federation, found, own, diverged)
        for score, found in session.found.items()
    ]
    return AlgorithmResult(record, session.found, pa.concat_tables(rows, promote_options="default"))


def _bound(session: Session, schedule: Schedule, result: Result) -> BoundRecord:
    """Compute the theorem's bound at the evaluated rounds."""
    assert session.convergence is not None  # because it was requested
    if 0 in session.diverged(result.snapshot):
        return BoundRecord("No theorem covers this run: its first seed diverged", [], [])
    evaluated = [one.round for one in next(iter(session.history.values())) if one.round]
    return session.convergence.bound(schedule, jax.tree.map(lambda leaf: leaf[0], result.params), evaluated)


def _export(config: Config, plan: Study, training: Training, folder: Folder, result: Result) -> None:
    """Write the shared model of the first seed that did not diverge, if there is one."""
    diverged = diverged_seeds(config, result.snapshot)
    seed = next((seed for seed in range(len(config.seed_list)) if seed not in diverged), None)
    if seed is None:
        return
    model = jax.tree.map(lambda leaf: leaf[seed], (result.params, result.shared))
    base = result.snapshot.of_seeds(seed, seed + 1).unshared.fingerprint
    export_model(folder, config, training, plan.federation.schema, model, seed, base)


def _newcomers(config: Config, plan: Study, training: Training, score: str, result: Result) -> AdaptationRecord | None:
    scoring = newcomer_scoring(training.algorithm, training.scorings[score])
    steps = config.evaluation.adaptation_steps
    if plan.federation.newcomers is None or scoring is None or not steps:
        return None
    diverged = diverged_seeds(config, result.snapshot)
    if len(diverged) == len(config.seed_list):
        return None
    run = (training.algorithm, plan.task, plan.federation, result)
    if training.algorithm.sharing.is_completed_by_clients:  # without a step, a part is untrained
        steps = sorted({*filter(None, steps), scoring.num_steps})
    curve = adaptation_curve(*run, scoring, steps, key=plan.keys)
    kept = {num: found.without_seeds(diverged) for num, found in curve.items()}
    return adaptation_record(scoring, kept, training.algorithm.divided)


def _classes(plan: Study, session: Session, score: str, result: Result) -> ClassesRecord | None:
    """Count the results per class; None without classes or test data, or if all seeds diverged."""
    scoring, diverged = session.training.scorings[score], session.diverged(result.snapshot)
    counted = "accuracy" in session.history[score][-1].mean and scoring.score_on == "test"
    if not (plan.federation.schema.classes and counted) or session.has_ended(result.snapshot):
        return None
    run = (session.training.algorithm, plan.task, plan.federation, result)
    return classes_record(count_classes(*run, scoring, key=plan.keys), diverged)


def _append_metrics(folder: Folder, algorithm: str, histories: dict[str, list[EvaluationRecord]]) -> None:
    with folder.metrics.open("a", encoding="utf-8") as file:
        file.write(metrics_lines(algorithm, histories))


def _latest(found: dict[str, Evaluation]) -> str:
    """Format the latest means over the seeds that have not diverged, for a progress bar."""
    if not found:
        return "diverged"
    metric = headline_of(list(next(iter(found.values())).metrics))
    numbers = ", ".join(show(one.interval(metric).mean, metric) for one in found.values())
    return f"{metric} {numbers}{' %' if is_share(metric) else ''}"
