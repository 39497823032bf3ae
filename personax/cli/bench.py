"""The command `personax bench`. It imports its modules when it runs, so that other commands start fast."""

from pathlib import Path
from typing import Annotated

import typer

from personax.cli.errors import plain_errors


def bench(
    only: Annotated[
        list[str] | None, typer.Option(help="Only the rows whose names begin with this: mnist, mnist-hf.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON; the table goes to stderr.")] = False,
    path: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the record to this file.")] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Measure personax only.")] = False,
    peers: Annotated[list[str] | None, typer.Option("--peer", help="Only this peer. May be repeated.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds for which each program of a row is timed.")] = 2.0,
    turns: Annotated[int, typer.Option(min=1, help="Number of turns that this time is divided into.")] = 3,
    note: Annotated[str, typer.Option(help="A remark on the machine, for the record.")] = "",
) -> None:
    """Time rounds against the machine's limits and against peers, measured in the same run (docs/performance.md)."""
    kept = "nothing was saved, because there is no --out" if path is None else f"the rows above are in {path}"
    with plain_errors(f"Interrupted; {kept}."):
        from personax.bench.peers import PEERS
        from personax.bench.record import BENCH, BenchRecord
        from personax.bench.show import header, row_words, summary
        from personax.bench.suite import BenchPlan, run_suite
        from personax.experiment.checkpoint import write_atomically
        from personax.values import check_names

        def keep(so_far: BenchRecord) -> None:
            typer.echo(row_words(so_far.rows[-1]), err=json)
            if path is not None:
                write_atomically(path, BENCH.dump_json(so_far, indent=1))

        check_names("personax bench", peers or [], PEERS, "peer")
        typer.echo(header(), err=json)
        plan = BenchPlan(seconds, turns, () if no_peers else tuple(peers or PEERS))
        record = run_suite(plan, only or (), note, keep)
        typer.echo(summary(record), err=json)
        if path is not None:
            typer.echo(f"The record is in {path}", err=json)
        if json:
            typer.echo(BENCH.dump_json(record, indent=1).decode())
