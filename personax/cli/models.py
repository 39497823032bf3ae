"""Commands for trained models: `predict` and `export`."""

from pathlib import Path
from typing import Annotated

import typer

from personax.cli.console import err
from personax.cli.errors import plain_errors
from personax.cli.imports import announce_run
from personax.experiment.loading import load
from personax.experiment.predictions import require_table_path, write_predictions
from personax.experiment.trained import TrainedModel

Source = Annotated[
    Path, typer.Argument(metavar="RUN|MODEL", help="A run folder, or a file such as personal.safetensors.")
]
Algorithm = Annotated[str | None, typer.Option(help="An algorithm of the run. Default: that of the best model.")]
Client = Annotated[str | None, typer.Option(help="A client of the run, for its model. Default: the shared one.")]
Score = Annotated[str | None, typer.Option(help="A score of the algorithm, if the client has several models.")]
AllowImports = Annotated[bool, typer.Option("--allow-imports", help="Let a model file import the network's code.")]


def predict(
    source: Source,
    data: Annotated[Path, typer.Option(help="Samples without labels: CSV, Parquet or npz.")],
    algorithm: Algorithm = None,
    client: Client = None,
    score: Score = None,
    allow_imports: AllowImports = False,
    path: Annotated[Path, typer.Option("--out", "-o", help="The file to write, .csv or .parquet.")] = Path(
        "predictions.csv"
    ),
) -> None:
    """Predict the class or the target of each sample in a file, with a trained model."""
    with plain_errors():
        require_table_path(path, data)
        model = _load(source, algorithm, client, score, allow_imports)
        num = write_predictions(model, data, path, notify=_note)
        typer.echo(f"{model.title}: {model.words}" if model.words else model.title)
        typer.echo(f"{num} predictions are in {path}, in the order of {data.name}")


def export(
    source: Source,
    path: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("model.stablehlo"),
    algorithm: Algorithm = None,
    client: Client = None,
    score: Score = None,
    num_samples: Annotated[int | None, typer.Option(min=1, help="Samples in each call. Default: any number.")] = None,
    allow_imports: AllowImports = False,
) -> None:
    """Write a trained model as StableHLO, which JAX runs without personax."""
    with plain_errors():
        model = _load(source, algorithm, client, score, allow_imports)
        place = model.export(path, num_samples=num_samples)
        typer.echo(f"{model.title}: the model is in {place}, and {place}.json describes how to call it")


def _load(
    source: Path, algorithm: str | None, client: str | None, score: str | None, allow_imports: bool
) -> TrainedModel:
    if source.is_dir():
        announce_run(source)
    return load(source, algorithm, client, score=score, allow_imports=allow_imports, notify=_note)


def _note(text: str) -> None:
    err.print(text, highlight=False)
