"""The command line."""

import contextlib
import gc
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from jax.errors import JaxRuntimeError
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from personax import catalogue, handover
from personax.bench import cli as bench
from personax.build import resolve
from personax.checkpoint import write_atomically
from personax.citations import cite
from personax.compiled import keep_compiled
from personax.config import Config, ConfigError, check_names, load
from personax.datasets.fetch import CannotFetch, fetch, find_source
from personax.datasets.registry import ENTRIES
from personax.datasets.stand_in import write_stand_in
from personax.flower.cli import flower
from personax.folders import Folder, refuse_used, slug, tidy
from personax.inspection import INSPECTION, Effort, Inspection, inspect_federation
from personax.live import cli as live
from personax.progress import Bars
from personax.records import RunRecord, TableRow, read_results
from personax.report import write_inspection, write_report, write_reproduction
from personax.reproduce import EXPERIMENTS
from personax.reproduce.outcome import CellRecord
from personax.reproduce.run import reproduce as reproduce_all
from personax.runs import Work, execute, prepare, start
from personax.scores import Interval, show
from personax.tensorboard import Events
from personax.tuning import tune

FLAGS = (  # for XLA, which reads them when the first array is made
    "--xla_gpu_deterministic_ops=true",  # a resumed run ends in the same bits
    # Random streams are small loops. Unrolled by LLVM they take two thirds of the time to compile on a CPU.
    "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling",
)
_PLAIN = {"rich_markup_mode": None, "no_args_is_help": True}
app = typer.Typer(
    name="personax",
    help="Personalized federated learning in JAX: train, compare, hand a personal model to anyone.",
    epilog="Begin with: personax compare",
    add_completion=False,
    pretty_exceptions_enable=False,
    **_PLAIN,
)
data = typer.Typer(help="Get datasets, and see which there are.", epilog="Example: personax data list", **_PLAIN)
app.add_typer(data, name="data")
out, err = (Console(stderr=stderr, markup=False, emoji=False) for stderr in (False, True))  # names are not markup

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: --set schedule.num_rounds=50")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The run folder. By default a new one under runs/.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Tune = Annotated[bool, typer.Option("--tune", help="Pick the options of [tune] on validation data first.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events into the run folder, too.")]


@app.callback()
def _root(context: typer.Context) -> None:
    set_up(context.invoked_subcommand)
    signal.signal(signal.SIGTERM, _interrupt)


def set_up(command: str | None) -> None:
    """What holds for the whole process: compiled programs are kept, and XLA computes the same bits again."""
    if command == "bench":  # whose processes run as a library does
        return
    gc.freeze()  # what has been imported stays: looking through it again while JAX traces takes a tenth of a start
    keep_compiled()
    # Many short programs: tuning them takes longer than running them.
    flags = [*FLAGS, "--xla_gpu_autotune_level=0"] if command == "reproduce" else FLAGS
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([given, *(flag for flag in flags if flag.split("=")[0] not in given)]).strip()


@contextlib.contextmanager
def plain_errors(interrupted: str = "Interrupted.") -> Iterator[None]:
    """Around a command: an error is one message, without a traceback. Exit status 1, or 130 for Ctrl-C and SIGTERM."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError, CannotFetch, ArithmeticError, MemoryError, JaxRuntimeError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


@app.command(epilog="Examples: personax compare | personax compare mine.toml --set seeds=5 --out runs/mine")
def compare(
    config: Annotated[Path | None, typer.Argument(help="A TOML file. By default the embedded digits.")] = None,
    overrides: Overrides = None,
    folder: Out = None,
    tuned: Tune = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Train several algorithms on the same federation, cohorts and batches, and see who wins, and for whom."""
    with plain_errors():
        _new_run(resolve(load(config, overrides or ()), baselines=True), folder, tuned, tensorboard)


@app.command(epilog="Example: personax run mine.toml --algorithm FedAvg")
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    algorithm: Annotated[str | None, typer.Option(help="Which one, where the file has several.")] = None,
    overrides: Overrides = None,
    folder: Out = None,
    tuned: Tune = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Train one algorithm."""
    with plain_errors():
        given = load(config, overrides or ())
        names = list(given.algorithms)
        if algorithm is None and len(names) > 1:
            raise ConfigError(f"{config} has {len(names)} algorithms. Choose one with --algorithm: {', '.join(names)}.")
        check_names(str(config), [algorithm or names[0]], names, "algorithm")
        chosen = {name: entry for name, entry in given.algorithms.items() if name == (algorithm or names[0])}
        _new_run(resolve(replace(given, algorithms=chosen), baselines=False), folder, tuned, tensorboard)


@app.command(epilog="Example: personax resume runs/digits")
def resume(run: Run, tensorboard: TensorBoard = False) -> None:
    """Continue an interrupted run; it ends as if it had never been interrupted."""
    with plain_errors():
        folder = Folder(run)
        if not folder.config.exists():
            raise ValueError(f"{run} is not a run folder: it has no config.toml. Start one with `personax compare`.")
        if folder.results.exists():
            tidy(folder)
            typer.echo(f"{run} is finished.")
            _tell(folder, read_results(run))
        else:
            _finish(folder, tensorboard)


@app.command(epilog="Example: personax personalize runs/digits --data patient.csv --out patient.safetensors")
def personalize(
    run: Run,
    data: Annotated[Path, typer.Option(help="The client's samples: npz, CSV or Parquet with a label column.")],
    algorithm: Annotated[str | None, typer.Option(help="By default the run's best that adapts.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Adaptation steps. By default the run's.")] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Their size. By default the run's.")] = None,
    path: Annotated[Path, typer.Option("--out", "-o", help="The personal model.")] = Path("personal.safetensors"),
) -> None:
    """Adapt a trained model to a client that nobody has seen, and write its personal model."""
    with plain_errors():
        found = handover.hand_over(Folder(run), data, algorithm, num_steps=steps, lr=lr)
        handover.write(found, path)
        typer.echo(f"{found.algorithm}: {found.words.split(';')[0]}, from {found.num_train} samples")
        typer.echo(f"on {found.num_test} others:")
        for metric, before in found.before.items():
            typer.echo(f"  {metric:10}{show(before, metric):>8} before{show(found.after[metric], metric):>8} after")
        typer.echo(f"The model is in {path}")


@app.command(epilog="Example: personax report runs/digits runs/mnist --out both.html")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; also of runs made apart.")],
    path: Annotated[
        Path | None, typer.Option("--out", "-o", help="By default report.html in the first folder.")
    ] = None,
) -> None:
    """Write one HTML page about one run or several, which opens offline."""
    with plain_errors():
        typer.echo(f"The report is in {write_report(runs, path or Folder(runs[0]).report)}")


@app.command(epilog="Examples: personax reproduce --list | personax reproduce fallah-table1 --quick")
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Which table or figure.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show which there are.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many. By default the experiment's.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", "-o", help="By default runs/NAME, with -quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The same with fewer rounds and seeds: not a result.")] = False,
) -> None:
    """Repeat a table or a figure of a paper, its own numbers beside ours. An interrupted one goes on from there."""
    with plain_errors(f"Interrupted. Go on with the same command: personax reproduce {name or ''}"):
        if listed or name is None:
            for made in EXPERIMENTS.values():
                experiment = made(False)
                typer.echo(f"{experiment.name:24}{experiment.source}: {experiment.title}")
            return
        check_names("personax reproduce", [name], EXPERIMENTS, "experiment")
        root = folder or Path("runs") / (f"{name}-quick" if quick else name)
        command = f"personax reproduce {name}" + " --quick" * quick + (f" --seeds {seeds}" if seeds else "")
        experiment = EXPERIMENTS[name](quick)
        with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=err) as bar:
            task = bar.add_task(name, total=len(experiment.trainings))

            def told(cells: list[CellRecord]) -> None:
                bar.advance(task)
                for cell in cells:
                    bar.console.print(_told(cell), highlight=False)

            record = reproduce_all(experiment, root, num_seeds=seeds, command=command, told=told)
        for claim in record.claims:
            typer.echo(f"{claim.verdict:14}{claim.words} ({claim.place})")
        typer.echo(f"The results are in {root}, the page in {write_reproduction(record, root / 'report.html')}")


def _told(cell: CellRecord) -> str:
    ours = ", ".join(f"{one.ours:.2f} ({one.reading})" for one in cell.readings)
    paper = "" if cell.paper is None else f", paper {cell.paper:.2f}"
    return f"{cell.row} · {cell.column}: {ours}{paper}"


@app.command("inspect", epilog="Example: personax inspect mine.toml --out inspected")
def inspect_command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file. By default the embedded digits.")] = None,
    overrides: Overrides = None,
    folder: Out = None,
    clients: Annotated[int, typer.Option(min=2, help="How many are measured at most.")] = 20,
    samples: Annotated[int, typer.Option(min=4, help="How many of each client are measured at most.")] = 32,
) -> None:
    """Measure how much clients differ and the papers' constants, and say what follows: limits, advice, a starter."""
    with plain_errors("Interrupted; nothing was written."):
        resolved = resolve(load(config, overrides or ()), baselines=False)
        root = folder or Path("runs") / f"{slug(resolved.name)}-inspected-{datetime.now():%Y%m%d-%H%M%S}"
        if (root / "inspection.json").exists():
            raise ValueError(f"{root} holds an inspection already. Give another folder.")
        with err.status("Reading the data") as status:
            found = inspect_federation(resolved, Effort(clients, samples), lambda text: status.update(text))
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(root / "inspection.json", INSPECTION.dump_json(found, indent=1))
        write_atomically(root / "starter.toml", found.advice.starter.encode())
        write_inspection(found, root / "report.html")
        _show_inspection(found)
        typer.echo(f"The findings are in {root}. Start with: personax compare {root / 'starter.toml'}")


def _show_inspection(found: Inspection) -> None:
    """Constants, limits and advice."""
    constants = Table("constant", "", "largest found", "error", "what", box=SIMPLE, pad_edge=False)
    for one in found.measured.constants:
        constants.add_row(one.name, one.symbol, f"{one.value:.4g}", f"{one.error:.2g}", one.words)
    limits = Table("setting", "limit", "rule", "source", box=SIMPLE, pad_edge=False)
    for one in found.limits:
        limits.add_row(one.setting, f"{one.value:.4g}", one.rule, one.source)
    out.print(constants, limits)
    typer.echo(f"Start with {found.advice.recipe}.")
    for line in (*found.advice.why, "How sure:", *found.advice.sure):
        typer.echo(f"  {line}")


@app.command("list", epilog="Example: personax list")
def list_all() -> None:
    """Show the algorithms, objectives, partitions and datasets, with their papers."""
    kinds = {
        "algorithms": catalogue.ALGORITHMS,
        "objectives": catalogue.OBJECTIVES,
        "partitions": catalogue.PARTITIONS,
        "datasets": catalogue.DATASETS,
    }
    for title, entries in kinds.items():
        table = Table(title, "what", "source", box=SIMPLE, pad_edge=False)
        for entry in entries:
            table.add_row(entry.name, entry.what, entry.source)
        out.print(table)


@app.command("cite", epilog="Example: personax cite runs/digits > used.bib")
def cite_run(run: Run) -> None:
    """Print BibTeX for exactly what a run used."""
    with plain_errors():
        record = read_results(run)
        used = [key for algorithm in record.algorithms for key in algorithm.citations]
        typer.echo(cite(dict.fromkeys([*used, *record.federation.citations, "jax"])))


@app.command(epilog="Example: personax init mine.toml")
def init(path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("personax.toml")) -> None:
    """Write a commented starter configuration."""
    with plain_errors():
        if path.exists():
            raise ValueError(f"{path} exists. Choose another name, or remove it.")
        path.write_text(Path(__file__).with_name("default.toml").read_text(encoding="utf-8"), encoding="utf-8")
        typer.echo(f"Wrote {path}. Change it, then: personax compare {path}")


def _new_run(config: Config, path: Path | None, tuned: bool, tensorboard: bool) -> None:
    plain = re.sub(r"\W+", "-", config.name)
    path = path or Path("runs") / f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"
    refuse_used(path)
    trials = []
    if tuned:
        err.print("Tuning on validation data cut from the clients' training data.", highlight=False)
        config, trials = tune(config, lambda text: err.print(f"  {text}", highlight=False))
    work = prepare(config)  # what cannot be run leaves no folder
    folder = start(config, path)
    if trials:
        tried = json.dumps([trial._asdict() for trial in trials], indent=1)
        write_atomically(folder.root / "tuning.json", tried.encode())
    _finish(folder, tensorboard, work)


def _finish(folder: Folder, tensorboard: bool, work: Work | None = None) -> None:
    """Do what is left of a run, and tell of it."""
    with plain_errors(f"Interrupted. Go on with: personax resume {folder.root}"):
        listeners = [Events(folder.root / "tensorboard")] if tensorboard else []
        with Bars(err) as bars:
            record = execute(folder, bars, listeners=listeners, work=work)
        _tell(folder, record)


def _tell(folder: Folder, record: RunRecord) -> None:
    """Show a run's table and write its report."""
    _show(record)
    typer.echo(f"The results are in {folder.root}, the report in {write_report([folder.root], folder.report)}")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _show(record: RunRecord) -> None:
    """The headline table, and what each row measured."""
    table = Table("", record.headline, "std", "worst", "best", "> local", "> global", box=SIMPLE, pad_edge=False)
    for row in record.table:
        if row.metric == record.headline:
            table.add_row(row.score + (" (!)" if row.flag else ""), *_cells(row, len(record.seeds)))
    out.print(table)
    for algorithm in record.algorithms:
        for score in algorithm.scores:
            typer.echo(f"{score.name}: {score.words}")


def _cells(row: TableRow, num_seeds: int) -> list[str]:
    mean = Interval(row.mean, row.low or row.mean, row.high or row.mean, num_seeds)
    share = lambda part: "" if part is None else f"{part:.0%}"
    spread = [show(number, row.metric) for number in (row.std, row.worst_decile, row.best_decile)]
    return [show(mean, row.metric), *spread, share(row.better_than_local), share(row.better_than_global)]


def _fetchable(name: str) -> str:
    how = next((entry.how for entry in ENTRIES if entry.name == name), "")
    if how:
        raise typer.BadParameter(f"{name} is not fetched ({how}). See `personax.datasets.{name}`.")
    try:
        return find_source(name).name
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@data.command("fetch", epilog="Example: personax data fetch mnist")
def fetch_command(name: Annotated[str, typer.Argument(help="mnist or cifar10", callback=_fetchable)]) -> None:
    """Get a dataset from the network, verify it, and keep it.

    It goes to the folder PERSONAX_DATA, or else to the user's cache. What is there already is not fetched again.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with plain_errors("Interrupted. Run the same command again to go on from here."):
        with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
            tasks = {}

            def progress(what: str, done: int, total: int | None) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total)
                bar.update(tasks[what], completed=done, total=total)

            path = fetch(name, progress=progress)
        typer.echo(f"{name} is in {path}")


@data.command("stand-in", epilog="Example: personax data stand-in femnist --writers 1000")
def stand_in_command(
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    writers: Annotated[int, typer.Option(min=1, help="How many.")] = 1000,
) -> None:
    """Write a stand-in for FEMNIST in LEAF's format: MNIST's digits in the hands of invented writers.

    To reproduce apfl-figure5 with it, write it to the folder femnist in the folder PERSONAX_DATA.
    """
    with plain_errors("Interrupted. Run the same command again."):
        if folder.exists():
            raise FileExistsError(f"{folder} is there already, and nothing was written. Give another folder.")
        typer.echo(f"A stand-in for FEMNIST is in {write_stand_in(folder, writers)}")


@data.command("list", epilog="Example: personax data list")
def list_command() -> None:
    """Show the datasets, their sizes, and whether they are here."""
    table = Table("name", "what", "size", "where", "citation", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for entry in ENTRIES:
        table.add_row(entry.name, entry.description, entry.size, entry.where, entry.citation)
    out.print(table)


bench.mount(app)
live.mount(app)
app.add_typer(flower, name="flower")
