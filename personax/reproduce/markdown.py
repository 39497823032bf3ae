"""Reproductions as a page of Markdown: `python -m personax.reproduce.markdown docs/results > docs/reproduction.md`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from personax.reproduce import EXPERIMENTS
from personax.reproduce.outcome import (
    REPRODUCTION,
    CellRecord,
    ReadingRecord,
    ReproductionRecord,
    difference_shown,
    shown,
)

HEAD = """# Reproduction

Every table below is made from the `results.json` of one command, kept in [results/](results/). Accuracies are in %,
ours with a 95 % t-interval over seeds. "Difference" is ours, under the first reading, less the paper's. A claim *holds*
where the paired interval over seeds of what it compares lies above 0, *does not hold* where it lies below, and is
*undecided* in between. Of several comparisons it *holds in part* if some hold, and *does not hold* if none does and one
fails. `(!)` marks numbers of models that were adapted on
the data that is scored, and of runs that left updates out because they were not finite.
"""


FINDINGS = {
    "fallah-table1": (
        "Every number is far above the paper's. The initialisation, which the paper does not state, is part of the "
        "reason: from PyTorch's default (`personax reproduce fallah-initialisation --seeds 3`, stopped after 8 of 18 "
        "cells, on a CPU) MNIST with 4 steps gives 62.6, 64.8 and 67.5 for FedAvg, FO and HF, where the paper has "
        "60.2, 64.6 and 70.9. It is not the whole reason: with 10 steps it gives 88.3, 89.4 and 92.9 (paper 76.0, 78.0 "
        "and 79.9), and on CIFAR-10 with 10 steps 64.4 and 62.9 for FedAvg and FO (40.5, 47.0). Normal kernels of "
        "another deviation, tried on MNIST with 4 steps and one seed, do not come nearer: 27.6 for all three with "
        "0.01, 85.5, 87.2 and 91.6 with 0.1, 86.5, 91.0 and 92.7 with 1.",
        "First-order does not collapse on CIFAR-10. Here, too, the start matters: from PyTorch's default (row 5, 1000 "
        "rounds, 2 seeds, on a CPU) FO ends at 58.1 and FedAvg at 59.2, which is the paper's order, where FO is 4.6 "
        "points ahead from a Glorot start. The scaling of the inputs (row 5, 300 rounds, 2 seeds, on a CPU) is not the "
        "reason: bytes as they are make both meta methods diverge, and standardised inputs leave the order as it is "
        "(FedAvg 54.3, FO 57.1, HF 58.3). A larger training step opens gaps of the paper's size: with 0.01 for 0.001 "
        "(row 4, one seed, on a CPU) FedAvg, FO and HF end at 46.0, 49.8 and 67.9. What makes FO fall below FedAvg, to "
        "25 % in row 5, was not found.",
        "On MNIST the seed of the split matters more than the seeds of a run: three others gave 92.1 to 92.6, 93.9 to "
        "94.4 and 95.4 to 96.3 for FedAvg, FO and HF with 10 steps.",
        "The Hessian-free and the exact product cannot be told apart at this radius.",
        "The 18 cells of the paper alone took 86 s on the same machine.",
    ),
    "fallah-appendix": (
        "ARUBA is ahead of HF, against the paper. A larger step at test time is not the reason: FedAvg with one of "
        "0.03 is worse. A larger training step is part of it: with 0.01 for 0.001 (one seed, on a CPU) HF ends at 67.9 "
        "and still rises, 2.6 points below ARUBA; FedAvg (46.0) and FO (49.8) fall.",
        "ARUBA's scale was chosen from five, the others' step sizes are the paper's: it alone was tuned. `personax "
        "reproduce fallah-tuned` chooses the training steps of all on validation data.",
    ),
    "gmeta-figure1": (
        "Three steps of fine-tuning bring every algorithm above 92 %, which leaves little room between one and three "
        "adaptation steps. Other concentrations were not run.",
        "Run in full float32 precision.",
    ),
    "apfl-table1": (
        "The scaling of the inputs decides. On standardized ones all seeds learn: APFL ends at 79 to 83 %, 6 to 10 "
        "points below the paper, localized FedAvg 5 to 6 below. From pixels in [0, 1] (three seeds, no record kept) "
        "one seed of three hardly learned a shared model (9.8, 25.2 and 30.4 %), APFL ended at 64 to 78 % and SCAFFOLD "
        "at chance; a geometric step over all steps vanished there, with localized FedAvg at 30 %.",
        "APFL beats localized FedAvg in 26 of 30 comparisons; the others are undecided. With a step that decays once a "
        "round 0.25 has the best accuracy, as in the paper.",
        "SCAFFOLD's shared model comes near with 1/(1 + t) over all steps, where its step ends at 0.001 and localizing "
        "it changes little. Once a round it diverges with one or two of three seeds: up to 9541 of 30,000 updates were "
        "not finite. What gives 85.3 % for its localized model was not found.",
        "A larger network, 32 and 64 channels and 512 units, gave 84.3 and 83.4 % with 0.25 on two seeds, the one here "
        "84.0 and 83.4 in the same trial. Other numbers of rounds were not run.",
    ),
    "apfl-table2": (
        "With a step that decays once a round, in either form, the fixed weights come within 0.2 points of the paper's "
        "accuracies and FedAvg's shared model within 3. Over all 2000 steps, as printed, 1/(1 + t) leaves the fixed "
        "weights 0.1 to 0.5 and the shared model 6.7 points below; a geometric step vanishes (12.7 points).",
        "Adaptive mixing from 0.5 ends at the lowest training loss, but for the geometric step over all steps, and "
        "overfits a little. From 0.01 it is 3 points above the shared model of FedAvg and 3 below its localized one: "
        "v's gradient carries the factor of the weight, so a small weight learns slowly.",
        "perFedAvg hardly moves with the stated steps of 0.01 and 0.001: 52 % after one adaptation step, 78 % after a "
        "round of 20. What gives 97.8 in the paper was not found. (Its second reading comes from a second run of that "
        "training alone.)",
        "McMahan's shards change every column by less than 0.8 points, perFedAvg's by 6: the split is not the reason "
        "for what differs.",
        "Run in two sittings, 196 s for the four readings and 50 s for the shards: eight columns, adaptive mixing from "
        "0.01 beside them, with compilation.",
    ),
    "apfl-table3": (
        "The order is reversed: localized FedAvg is ahead of every mixture, under both splits. Accuracies of 98 % with "
        "480 samples a client are what Table 2 has with 2 classes a client; at a concentration of 1 clients hold more.",
    ),
    "apfl-figure2": (
        "The paper says two things of 2 classes: that 0.25 is best (section 5), and that larger weights are preferable "
        "(appendix B.2, of the same figure). Here the second holds, by 0.2 points. At 4 classes 0.25 and 0.5 cannot be "
        "told apart, and when IID the smallest weight is best.",
        "SCAFFOLD's localized model is below FedAvg's at 2 and 4 classes; in Table 1 of the paper it is above.",
    ),
    "apfl-figure3": (
        "From 0.5 adaptive mixing is 4 to 6 points above localized FedAvg on all three sets and nearly level across "
        "them. From 0.01, as stated, three seeds cannot tell it from localized FedAvg.",
    ),
    "apfl-figure4": ("The sampling rate hardly matters to FedAvg here.",),
    "apfl-figure5": (
        "On the stand-in, not on EMNIST: invented writers with about 30 digits each (`personax data stand-in`). Its "
        "numbers say that the experiment runs, and nothing of the paper's. Run on 2 cores in two sittings.",
    ),
    "persafl-figure2": (
        "(b): at equal time the asynchronous methods are 20 points ahead. After the same ten steps of personalization "
        "FedAsync cannot be told from the personalized ones. A run to 600 units of time, of which no record is kept, "
        "gave 98.7 for FedAsync, 98.3 for MAML, 97.8 for ME, 80 to 84 for the synchronous ones.",
        "(c): nobody learns. Guessing one of a client's three classes scores 33 %, and every mean is below that, so "
        "its claims say nothing of the paper's. The asynchronous methods waver between 10 and 38 % from one evaluation "
        "to the next: with the stated steps each of some 25 updates under way is applied in full. For FedAsync the "
        "start is not the reason: from a Glorot start (one seed, on a CPU) it goes from 34 to 36, 10 and 19 % after "
        "42, 84 and 132 units of time. FedAvg, from there, rises from 34 to 41 %.",
        "On standardized inputs (c) begins to be learned (three seeds, no record kept; the four personalized methods "
        "were not run): FedAvg 38.8, FedProx 38.8, SCAFFOLD 39.9 and still rising, FedAsync 22.7 and wavering.",
        "With one batch as the budget (three seeds, no record kept; Per-FedAvg, MAML and ME not run) all of (b) are "
        "0.2 to 2.7 points lower: FedAsync 97.8, FedAvg 75.2, FedProx 75.0, SCAFFOLD 73.4, pFedMe 71.3.",
        "(a) and (b) took 168 s with compilation, (c) 233 s.",
    ),
    "apfl-figure6": (
        "After 5 epochs APFL's training loss is lower on synthetic(0.5, 0.5). Three newcomers, who hold 150 test "
        "samples together and are the same for all ten seeds, decide no accuracy: +2.5 (-1.4 to +6.3) and +6.3 (-1.4 "
        "to +13.9) points.",
    ),
}


def page(records: Sequence[ReproductionRecord]) -> str:
    """All reproductions, one section for each, and those that were not run in full yet."""
    missing = [name for name in EXPERIMENTS if name not in {record.name for record in records}]
    left = f"Not run in full yet: {', '.join(missing)}.\n" if missing else ""
    return "\n".join([HEAD, *(section(record) for record in records), left])


def section(record: ReproductionRecord) -> str:
    """One reproduction: its tables, its claims, what was chosen."""
    machine = f"{record.machine['device']}, jax {record.machine['jax']}"
    summary = (
        f"`{record.command}`, {record.started[:10]}, {machine}, {record.seconds:.0f} s, {len(record.seeds)} seeds, "
    )
    rows = dict.fromkeys(cell.row for cell in record.cells)
    tables = [_table(row, [cell for cell in record.cells if cell.row == row]) for row in rows]
    claims = ["| claim | place | here | paired difference |", "|---|---|---|---|"]
    for claim in record.claims:
        found = "; ".join(f"{row.name}: {difference_shown(row)}" for row in claim.contrasts)
        claims.append(f"| {claim.words} | {claim.place} | **{claim.verdict}** | {found} |")
    choices = [f"- {choice}" for choice in record.choices]
    data = [f"- Data, {name}: {origin}" for name, origin in record.data.items()]
    title = f"## {record.name}\n\n{record.source}: {record.title}."
    parts = [title, f"{summary}{record.length}.", *tables, "\n".join(claims)]
    findings = "\n".join(f"- {found}" for found in FINDINGS.get(record.name, ()))
    found = ["What was found:", findings] if findings else []
    return "\n\n".join(
        [*parts, *found, "What the paper does not say, and what was chosen:", "\n".join([*choices, *data]), ""]
    )


def _table(row: str, cells: Sequence[CellRecord]) -> str:
    names = list(dict.fromkeys(reading.reading for cell in cells for reading in cell.readings))
    lines = [f"| {row} | paper | {' | '.join(names)} | difference |", "|---" * (len(names) + 3) + "|"]
    for cell in cells:
        found = {reading.reading: reading for reading in cell.readings}
        paper, away = "", ""
        if cell.paper is not None and cell.paper_interval is not None:
            paper = f"{shown(cell.paper, cell.metric)} ± {shown(cell.paper_interval, cell.metric)}"
            away = shown(cell.readings[0].ours - cell.paper, cell.metric, "+")
        name = f"{cell.column}, {cell.chosen}" if cell.chosen else cell.column
        ours = " | ".join(_number(found.get(name), cell.metric) for name in names)
        lines.append(f"| {name} | {paper} | {ours} | {away} |")
    return "\n".join(lines)


def _number(reading: ReadingRecord | None, metric: str) -> str:
    if reading is None:
        return ""
    half = "" if reading.high is None else f" ± {shown(reading.high - reading.ours, metric)}"
    return f"{shown(reading.ours, metric)}{half}{' (!)' if reading.flag else ''}"


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).glob("*.json"))
    sys.stdout.write(page([REPRODUCTION.validate_json(file.read_bytes()) for file in files]))
