"""Studies on a cluster: the options of commands that start them, their one progress bar, and `status`."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from personax.cli.console import err, print_table
from personax.cli.errors import plain_errors
from personax.cli.live import Identity, Insecure
from personax.cli.live import status as live_status
from personax.cluster.engine import LAUNCHERS, Engine, Launch, Launcher, make_engine, require_engine
from personax.cluster.jobs import Job, JobTask, read_tuned
from personax.cluster.study import JobView, Launched, follow, heading, now, read_launched, views
from personax.experiment.checkpoint import write_atomically
from personax.experiment.config import Config, dump_run
from personax.experiment.folders import Folder
from personax.experiment.parts import finished_of, merge_finished
from personax.experiment.records import RunRecord, TuningRecord
from personax.experiment.runs import Work
from personax.experiment.standing import forget, owning
from personax.experiment.tuning import announce, prepare_tuning, tuned_config
from personax.report.following import read_simulated
from personax.values import check_names

LauncherOption = Annotated[
    str | None,
    typer.Option("--launcher", metavar="|".join(LAUNCHERS), help="Run the algorithms as jobs: here, on Slurm or Ray."),
]
Address = Annotated[str | None, typer.Option(help="Of a Ray cluster. By default the one of this machine.")]
JobOptions = Annotated[
    list[str] | None,
    typer.Option("--job", metavar="KEY=VALUE", help="For each job: --job partition=gpu --job time=60"),
]
Parallel = Annotated[int | None, typer.Option(min=1, help="The most jobs at the same time.")]
CANCEL_SECONDS = 60.0


def launch_of(
    launcher: str | None,
    address: str | None,
    options: Sequence[str] | None,
    parallel: int | None,
    log: Sequence[str] | None = None,
) -> Launch | None:
    """The engine that these options choose; None without `--launcher`."""
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
    jax.config.update("jax_platforms", "cpu")  # this process trains nothing, and leaves the GPUs to its jobs
    return Launch(chosen, address, pairs, parallel, tuple(log or ()))


def train_jobs(folder: Folder, work: Work, launch: Launch, fresh: Sequence[str] = ()) -> RunRecord:
    """Train what is left of a run as jobs; return its results, which are merged by the job that ends last."""
    for text in work.suspicions:
        err.print(f"Warning: {text}", highlight=False)
    with owning(folder, fresh):
        for name in fresh:
            forget(folder, name)
    done = finished_of(work, folder)
    missing = [training.name for training in work.plan.trainings if training.name not in done]
    if missing:
        folder.results.unlink(missing_ok=True)
        run_jobs(folder.root, "train", missing, launch)
    launched = read_launched(folder.root)
    record = merge_finished(work, folder, now() if launched is None else launched.started)
    if record is None:
        raise ValueError(f"Results of {folder.root} are damaged. Continue with: personax resume {folder.root}")
    return record


def tune_jobs(config: Config, folder: Folder, launch: Launch) -> tuple[Config, TuningRecord]:
    """Search for the options of each algorithm in its own job."""
    study = prepare_tuning(config)
    if not folder.untuned.exists():
        write_atomically(folder.untuned, dump_run(config).encode())
    names = [name for name, search in study.searches.items() if search.choices]
    missing = [name for name in names if read_tuned(folder.root, name) is None]
    if missing:
        run_jobs(folder.root, "tune", missing, launch)
    found = [tuned for name in names if (tuned := read_tuned(folder.root, name)) is not None]
    for tuned in found:
        announce(config, tuned, lambda text: err.print(text, highlight=False))
    return tuned_config(config, found)


def run_jobs(
    root: Path,
    task: JobTask,
    names: Sequence[str],
    launch: Launch,
    setting: dict[str, Any] | None = None,
) -> None:
    """Run jobs to their end and show their progress in one bar. Ctrl-C asks what to do with them."""
    before = read_launched(root)
    ids = before.ids if before is not None and before.task == task and before.launcher == launch.launcher else {}
    started = before.started if before is not None else now()
    of_all: dict[str, Any] = {"log": list(launch.log), "setting": setting or {}}
    launched = Launched(
        launch.launcher,
        launch.address,
        dict(launch.options),
        launch.parallel,
        task,
        started,
        list(names),
        ids,
        **of_all,
    )
    place, flags = os.getcwd(), os.environ.get("XLA_FLAGS", "")
    jobs = [Job(task, str(root.resolve()), name, started, place, flags, **of_all) for name in names]
    with heading(root):
        engine = make_engine(launch, root)
        try:
            with _JobBar(len(jobs)) as bar:
                follow(root, engine, jobs, launched, bar.show, bar.note)
        except KeyboardInterrupt:
            _leave_or_cancel(root, engine, names)
            raise


def _leave_or_cancel(root: Path, engine: Engine, names: Sequence[str]) -> None:
    """Ask whether the jobs continue without this process; where nobody can answer, they do."""
    launched = read_launched(root)
    ids = {} if launched is None else launched.ids
    alive = engine.alive(ids)
    if not alive:
        return
    typer.echo(f"\n{len(alive)} jobs are waiting or running: {', '.join(alive)}.", err=True)
    if not sys.stdin.isatty() or typer.confirm("Leave them running?", default=True, err=True):
        typer.echo(f"They continue. See how they are: personax status {root}", err=True)
        return
    engine.cancel({name: ids[name] for name in alive})
    until = time.monotonic() + CANCEL_SECONDS
    while time.monotonic() < until and engine.alive(ids):
        time.sleep(0.2)
    typer.echo("They are canceled. What they have done is kept.", err=True)


class _JobBar:
    """A progress bar for all jobs of a study; without a terminal, a line for each job that ends."""

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
                took = view.record.updated - view.record.began
                self.note(f"{view.name}: {view.state} on {view.record.host} after {took:.1f} s {view.words}".rstrip())

    def note(self, text: str) -> None:
        self.progress.console.print(text, highlight=False)


def summary(found: Sequence[JobView]) -> str:
    """The number of jobs in each state.

    >>> from personax.cluster.jobs import JobRecord
    >>> summary([JobView("APFL", "running", JobRecord("APFL")), JobView("FedAvg", "waiting", JobRecord("FedAvg"))])
    '2 jobs: 0 finished, 1 running, 1 waiting'
    """
    states = [shown_state(view) for view in found]
    named = ["finished", "running", "waiting", *sorted({"failed", "killed", "stopped"} & set(states))]
    return f"{len(found)} jobs: " + ", ".join(f"{states.count(state)} {state}" for state in named)


def shown_state(view: JobView) -> str:
    """Return the state of a job in one word."""
    if view.state != "lost":
        return view.state
    return {"running": "killed", "stopped": "stopped"}.get(view.record.state, "waiting")


def _share(view: JobView) -> float:
    """The part of a job that is done."""
    return 1.0 if view.state == "finished" else view.record.done / max(view.record.total, 1)


def status(
    target: Annotated[str, typer.Argument(metavar="RUN|HOST:PORT", help="A run folder, or where a server listens.")],
    identity: Identity = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what of a run is running where, or how a live federation goes: all clients to its operator."""
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
    """The standing of a run of a single process."""
    return [
        {"algorithm": one.name, "state": one.state, "round": f"{one.done}/{one.total}", "latest": one.latest}
        for one in read_simulated(root).progress
    ]


def _rows_of_jobs(root: Path, launched: Launched) -> list[dict[str, str]]:
    """The standing of the jobs of a study, as its engine and their own reports have it."""
    found = views(root, launched.names, {})
    if any(view.state == "lost" for view in found):
        found = views(root, launched.names, make_engine(launched.launch, root).alive(launched.ids))
    rows = []
    for view in found:
        record, runs = view.record, view.state in ("running", "lost") and view.record.pid
        age = f"{time.time() - record.updated:.0f} s ago" if record.updated else ""
        rows.append(
            {
                "job": view.name,
                "state": shown_state(view),
                "where": f"{record.host}, process {record.pid}" if runs else record.host,
                "round": f"{record.done}/{record.total}" if record.total else "",
                "latest": view.words or record.latest,
                "reported": age,
                "id": launched.ids.get(view.name, ""),
            }
        )
    return rows
