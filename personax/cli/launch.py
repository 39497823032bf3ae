"""Studies on a cluster: the options of the commands that start them, their progress bar, and `status`."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from personax.cli.console import err, print_table
from personax.cli.errors import plain_errors
from personax.cli.live import Identity, Insecure
from personax.cli.live import status as live_status
from personax.cluster.engine import (
    LAUNCHERS,
    Engine,
    EngineUnavailable,
    Launch,
    Launcher,
    make_engine,
    require_engine,
)
from personax.cluster.jobs import Job, JobRecord, JobTask, read_record, read_search, write_record
from personax.cluster.study import (
    JobView,
    Launched,
    continued,
    coordinating,
    follow,
    now,
    read_launched,
    views,
)
from personax.experiment.config import Config
from personax.experiment.folders import Folder
from personax.experiment.parts import finished_of, merge_finished
from personax.experiment.records import RunRecord, TuningRecord
from personax.experiment.runs import Work
from personax.experiment.state import forget, owning
from personax.experiment.tuning import TuningStudy, announce, tuned_config
from personax.report.following import read_simulated
from personax.values import NotInstalled, check_names

LauncherOption = Annotated[
    str | None,
    typer.Option("--launcher", metavar="|".join(LAUNCHERS), help="Run the algorithms as separate jobs."),
]
Address = Annotated[str | None, typer.Option(help="Address of a Ray cluster. Default: the cluster on this machine.")]
JobOptions = Annotated[
    list[str] | None,
    typer.Option("--job", metavar="KEY=VALUE", help="Option of the jobs (repeatable), such as --job partition=gpu."),
]
Parallel = Annotated[int | None, typer.Option(min=1, help="Maximum number of concurrent jobs.")]
CANCEL_SECONDS = 60.0  # to wait for canceled jobs to save their checkpoints


def launch_of(
    launcher: str | None,
    address: str | None,
    options: Sequence[str] | None,
    parallel: int | None,
    log: Sequence[str] | None = None,
) -> Launch | None:
    """Return the engine that these options choose; None without `--launcher`."""
    if launcher is None:
        if address or options or parallel:
            raise ValueError("`--address`, `--job` and `--parallel` need --launcher local, slurm or ray.")
        return None
    check_names("--launcher", [launcher], LAUNCHERS, "launcher")
    chosen: Launcher = next(one for one in LAUNCHERS if one == launcher)
    require_engine(chosen)
    pairs = {option.partition("=")[0]: option.partition("=")[2] for option in options or ()}
    if not all(pairs.values()):
        raise ValueError("`--job` needs KEY=VALUE, such as --job partition=gpu.")
    jax.config.update("jax_platforms", "cpu")  # this process trains nothing and leaves the GPUs to the jobs
    return Launch(chosen, address, pairs, parallel, tuple(log or ()))


def train_jobs(folder: Folder, work: Work, launch: Launch, fresh: Sequence[str] = ()) -> RunRecord:
    """Train the unfinished algorithms of a run as jobs; return its results, which the job that ends last merges."""
    for text in work.suspicions:
        err.print(f"Warning: {text}", highlight=False)
    with coordinating(folder.root):
        with owning(folder, fresh):
            for name in fresh:
                forget(folder, name)
        done = finished_of(work, folder)
        names = [training.name for training in work.plan.trainings]
        missing = [name for name in names if name not in done]
        if missing:
            folder.results.unlink(missing_ok=True)
            run_jobs(folder.root, "train", names, missing, launch)
    launched = read_launched(folder.root)
    record = merge_finished(work, folder, now() if launched is None else launched.started)
    if record is None:
        raise ValueError(f"Results of {folder.root} are damaged. Continue with: personax resume {folder.root}")
    return record


def tune_jobs(study: TuningStudy, folder: Folder, launch: Launch) -> tuple[Config, TuningRecord]:
    """Search for the options of each algorithm in its own job."""
    names = [name for name, search in study.searches.items() if search.choices]
    with coordinating(folder.root):
        missing = [name for name in names if read_search(folder, name).found is None]
        if missing:
            run_jobs(folder.root, "tune", names, missing, launch)
    found = [tuned for name in names if (tuned := read_search(folder, name).found) is not None]
    for tuned in found:
        announce(study.config, tuned, lambda text: err.print(text, highlight=False))
    return tuned_config(study.config, found)


def run_jobs(
    root: Path,
    task: JobTask,
    names: Sequence[str],
    missing: Sequence[str],
    launch: Launch,
    setting: dict[str, Any] | None = None,
) -> None:
    """Run the missing jobs of a study to their end and show the progress of all of them in one bar.

    Ctrl-C asks whether to cancel the jobs. The caller holds the coordinator lock.
    """
    engine = make_engine(launch, root)
    common: dict[str, Any] = {"log": list(launch.log), "setting": setting or {}}
    options = (launch.launcher, launch.address, dict(launch.options), launch.parallel)
    launched = continued(root, engine, Launched(*options, task, now(), list(names), **common))
    place, flags = os.getcwd(), os.environ.get("XLA_FLAGS", "")
    jobs = [Job(task, str(root.resolve()), name, launched.started, place, flags, **common) for name in missing]
    for name in set(names).difference(missing):
        _report_finished(root, name)
    try:
        with _JobBar(len(names)) as bar:
            follow(root, engine, jobs, launched, bar.show, bar.note)
    except KeyboardInterrupt:
        try:
            _leave_or_cancel(root, engine, missing)
        except EngineUnavailable as error:
            typer.echo(f"{error} Submitted jobs keep running.", err=True)
        raise


def _report_finished(root: Path, name: str) -> None:
    """Write the report of an algorithm that has finished without a job, or whose job could not report it."""
    record = read_record(root, name) or JobRecord(name, updated=time.time())
    if record.state != "finished":
        write_record(root, replace(record, state="finished", done=record.total, message=""))


def _leave_or_cancel(root: Path, engine: Engine, names: Sequence[str]) -> None:
    """Ask whether to leave the jobs running or cancel them; without a terminal, leave them running."""
    launched = read_launched(root)
    ids = {} if launched is None else {name: number for name, number in launched.ids.items() if name in names}
    alive = engine.alive(ids)
    if not alive:
        return
    typer.echo(f"\n{len(alive)} jobs are waiting or running: {', '.join(alive)}.", err=True)
    if not sys.stdin.isatty() or typer.confirm("Leave them running?", default=True, err=True):
        typer.echo(f"The jobs keep running. To check on them: personax status {root}", err=True)
        return
    engine.cancel({name: ids[name] for name in alive})
    until = time.monotonic() + CANCEL_SECONDS
    while (alive := engine.alive(ids)) and time.monotonic() < until:
        time.sleep(engine.pause)
    if alive:
        typer.echo(f"Not stopped yet: {', '.join(alive)}. Check with: personax status {root}", err=True)
        return
    engine.close()
    typer.echo("Jobs canceled. Completed work is kept.", err=True)


class _JobBar:
    """A progress bar for all jobs of a study; without a terminal, one line per job that ends."""

    def __init__(self, num_jobs: int) -> None:
        self.ended: dict[str, str] = {}
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
        self.progress = Progress(*columns, TimeElapsedColumn(), console=err, disable=not err.is_terminal)
        self.task = self.progress.add_task("Jobs", total=num_jobs)

    def __enter__(self) -> "_JobBar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show(self, found: list[JobView]) -> None:
        self.progress.update(self.task, description=summary(found), completed=sum(map(_share, found)))
        for view in found:
            if view.state in ("finished", "failed") and self.ended.get(view.name) != view.state:
                self.ended[view.name] = view.state
                self.note(_ending(view))

    def note(self, text: str) -> None:
        self.progress.console.print(text, highlight=False)


def _ending(view: JobView) -> str:
    """Return a line about a job that has ended."""
    record = view.record
    where = f" on {record.host} after {record.updated - record.began:.1f} s" if record.host else ""
    return f"{view.name}: {view.state}{where} {view.message}".rstrip()


def summary(found: Sequence[JobView]) -> str:
    """Return the number of jobs in each state.

    >>> from personax.cluster.jobs import JobRecord
    >>> summary([JobView("APFL", "running", JobRecord("APFL")), JobView("FedAvg", "waiting", JobRecord("FedAvg"))])
    '2 jobs: 0 finished, 1 running, 1 waiting'
    """
    states = [shown_state(view) for view in found]
    named = ["finished", "running", "waiting", *sorted({"failed", "killed", "stopped"} & set(states))]
    return f"{len(found)} jobs: " + ", ".join(f"{states.count(state)} {state}" for state in named)


def shown_state(view: JobView) -> str:
    """Return the state of a job as one word for users."""
    if view.state != "lost":
        return view.state
    return {"running": "killed", "stopped": "stopped"}.get(view.record.state, "waiting")


def _share(view: JobView) -> float:
    """Return the completed fraction of a job."""
    return 1.0 if view.state == "finished" else view.record.done / max(view.record.total, 1)


def status(
    target: Annotated[str, typer.Argument(metavar="RUN|HOST:PORT", help="A run folder, or the address of a server.")],
    identity: Identity = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the status of a run's jobs, or of a live federation; its operator sees all clients."""
    if not Path(target).is_dir():
        live_status(target, identity, insecure, as_json)
        return
    with plain_errors():
        root = Path(target)
        launched = read_launched(root)
        rows = _rows_of_run(root) if launched is None else _rows_of_jobs(root, launched)
        if as_json:
            typer.echo(json.dumps(rows))
            return
        columns = list(rows[0])
        print_table(columns, [[row[column] for column in columns] for row in rows])


def _rows_of_run(root: Path) -> list[dict[str, str]]:
    """Return the status of the algorithms of a run in a single process."""
    return [
        {"algorithm": one.name, "state": one.state, "round": f"{one.done}/{one.total}", "latest": one.latest}
        for one in read_simulated(root).progress
    ]


def _rows_of_jobs(root: Path, launched: Launched) -> list[dict[str, str]]:
    """Return the status of the jobs of a study."""
    rows = []
    for view in _current_views(root, launched):
        record, is_process = view.record, view.state in ("running", "lost") and view.record.pid
        rows.append(
            {
                "job": view.name,
                "state": shown_state(view),
                "where": f"{record.host}, process {record.pid}" if is_process else record.host,
                "progress": f"{record.done}/{record.total}" if record.total else "",
                "latest": view.message or record.latest,
                "reported": f"{time.time() - record.updated:.0f} s ago" if record.updated else "",
                "id": launched.ids.get(view.name, ""),
            }
        )
    return rows


def _current_views(root: Path, launched: Launched) -> list[JobView]:
    """Return the state of the jobs of a study; with a note, their last reports if the engine cannot be asked."""
    found = views(root, launched.names, {})
    if not any(view.state == "lost" for view in found):
        return found
    problem = f"These are processes of {launched.host}. For their current state, run this command there."
    if not launched.is_elsewhere:
        try:
            return views(root, launched.names, make_engine(launched.launch, root).alive(launched.ids))
        except (EngineUnavailable, NotInstalled) as error:
            problem = str(error)
    err.print(f"{problem} Showing the last reports of the jobs.", highlight=False)
    return views(root, launched.names, None)
