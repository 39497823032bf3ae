"""The tables of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from personax.evaluation.scores import Interval, ScoreRow, higher_is_better
from personax.experiment.records import ScoreRecord
from personax.experiment.targets import describe
from personax.report import words
from personax.report.document import Group, Notes, Paragraph, Row, Swatch, Table, TableCell, table
from personax.report.runs import GRAYS, PALETTE, ReportedRun, Score, algorithm_labels
from personax.report.words import ROLES, number

DARK = dict([*PALETTE, *GRAYS.values()])
THAN = {"local": "alone", "global": "with the global model"}
NO_BREAK = "\N{NO-BREAK SPACE}"
COST = Paragraph(
    "Times cover all seeds together; updates and bytes are per seed. Dropped updates were too stale, skipped updates "
    "were not finite.",
    "words",
)


def headline(runs: Sequence[ReportedRun], scores: Sequence[Score], metric: str) -> Table:
    """Make the headline table: each score's mean with interval, spread, and comparison with the baselines."""
    roles = [role for role in ROLES if any(score.role == role for score in scores)]
    groups = []
    for run in runs:
        mine = [score for score in scores if score.run is run and score.row(metric) is not None]
        if not mine:
            continue
        best = words.best_score(mine, metric)
        title = TableCell(run.label, small=[f"seeds {', '.join(map(str, run.record.seeds))}"])
        rows = [_headline_row(score, metric, roles, score is best) for score in mine]
        groups.append(Group(rows, title if len(runs) > 1 else None))
    better = "higher" if higher_is_better(metric) else "lower"
    caption = f"{metric.capitalize()} at the end of the run; {better} is better"
    percent, points = (", %", ", points") if words.is_share(metric) else ("", "")
    over = [(f"across clients{percent}", 3)]
    titles = ["standard deviation", "worst decile", "best decile"]
    if roles:
        over += [(f"difference from{points}", len(roles)), ("clients better off than", len(roles))]
        titles += [ROLES[role] for role in roles] + [THAN[role] for role in roles]
    titles = ["Score", f"mean {metric}{percent.replace(' ', NO_BREAK)}", *titles, f"best round{percent}"]
    heads, shown = [TableCell(title) for title in titles], [score for score in scores if score.row(metric) is not None]
    return Table(caption, heads, groups, over, _full_numbers(shown, metric))


def notes(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> Notes:
    """Select the notes that explain the headline table."""
    return Notes(
        several_seeds=any(len(run.record.seeds) > 1 for run in runs),
        baselines=any(score.role for score in scores),
        unranked=any(score.record.flag for score in scores) or len({score.group for score in scores}) > 1,
        diverged=any(row.num_lost for run in runs for row in run.record.table),
        several_runs=len(runs) > 1,
    )


def scorings(scores: Sequence[Score]) -> Table:
    """Describe what each score measured."""
    rows = [
        Row(_name(score, [_recipe(score)]), [TableCell(_without_note(score.record), "text", flag=score.record.flag)])
        for score in scores
    ]
    return table("What every score measures", ("Score and algorithm", "What is scored"), rows, "text")


def cost(runs: Sequence[ReportedRun]) -> Table:
    """Tabulate the time and traffic of each algorithm."""
    titles = ("Algorithm", "Rounds", "Updates", "Compile", "Train", "Evaluate", "Sent up", "Sent down")
    rows = []
    for label, _, algorithm in algorithm_labels(runs):
        spent = [words.seconds(algorithm.seconds.get(part, 0.0)) for part in ("compile", "train", "evaluate")]
        moved = [words.size(algorithm.bytes_up), words.size(algorithm.bytes_down)]
        lost = [_range(algorithm.num_dropped), _range(algorithm.num_skipped)]
        cells = [f"{algorithm.num_rounds:,}", f"{algorithm.num_events:,}", *spent, *moved, *lost]
        rows.append(Row(TableCell(label, small=[algorithm.mode]), [TableCell(cell) for cell in cells]))
    return table("Time and traffic of every algorithm", (*titles, "Dropped", "Skipped"), rows)


def targets(runs: Sequence[ReportedRun]) -> Table | None:
    """Make the table of the cost of reaching the target of each run; None without a target."""
    rows, captions = [], []
    for run in runs:
        target = run.record.target
        if target is None:
            continue
        captions.append(describe(target))
        for one in target.scores:
            num = len(run.record.seeds)
            shown = [_amount(one.rounds, "{:.4g}"), _amount(one.time, "{:.4g}"), _bytes(one.bytes)]
            seeds = f"{one.num_reached} of {num}"
            label = f"{run.label}: {one.score}" if len(runs) > 1 else one.score
            rows.append(Row(TableCell(label), [TableCell(cell) for cell in (*shown, seeds)]))
    if not rows:
        return None
    titles = ("Score", "Rounds", "Virtual time", "Bytes sent", "Seeds that reach it")
    return table(f"Cost of reaching the target: {'; '.join(dict.fromkeys(captions))}", titles, rows)


def _amount(found: Interval | None, form: str) -> str:
    """A mean over seeds, with half its interval where it has one."""
    if found is None:
        return "–"
    half = "" if found.half is None else f" ± {form.format(found.half)}"
    return form.format(found.mean) + half


def _bytes(found: Interval | None) -> str:
    return "–" if found is None else words.size(found.mean)


def facts(runs: Sequence[ReportedRun]) -> Table:
    """Tabulate the date, machine and versions of several runs."""
    notes = [words.facts(run.record) for run in runs]
    titles = list(dict.fromkeys(title for one in notes for title in one))
    rows = [
        Row(TableCell(run.label), [TableCell(one.get(title, "–"), "fact") for title in titles])
        for run, one in zip(runs, notes, strict=True)
    ]
    return table("The runs", ("run", *titles), rows, "text")


def _full_numbers(scores: Sequence[Score], metric: str) -> list[Sequence[object]]:
    """Return the rows of a metric at full precision with interval ends, for the CSV."""
    found = [(score.run.label, score.row(metric)) for score in scores]
    rows = [{"run": label, **_flattened(asdict(row))} for label, row in found if row is not None]
    titles = list(dict.fromkeys(title for row in rows for title in row))
    return [titles, *([row.get(title) for title in titles] for row in rows)]


def _flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the intervals of a row into `mean`, `mean_low`, `mean_high`, `mean_num_seeds`, ..."""
    flat = {}
    for name, value in row.items():
        parts = value if isinstance(value, dict) else {"mean": value}
        flat |= {name if part == "mean" else f"{name}_{part}": number for part, number in parts.items()}
    return flat


def _headline_row(score: Score, metric: str, roles: Sequence[str], is_best: bool) -> Row:
    row = score.row(metric)
    assert row is not None
    kinds = " ".join(kind for kind, holds in (("baseline", score.role), ("best", is_best)) if holds)
    best = score.record.best.get(metric)
    spread = (row.std, row.worst_decile, row.best_decile) if row.mean.num_seeds else (None, None, None)
    better = [None if score.role == role else getattr(row, f"better_than_{role}") for role in roles]
    cells = [
        TableCell(_mean(score, row, metric), "mean", [row.seeds_left] if row.seeds_left else []),
        *(TableCell(number(value, metric)) for value in spread),
        *(_difference(row, role, metric, score.role == role) for role in roles),
        *(TableCell(words.share(part)) for part in better),
        TableCell(number(best.mean.mean, metric), small=[words.rounds(best.rounds)]) if best else TableCell("–"),
    ]
    return Row(_name(score, _tags(score, metric, is_best), score.record.flag), cells, kinds)


def _mean(score: Score, row: ScoreRow, metric: str) -> str:
    """Format the mean with its interval, or report that all seeds diverged."""
    diverged = score.diverged and not row.mean.num_seeds
    return "diverged" if diverged else _with_interval(number(row.mean, metric))


def _tags(score: Score, metric: str, is_best: bool) -> list[str]:
    tags = []
    if score.role:
        tags.append("baseline" if score.label == ROLES[score.role] else f"baseline: {ROLES[score.role]}")
    if score.diverged:
        tags.append(score.diverged)
    if is_best:
        tags.append(f"{'highest' if higher_is_better(metric) else 'lowest'} mean")
    return tags


def _difference(row: ScoreRow, role: str, metric: str, is_itself: bool) -> TableCell:
    change = None if is_itself else row.over_local if role == "local" else row.over_global
    if change is None:
        return TableCell("–")
    mark = _clear(change, metric)
    kind = {"better": "change gain", "worse": "change loss", "": "change"}[mark]
    return TableCell(_with_interval(number(change, metric, signed=True)), kind, mark=mark)


def _clear(change: Interval, metric: str) -> str:
    """Return "better" or "worse" if the interval of a difference excludes zero, otherwise an empty string."""
    better, worse = ("better", "worse") if higher_is_better(metric) else ("worse", "better")
    return better if change.is_above(0) else worse if change.is_below(0) else ""


def _name(score: Score, small: Sequence[str], flag: str = "") -> TableCell:
    look = score.look
    line = "dotted" if score.role else "solid" if look.dash == "solid" else "dashed"
    return TableCell(score.label, "drawn", small, flag, swatch=Swatch(line, look.color, DARK[look.color]))


def _with_interval(text: str) -> str:
    """Let the interval of a number wrap to the next line in a narrow table."""
    return text.replace("± ", f"±{NO_BREAK}")


def _without_note(score: ScoreRecord) -> str:
    """Return the description of a scoring without its warning, which is shown separately."""
    return score.words.replace(f" NOTE: {score.flag}.", "") if score.flag else score.words


def _recipe(score: Score) -> str:
    of_another_name = "" if score.algorithm.name == score.name else f"{score.algorithm.name}, "
    return f"{of_another_name}recipe {score.algorithm.recipe}"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
