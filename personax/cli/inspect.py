"""The command `personax inspect`."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from personax.cli.console import err, print_table
from personax.cli.errors import plain_errors
from personax.cli.imports import load_and_announce
from personax.cli.options import ConfigFile, Out, Overrides
from personax.evaluation.scores import show
from personax.experiment.build import resolve
from personax.experiment.checkpoint import write_atomically
from personax.experiment.folders import readable_slug
from personax.inspection import INSPECTION, Effort, Inspection, inspect_federation
from personax.inspection.findings import Validation
from personax.report import write_inspection


def inspect(
    config: ConfigFile = None,
    overrides: Overrides = None,
    folder: Out = None,
    clients: Annotated[int, typer.Option(min=2, help="The largest number of clients to measure.")] = 20,
    samples: Annotated[int, typer.Option(min=4, help="The largest number of samples to measure for each client.")] = 32,
) -> None:
    """Measure how much clients differ and the papers' constants; derive limits, advice and a starter configuration."""
    with plain_errors("Interrupted; nothing was written."):
        resolved = resolve(load_and_announce(config, overrides), baselines=False)
        root = folder or Path("runs") / f"{readable_slug(resolved.name)}-inspected-{datetime.now():%Y%m%d-%H%M%S}"
        if (root / "inspection.json").exists():
            raise ValueError(f"{root} already has an inspection. Give another folder.")
        with err.status("Reading the data") as status:
            found = inspect_federation(resolved, Effort(clients, samples), lambda text: status.update(text))
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(root / "inspection.json", INSPECTION.dump_json(found, indent=1))
        write_atomically(root / "starter.toml", found.advice.starter.encode())
        write_inspection(found, root / "report.html")
        _show_inspection(found)
        typer.echo(f"The findings are in {root}. Start with: personax compare {root / 'starter.toml'}")


def _show_inspection(found: Inspection) -> None:
    """Print warnings, the constants, the limits and the advice."""
    for text in found.warnings:
        err.print(f"Warning: {text}", highlight=False, markup=False)
    constants = found.measured.constants
    print_table(
        ("constant", "", "largest found", "error", "what"),
        [(one.name, one.symbol, f"{one.value:.4g}", f"{one.error:.2g}", one.words) for one in constants],
    )
    print_table(
        ("setting", "limit", "rule", "source"),
        [(one.setting, f"{one.value:.4g}", one.rule, one.source) for one in found.limits],
    )
    for line in found.unusable:
        typer.echo(line)
    _show_validation(found.advice.validation)
    typer.echo(found.advice.summary)
    for line in (*found.advice.why, "How certain this is:", *found.advice.sure):
        typer.echo(f"  {line}")


def _show_validation(found: Validation | None) -> None:
    """Print the scores of the short runs."""
    if found is None:
        return
    typer.echo(f"{found.title}, scored on validation data.")
    score = lambda run: "diverged" if run.score is None else f"{show(run.score, found.metric)}"
    steps = lambda run: f"{run.options['lr']:g}" if isinstance(run.options.get("lr"), int | float) else ""
    rows = [(run.algorithm, steps(run), run.source, score(run)) for run in found.runs]
    print_table(("algorithm", "lr", "from", found.metric), rows)
