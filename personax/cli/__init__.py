"""The command line, `personax`, with one module for each group of commands."""

import gc
import os
import signal
from importlib.metadata import version
from typing import Annotated

import typer

from personax.cli import (
    bench,
    catalog,
    certify,
    data,
    flower,
    inspect,
    launch,
    live,
    live_demo,
    models,
    reproduce,
    runs,
    watch,
)
from personax.cli.options import GROUP_SETTINGS
from personax.fast.compilation_cache import keep_compiled

FLAGS = (  # XLA reads them when the first array is created
    "--xla_gpu_deterministic_ops=true",  # a resumed run ends with exactly the same numbers
    # Random streams are small loops. Without unrolling, LLVM needs a third less time to compile them on a CPU.
    "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling",
)

app = typer.Typer(
    name="personax",
    help="Personalized federated learning in JAX: train, compare, and give everyone a personal model.",
    epilog="Begin with: personax compare",
    add_completion=False,
    pretty_exceptions_enable=False,
    **GROUP_SETTINGS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"personax {version('personax')}, jax {version('jax')}")
        raise typer.Exit


@app.callback()
def _prepare_process(
    context: typer.Context,
    shown: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Run before every command."""
    del shown
    set_up(context.invoked_subcommand)
    signal.signal(signal.SIGTERM, _raise_interrupt)


def set_up(command: str | None) -> None:
    """Configure this process for a command: cache compiled programs, and make XLA deterministic.

    The processes of `personax bench` are not configured, because they measure personax as a library.
    """
    if command == "bench":
        return
    gc.freeze()  # imported modules are never freed; scanning them while JAX traces takes a tenth of the startup time
    keep_compiled()
    # A reproduction runs many short programs, and tuning them takes longer than running them.
    flags = [*FLAGS, "--xla_gpu_autotune_level=0"] if command == "reproduce" else FLAGS
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([given, *(flag for flag in flags if flag.split("=")[0] not in given)]).strip()


def _raise_interrupt(number: int, frame: object) -> None:
    """Handle SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt


# In the order of `personax --help`. Each command's help ends with its examples.
for _name, _command, _examples in (
    ("compare", runs.compare, "Examples: personax compare | personax compare mine.toml --set seeds=5 --out runs/mine"),
    ("run", runs.run, "Example: personax run mine.toml --algorithm FedAvg"),
    ("resume", runs.resume, "Example: personax resume runs/digits"),
    (
        "personalize",
        runs.personalize,
        "Example: personax personalize runs/digits --data patient.csv --out patient.safetensors",
    ),
    ("watch", watch.watch, "Example: personax watch runs/digits"),
    (
        "predict",
        models.predict,
        "Examples: personax predict personal.safetensors --data new.csv | "
        "personax predict runs/people --client person-03 --data new.csv --out predictions.csv",
    ),
    ("export", models.export, "Example: personax export personal.safetensors --out model.stablehlo"),
    ("report", runs.report, "Example: personax report runs/digits runs/mnist --out both.html"),
    (
        "reproduce",
        reproduce.reproduce,
        "Examples: personax reproduce --list | personax reproduce fallah-table1 --quick",
    ),
    ("inspect", inspect.inspect, "Example: personax inspect mine.toml --out inspected"),
    ("list", catalog.list_catalog, "Example: personax list"),
    ("cite", runs.cite, "Example: personax cite runs/digits > used.bib"),
    ("init", runs.init, "Example: personax init mine.toml"),
    ("bench", bench.bench, "Examples: personax bench | personax bench --only mnist --no-peers --json"),
    (
        "serve",
        live.serve,
        "Example: personax serve mine.toml --listen 0.0.0.0:7000 --identity certificates/server",
    ),
    ("join", live.join, "Example: personax join my.host:7000 --data mine.csv --identity anna"),
    (
        "status",
        launch.status,
        "Examples: personax status runs/digits | personax status my.host:7000 --identity certificates/operator",
    ),
    ("live-demo", live_demo.live_demo, "Example: personax live-demo"),
):
    app.command(_name, epilog=_examples)(_command)

app.add_typer(data.group, name="data")
app.add_typer(certify.group, name="certify")
app.add_typer(live.group, name="live")
app.add_typer(flower.group, name="flower")
