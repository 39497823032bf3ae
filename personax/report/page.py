"""The page of a report: sections, words and figures in one HTML file that asks the network for nothing."""

import json
from collections.abc import Iterator, Sequence
from html import escape

from plotly.offline import get_plotlyjs

from personax.report import figures, tables
from personax.report.figures import Figure
from personax.report.look import SCRIPT, STYLE
from personax.report.runs import GREYS, PALETTE, ReportedRun, Score, algorithm_labels, scores_of
from personax.report.words import facts, verdict

# The policy forbids every request, whatever a name or a script may ask for.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="figures">{figures}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""
Section = tuple[str, str, str]  # its anchor, its title, its HTML


def render(runs: Sequence[ReportedRun]) -> str:
    """The whole page."""
    scores = scores_of(runs)
    metrics = list(
        dict.fromkeys([run.record.headline for run in runs] + [m for run in runs for m in run.record.metrics])
    )
    drawn: list[Figure] = []
    sections = list(_sections(runs, scores, metrics, drawn))
    named = runs[0].label if len(runs) == 1 else f"{len(runs)} runs: {' · '.join(run.label for run in runs)}"
    about = facts_html(facts(runs[0].record)) if len(runs) == 1 else tables.facts(runs)
    return document(named, about, sections, drawn, "the results.json, clients.parquet and config.toml of a run")


def document(named: str, about: str, sections: Sequence[Section], drawn: Sequence[Figure], source: str) -> str:
    """A page from its sections and figures."""
    links = "".join(f"<li><a href='#{anchor}'>{title}</a></li>" for anchor, title, _ in sections)
    body = [
        f"<header><h1>{escape(named)}</h1>{about}",
        f"<nav aria-label='Sections'><ul>{links}</ul></nav></header><main>",
        "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>",
        *(f"<section id='{anchor}'><h2>{title}</h2>{inner}</section>" for anchor, title, inner in sections),
        f"</main><footer>Made by personax from {source}.</footer>",
    ]
    return PAGE.format(
        title=f"{escape(named)} · personax",
        style=STYLE,
        body="\n".join(body),
        figures=_as_json(drawn),
        plotly=get_plotlyjs(),
        script=SCRIPT,
    )


def _sections(
    runs: Sequence[ReportedRun], scores: Sequence[Score], metrics: Sequence[str], drawn: list[Figure]
) -> Iterator[Section]:
    """The sections in order; the figures that they hold are added to `drawn`."""

    def with_figures(anchor: str, title: str, *made: Figure | None) -> Iterator[Section]:
        found = [figure for figure in made if figure is not None]
        drawn.extend(found)
        if found:
            inner = "".join(figure_html(figure, with_title=figure.title != title) for figure in found)
            paired = len(found) == 2 and not any(figure.choices for figure in found)
            yield anchor, title, f"<div class='pair'>{inner}</div>" if paired else inner

    yield "results", "Results", _results(runs, scores, metrics)
    yield from with_figures("curves", "Learning curves", figures.learning_curves(scores, metrics))
    each = (figures.distribution(scores, metrics), figures.changes(scores, metrics))
    yield from with_figures("clients", "Client by client", *each)
    yield from with_figures("mixing", "Mixing weights", *figures.mixing(runs, scores))
    yield from with_figures("activity", "Staleness and activity", *figures.activity(runs, scores))
    yield from with_figures("stationarity", "Stationarity", figures.stationarity(runs, scores))
    yield from with_figures("newcomers", "New clients", figures.newcomers(scores, metrics))
    yield "federation", "Federation", "".join(_federation(run, len(runs) > 1) for run in runs)
    yield "protocols", "What each score measures", tables.scorings(scores)
    yield "cost", "Time and traffic", tables.cost(runs)
    yield "configuration", "Configuration", "".join(_configuration(run) for run in runs)
    yield "citations", "Citations", _citations(runs)


def _results(runs: Sequence[ReportedRun], scores: Sequence[Score], metrics: Sequence[str]) -> str:
    """What was found in words, the table of each headline metric, the other metrics folded away."""
    parts = []
    for run in runs:
        facts = verdict(run, [score for score in scores if score.run is run], run.record.headline)
        named = f"<strong>{escape(run.label)}.</strong> " if len(runs) > 1 else ""
        parts += [f"<p class='verdict'>{named}{escape(facts)}</p>"] if facts else []
    headlines = list(dict.fromkeys(run.record.headline for run in runs))
    others = [m for m in metrics if m not in headlines and any(score.row(m) is not None for score in scores)]
    parts += [tables.headline(runs, scores, metric) for metric in headlines]
    parts.append(tables.notes(runs, scores))
    for metric in others:
        table = tables.headline(runs, scores, metric)
        parts.append(f"<details><summary>The same by {escape(metric)}</summary>{table}</details>")
    return "".join(parts)


def figure_html(figure: Figure, with_title: bool) -> str:
    """A figure's place on the page, its words and its selectors."""
    title = f"<h3>{escape(figure.title)}</h3>" if with_title else ""
    label = escape(figure.alt)
    return (
        f"<figure>{title}<figcaption class='words'>{escape(figure.words)}</figcaption>{_choices(figure)}"
        f"<div class='plot' id='plot-{figure.name}' role='img' aria-label='{label}'></div></figure>"
    )


def _choices(figure: Figure) -> str:
    """A selector for each choice; one with a single option is hidden, but counts."""
    made = []
    for name, options in figure.choices.items():
        listed = "".join(f"<option>{escape(option)}</option>" for option in options)
        select = f"<select data-figure='{figure.name}'>{listed}</select>"
        hidden = " hidden" if len(options) == 1 else ""
        made.append(f"<label{hidden}>{escape(name)} {select}</label>")
    return f"<div class='choices'>{''.join(made)}</div>" if made else ""


def bullets(lines: Sequence[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def facts_html(facts: dict[str, str]) -> str:
    """Names and values in a row."""
    pairs = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl class='facts'>{''.join(pairs)}</dl>"


def _federation(run: ReportedRun, with_name: bool) -> str:
    about = run.record.federation
    facts = {
        "clients in training": f"{about.num_clients:,}",
        "clients held out": f"{about.num_held_out:,}",
        "training samples": f"{about.num_samples:,}",
        "test samples": f"{about.num_test_samples:,}",
    }
    title = f"<h3>{escape(run.label)}</h3>" if with_name else ""
    lines = "".join(f"<span class='line'>{escape(line)}</span>" for line in about.summary.splitlines())
    return f"{title}{facts_html(facts)}<pre>{lines}</pre>"


def _configuration(run: ReportedRun) -> str:
    return f"<details><summary>config.toml of {escape(run.label)}</summary><pre>{escape(run.config)}</pre></details>"


def _citations(runs: Sequence[ReportedRun]) -> str:
    """The keys of BibTeX entries and what each stands for."""
    cited: dict[str, dict[str, None]] = {}
    for label, _, algorithm in algorithm_labels(runs):
        for key in algorithm.citations:
            cited.setdefault(key, {})[label] = None
    for run in runs:
        for key in run.record.federation.citations:
            cited.setdefault(key, {})["the data"] = None
    if not cited:
        return "<p>None.</p>"
    lines = (f"<li><code>{escape(key)}</code> {escape(', '.join(of))}</li>" for key, of in cited.items())
    return f"<ul>{''.join(lines)}</ul>"


def _as_json(drawn: Sequence[Figure]) -> str:
    """The figures for the script; no character in it can end its element."""
    described = [{"name": f.name, "views": [view.to_plotly_json() for view in f.views]} for f in drawn]
    content = {"figures": described, "colours": [*PALETTE, *GREYS.values()]}
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
