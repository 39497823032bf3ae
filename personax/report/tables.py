"""The tables of a report, as HTML."""

from collections.abc import Sequence
from html import escape

from personax.evaluation.scores import Interval, ScoreRow, higher_is_better
from personax.experiment.records import ScoreRecord
from personax.report import words
from personax.report.runs import GREYS, PALETTE, ReportedRun, Score, algorithm_labels
from personax.report.words import ROLES, number

DARK = dict([*PALETTE, *GREYS.values()])
THAN = {"local": "alone", "global": "with the global model"}


def headline(runs: Sequence[ReportedRun], scores: Sequence[Score], metric: str) -> str:
    """One row for each score: the mean with its interval, the spread, the comparison with the baselines."""
    roles = [role for role in ROLES if any(score.role == role for score in scores)]
    bodies = []
    for run in runs:
        mine = [score for score in scores if score.run is run and score.row(metric) is not None]
        if not mine:
            continue
        best = words.best_score(mine, metric)
        lines = [_headline_row(score, metric, roles, score is best) for score in mine]
        title = f"{escape(run.label)}{_small('seeds ' + ', '.join(map(str, run.record.seeds)))}"
        head = f"<th colspan='{6 + 2 * len(roles)}' scope='rowgroup'>{title}</th>"
        bodies.append([f"<tr class='run'>{head}</tr>" if len(runs) > 1 else "", *lines])
    better = "higher" if higher_is_better(metric) else "lower"
    caption = f"{escape(metric.capitalize())} at the end of the run; {better} is better"
    return table(caption, _headline_head(metric, roles), *bodies)


def notes(runs: Sequence[ReportedRun], scores: Sequence[Score]) -> str:
    """How to read the headline table."""
    several = any(len(run.record.seeds) > 1 for run in runs)
    notes = ["± is half a 95 % t-interval over seeds."] if several else []
    notes += ["Deciles are means over the tenth of the clients at either end."]
    if any(score.role for score in scores):
        notes += [
            "Differences are paired by seed; ▲ (better) and ▼ (worse) mark those whose interval excludes 0.",
            "A client is better off where its own number is strictly better than under the baseline.",
        ]
    notes += ["The best round is picked on test scores and is therefore optimistic: it is shown only beside the last."]
    if any(score.record.flag for score in scores) or len({score.group for score in scores}) > 1:
        notes += ["Scores that carry a warning, or are of other clients, are not ranked."]
    if len(runs) > 1:
        notes += ["The runs were made apart: differences and ranks are within each run, never between runs."]
    return f"<p class='words'>{' '.join(notes)}</p>"


def scorings(scores: Sequence[Score]) -> str:
    """What each score measured, in words."""
    rows = [
        f"<tr>{_name(score, _small(_recipe(score)))}"
        f"<td class='text'>{escape(_without_note(score.record))} {_flag(score.record.flag)}</td></tr>"
        for score in scores
    ]
    titles = ("Score and algorithm", "What is scored")
    head = "".join(f"<th scope='col' class='text'>{title}</th>" for title in titles)
    return table("The scoring of every score", f"<tr>{head}</tr>", rows)


def cost(runs: Sequence[ReportedRun]) -> str:
    """Time and traffic of each algorithm."""
    titles = ("Algorithm", "Rounds", "Updates", "Compile", "Train", "Evaluate", "Sent up", "Sent down")
    rows = []
    for label, _, algorithm in algorithm_labels(runs):
        spent = [words.seconds(algorithm.seconds.get(part, 0.0)) for part in ("compile", "train", "evaluate")]
        moved = [words.size(algorithm.bytes_up), words.size(algorithm.bytes_down)]
        lost = [_range(algorithm.num_dropped), _range(algorithm.num_skipped)]
        cells = [f"{algorithm.num_rounds:,}", f"{algorithm.num_events:,}", *spent, *moved, *lost]
        numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th scope='row'>{escape(label)}{_small(algorithm.mode)}</th>{numbers}</tr>")
    head = "".join(f"<th scope='col'>{title}</th>" for title in (*titles, "Dropped", "Skipped"))
    note = (
        "Times are of all seeds together, updates and bytes of each seed. Dropped updates were too stale, skipped ones "
        "not finite."
    )
    return f"{table('Time and bytes of every algorithm', f'<tr>{head}</tr>', rows)}<p class='words'>{note}</p>"


def facts(runs: Sequence[ReportedRun]) -> str:
    """When, where and with what several runs were made."""
    notes = [words.facts(run.record) for run in runs]
    titles = list(dict.fromkeys(title for one in notes for title in one))
    head = "".join(f"<th scope='col' class='text'>{escape(title)}</th>" for title in ("run", *titles))
    rows = []
    for run, one in zip(runs, notes, strict=True):
        cells = "".join(f"<td class='fact'>{escape(one.get(title, '–'))}</td>" for title in titles)
        rows.append(f"<tr><th scope='row'>{escape(run.label)}</th>{cells}</tr>")
    return table("The runs", f"<tr>{head}</tr>", rows)


def _headline_head(metric: str, roles: Sequence[str]) -> str:
    percent, points = (", %", ", points") if words.is_share(metric) else ("", "")
    groups, titles = [(3, f"across clients{percent}")], ["standard deviation", "worst decile", "best decile"]
    if roles:
        groups += [(len(roles), f"difference to{points}"), (len(roles), "clients better off than")]
        titles += [ROLES[role] for role in roles] + [THAN[role] for role in roles]
    over = "".join(f"<th colspan='{num}' scope='colgroup'><span>{title}</span></th>" for num, title in groups)
    titles = ["Score", f"mean {escape(metric)}{percent.replace(' ', '&nbsp;')}", *titles, f"best round{percent}"]
    under = "".join(f"<th scope='col'>{title}</th>" for title in titles)
    return f"<tr class='over'><td colspan='2'></td>{over}<td></td></tr><tr>{under}</tr>"


def _headline_row(score: Score, metric: str, roles: Sequence[str], is_best: bool) -> str:
    row = score.row(metric)
    assert row is not None
    kinds = " ".join(kind for kind, holds in (("baseline", score.role), ("best", is_best)) if holds)
    best = score.record.best.get(metric)
    better = [None if score.role == role else getattr(row, f"better_than_{role}") for role in roles]
    cells = [
        f"<td class='mean'>{_breakable(number(row.mean, metric))}</td>",
        *(f"<td>{number(value, metric)}</td>" for value in (row.std, row.worst_decile, row.best_decile)),
        *(_difference(row, role, metric, score.role == role) for role in roles),
        *(f"<td>{words.share(part)}</td>" for part in better),
        f"<td>{number(best.mean.mean, metric)}{_small(words.rounds(best.rounds))}</td>" if best else "<td>–</td>",
    ]
    return f"<tr class='{kinds}'>{_name(score, _tags(score, metric, is_best))}{''.join(cells)}</tr>"


def _tags(score: Score, metric: str, is_best: bool) -> str:
    tags = []
    if score.role:
        tags.append("baseline" if score.label == ROLES[score.role] else f"baseline: {ROLES[score.role]}")
    if is_best:
        tags.append(f"{'highest' if higher_is_better(metric) else 'lowest'} mean")
    return "".join(map(_small, tags)) + _flag(score.record.flag)


def _difference(row: ScoreRow, role: str, metric: str, is_itself: bool) -> str:
    change = None if is_itself else row.over_local if role == "local" else row.over_global
    if change is None:
        return "<td>–</td>"
    kind, mark = _clear(change, metric)
    return f"<td class='change {kind}'>{_breakable(number(change, metric, signed=True))}{mark}</td>"


def _clear(change: Interval, metric: str) -> tuple[str, str]:
    """A class and a mark where the interval of a difference excludes zero."""
    gain, loss = change.is_above(0), change.is_below(0)
    if not higher_is_better(metric):
        gain, loss = loss, gain
    for holds, kind, sign, word in ((gain, "gain", "▲", "better"), (loss, "loss", "▼", "worse")):
        if holds:
            return kind, f"&nbsp;<span aria-hidden='true'>{sign}</span><span class='hidden'>{word}</span>"
    return "", ""


def table(caption: str, head: str, *bodies: Sequence[str]) -> str:
    """A table that scrolls sideways in a box of its own where the page is too narrow."""
    inner = "".join(f"<tbody>{''.join(rows)}</tbody>" for rows in bodies)
    table = f"<table><caption><span>{caption}</span></caption><thead>{head}</thead>{inner}</table>"
    return f"<div class='scroll' tabindex='0' role='region' aria-label='{caption}'>{table}</div>"


def _name(score: Score, more: str = "") -> str:
    look = score.look
    line = "dotted" if score.role else "solid" if look.dash == "solid" else "dashed"
    swatch = f"<span class='swatch {line}' style='--light:{look.colour};--dark:{DARK[look.colour]}'></span>"
    return f"<th scope='row' class='drawn'>{swatch}{escape(score.label)}{more}</th>"


def _breakable(text: str) -> str:
    """A number with its interval, which may stand below it where the table is narrow."""
    return text.replace("± ", "±&nbsp;")


def _small(text: str) -> str:
    return f"<span class='small'>{escape(text)}</span>"


def _flag(flag: str) -> str:
    return f"<span class='flag'>⚠ {escape(flag)}</span>" if flag else ""


def _without_note(score: ScoreRecord) -> str:
    """The words of a scoring; its warning is shown beside them."""
    return score.words.replace(f" NOTE: {score.flag}.", "") if score.flag else score.words


def _recipe(score: Score) -> str:
    of_another_name = "" if score.algorithm.name == score.name else f"{score.algorithm.name}, "
    return f"{of_another_name}recipe {score.algorithm.recipe}"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
