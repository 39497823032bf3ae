"""Judge committed records again, without training: `python -m personax.reproduce.rejudge docs/results`.

Run it after a change of claims, readings or choices. Cells that an experiment no longer has are removed.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax

from personax.experiment.checkpoint import write_atomically
from personax.reproduce import EXPERIMENTS
from personax.reproduce.experiment import Experiment, PaperTraining
from personax.reproduce.judging import judge
from personax.reproduce.outcome import REPRODUCTION, CellRecord, ReproductionRecord, ScoringRecord, left_out_words
from personax.reproduce.run import reading_record

_LEFT_OUT = re.compile(r"(?<!of )(?<![\d,])(\d+) updates were not finite and were left out")


def rejudged(record: ReproductionRecord, experiment: Experiment) -> ReproductionRecord:
    """Return the record with the claims, readings and choices of the experiment, judged from its own numbers."""
    trainings = {(cell.row, cell.column): training for training in experiment.trainings for cell in training.cells}
    seeds = record.seeds
    cells = [
        _counted(cell, trainings[cell.row, cell.column], seeds)
        for cell in record.cells
        if (cell.row, cell.column) in trainings
    ]
    return replace(
        record,
        source=experiment.source,
        title=experiment.title,
        length=experiment.length,
        readings=[reading_record(one) for one in experiment.readings],
        cells=cells,
        claims=[judge(claim, cells, experiment.readings) for claim in experiment.claims],
        choices=list(experiment.choices),
    )


def _counted(cell: CellRecord, training: PaperTraining, seeds: Sequence[int]) -> CellRecord:
    """Move the number of updates that were left out from the flag of an earlier version to the cell."""
    found = [_LEFT_OUT.search(one.flag) for one in cell.scorings]
    num = next((int(one[1]) for one in found if one is not None), 0)
    if not num:
        return cell
    total = sum(training.schedule(key=jax.random.key(seed)).num_events for seed in seeds)
    words = left_out_words(num, total)
    flagged = lambda one: replace(one, flag=_LEFT_OUT.sub(words, one.flag))
    scorings: list[ScoringRecord] = [flagged(one) for one in cell.scorings]
    return replace(cell, scorings=scorings, num_left_out=num, num_updates=total)


def rejudge_all(folder: Path) -> None:
    """Judge every record of a folder again, in place."""
    for path in sorted(folder.glob("*.json")):
        record = REPRODUCTION.validate_json(path.read_bytes())
        again = rejudged(record, EXPERIMENTS[record.name](False))
        write_atomically(path, REPRODUCTION.dump_json(again, indent=1))


if __name__ == "__main__":
    rejudge_all(Path(sys.argv[1]))
