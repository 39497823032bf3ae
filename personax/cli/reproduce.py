"""The command `personax reproduce`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from personax.cli.catalog import list_reproductions
from personax.cli.console import err
from personax.cli.errors import plain_errors
from personax.cli.launch import Address, JobOptions, LauncherOption, Parallel, launch_of, run_jobs
from personax.cluster.engine import Launch
from personax.cluster.study import coordinating
from personax.data.datasets.fetch import require_fetched
from personax.report import claims_text, write_reproduction
from personax.reproduce import EXPERIMENTS
from personax.reproduce.experiment import Experiment
from personax.reproduce.outcome import REPRODUCTION, CellRecord, ReproductionRecord
from personax.reproduce.run import name_of
from personax.reproduce.run import reproduce as run_experiment
from personax.values import check_names


def reproduce(
    name: Annotated[str | None, typer.Argument(help="The name of a table or figure.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds. Default: the experiment's.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder. Default: runs/NAME, or runs/NAME-quick.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use fewer rounds and seeds. The numbers are not results.")
    ] = False,
    launcher: LauncherOption = None,
    address: Address = None,
    options: JobOptions = None,
    parallel: Parallel = None,
) -> None:
    """Reproduce a table or figure of a paper, with the paper's numbers beside ours. Rerun the command to resume."""
    with plain_errors(f"Interrupted. To resume, rerun the same command: personax reproduce {name or ''}"):
        if listed or name is None:
            list_reproductions()
            return
        check_names("personax reproduce", [name], EXPERIMENTS, "experiment")
        root = folder or Path("runs") / (f"{name}-quick" if quick else name)
        command = f"personax reproduce {name}" + " --quick" * quick + (f" --seeds {seeds}" if seeds else "")
        experiment = EXPERIMENTS[name](quick)
        require_fetched(experiment.needs, f"personax reproduce {name}")
        if (launch := launch_of(launcher, address, options, parallel)) is not None:
            setting = {"experiment": name, "quick": quick, "num_seeds": seeds, "command": command}
            _show(_as_jobs(experiment, root, launch, setting), root)
            return
        with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=err) as bar:
            task = bar.add_task(name, total=len(experiment.trainings))

            def notify(cells: list[CellRecord]) -> None:
                bar.advance(task)
                for cell in cells:
                    bar.console.print(_cell_text(cell), highlight=False)

            record = run_experiment(experiment, root, num_seeds=seeds, command=command, notify=notify)
        _show(record, root)


def _as_jobs(experiment: Experiment, root: Path, launch: Launch, setting: dict[str, Any]) -> ReproductionRecord:
    """Run the trainings of a reproduction as jobs; return its results, which the job that ends last writes."""
    if experiment.timed:
        raise ValueError(f"`{experiment.name}` measures time, so its trainings run in turn. Omit --launcher.")
    results = root / "results.json"
    names = [name_of(training) for training in experiment.trainings]
    with coordinating(root):
        results.unlink(missing_ok=True)
        run_jobs(root, "reproduce", names, names, launch, setting)
    return REPRODUCTION.validate_json(results.read_bytes())


def _show(record: ReproductionRecord, root: Path) -> None:
    """Print the claims of a reproduction, and write its page."""
    typer.echo(claims_text(record))
    typer.echo(f"The results are in {root}, the page in {write_reproduction(record, root / 'report.html')}")


def _cell_text(cell: CellRecord) -> str:
    """Format a cell of a paper's table: our numbers, and the paper's if it has one."""
    ours = ", ".join(f"{one.ours.mean:.2f} ({one.name})" for one in cell.scorings)
    paper = "" if cell.paper is None else f", paper {cell.paper:.2f}"
    return f"{cell.row} · {cell.column}: {ours}{paper}"
