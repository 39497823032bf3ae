"""Measure the cost of reporting: a run as in `personax run`, with bars, metrics and checkpoints, against bare training.

`python benchmarks/reporting.py`
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from personax.cli.progress import Bars
from personax.experiment.build import resolve
from personax.experiment.config import load
from personax.experiment.runs import execute, start


def main() -> None:
    """Print the share of a run that is neither compiling, training nor evaluating."""
    given = load(None, ["schedule.num_rounds=2000", "split.num_held_out=0"])
    only = replace(given, algorithms={"FedAvg": given.algorithms["FedAvg"]})
    config = resolve(only, baselines=False)
    with tempfile.TemporaryDirectory() as place, Bars(Console(stderr=True), ["FedAvg"]) as bars:
        folder = start(config, Path(place) / "run")
        begin = time.perf_counter()
        record = execute(folder, bars)
        took = time.perf_counter() - begin
    spent = record.algorithms[0].seconds
    rest = took - sum(spent.values())
    print(f"{took:.1f} s: {', '.join(f'{name} {part:.1f}' for name, part in spent.items())}, the rest {rest:.2f} s")
    print(f"200 evaluations reported: {1000 * rest / 200:.1f} ms each, {rest / took:.1%} of the run")


if __name__ == "__main__":
    main()
