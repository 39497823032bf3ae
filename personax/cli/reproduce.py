"""The command `personax reproduce`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from personax.cli.catalog import list_reproductions
from personax.cli.console import err
from personax.cli.errors import plain_errors
from personax.data.datasets.fetch import require_fetched
from personax.report import claims_text, write_reproduction
from personax.reproduce import EXPERIMENTS
from personax.reproduce.outcome import CellRecord
from personax.reproduce.run import reproduce as run_experiment
from personax.values import check_names


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
            list_reproductions()
            return
        check_names("personax reproduce", [name], EXPERIMENTS, "experiment")
        root = folder or Path("runs") / (f"{name}-quick" if quick else name)
        command = f"personax reproduce {name}" + " --quick" * quick + (f" --seeds {seeds}" if seeds else "")
        experiment = EXPERIMENTS[name](quick)
        require_fetched(experiment.needs, f"personax reproduce {name}")
        with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=err) as bar:
            task = bar.add_task(name, total=len(experiment.trainings))

            def notify(cells: list[CellRecord]) -> None:
                bar.advance(task)
                for cell in cells:
                    bar.console.print(_cell_text(cell), highlight=False)

            record = run_experiment(experiment, root, num_seeds=seeds, command=command, notify=notify)
        typer.echo(claims_text(record))
        typer.echo(f"The results are in {root}, the page in {write_reproduction(record, root / 'report.html')}")


def _cell_text(cell: CellRecord) -> str:
    """Format a cell of a paper's table: our numbers, and the paper's if it has one."""
    ours = ", ".join(f"{one.ours.mean:.2f} ({one.name})" for one in cell.scorings)
    paper = "" if cell.paper is None else f", paper {cell.paper:.2f}"
    return f"{cell.row} · {cell.column}: {ours}{paper}"
