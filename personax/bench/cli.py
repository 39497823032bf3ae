"""The command `personax bench`. What it needs is imported when it runs: `personax --help` stays fast."""

from pathlib import Path
from typing import Annotated

import typer


def mount(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("bench", epilog="Examples: personax bench | personax bench --only mnist --no-peers --json")(bench)


def bench(
    only: Annotated[list[str] | None, typer.Option(help="A row, or all whose names begin so: mnist, mnist-hf.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON; the table goes to stderr.")] = False,
    path: Annotated[Path | None, typer.Option("--out", "-o", help="Write the record there, too.")] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Leave the peers out.")] = False,
    peers: Annotated[list[str] | None, typer.Option("--peer", help="These peers alone.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long each side of a row is timed.")] = 2.0,
    turns: Annotated[int, typer.Option(min=1, help="In how many turns.")] = 3,
    note: Annotated[str, typer.Option(help="What should be known of the machine.")] = "",
) -> None:
    """Time rounds against the machine's limits and against peers, measured in the same run (docs/performance.md)."""
    from personax.bench.peers import PEERS
    from personax.bench.record import BENCH, BenchRecord
    from personax.bench.show import header, row_words, summary
    from personax.bench.suite import Plan, run_suite
    from personax.checkpoint import write_atomically
    from personax.config import check_names

    def keep(so_far: BenchRecord) -> None:
        typer.echo(row_words(so_far.rows[-1]), err=json)
        if path is not None:
            write_atomically(path, BENCH.dump_json(so_far, indent=1))

    try:
        check_names("personax bench", peers or [], PEERS, "peer")
        typer.echo(header(), err=json)
        plan = Plan(seconds, turns, () if no_peers else tuple(peers or PEERS))
        record = run_suite(plan, only or (), note, keep)
    except KeyboardInterrupt:
        kept = "nothing is kept without --out" if path is None else f"the rows above are in {path}"
        typer.echo(f"Interrupted; {kept}.", err=True)
        raise typer.Exit(130) from None
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(summary(record), err=json)
    if path is not None:
        typer.echo(f"The record is in {path}", err=json)
    if json:
        typer.echo(BENCH.dump_json(record, indent=1).decode())
