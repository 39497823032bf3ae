"""Plotly lines, bands and bars in the style of a score. Text is escaped because Plotly interprets some HTML."""

from collections.abc import Iterable, Sequence
from html import escape
from math import isfinite
from typing import Any

import numpy as np
import plotly.graph_objects as go

from personax.evaluation.scores import higher_is_better, interval
from personax.report.clients import Sorted
from personax.report.runs import GRAYS, PALETTE, Look
from personax.report.words import is_share, unit

BAND = "26"  # the alpha of a band, in hexadecimal
SPREAD = (("solid", 2), ("dot", 1), ("dash", 1))  # styles of the mean and of the two extremes
LONGEST = 34  # characters of a name in a legend


def figure(traces: Iterable[Any], x: str, y: str, **axis_y: Any) -> go.Figure:
    """Make a figure from traces and axis titles; the page sets colors, margins and height."""
    data = list(traces)
    layout = {
        "template": go.layout.Template(),
        "xaxis": {"title": {"text": escape(x)}, "automargin": True, "zeroline": False},
        "yaxis": {"title": {"text": escape(y)}, "automargin": True, "zeroline": False, **axis_y},
        "hovermode": "closest",
        "bargap": 0.12,
        "showlegend": True,
    }
    if not data:
        nothing = {"text": "No numbers for this choice.", "showarrow": False, "xref": "paper", "yref": "paper"}
        layout["annotations"] = [{**nothing, "x": 0.5, "y": 0.5}]
    return go.Figure(data, layout)


def band_and_line(look: Look, label: str, x: Sequence[float], of_seeds: Sequence[Any], metric: str) -> list[go.Scatter]:
    """Draw the mean over seeds, with its 95 % t-interval as a band if there are several.

    Only seeds with a value at the last point count: the others diverged.
    """
    points = np.asarray(of_seeds, float)
    left = np.isfinite(points[-1]) if np.isfinite(points[-1]).any() else slice(None)
    found = [interval(_scale(metric) * numbers[left]) for numbers in points]
    known = [
        (at, one.low, one.high)
        for at, one in zip(x, found, strict=True)
        if one.low is not None and one.high is not None
    ]
    traces = []
    if known:
        along, lows, highs = map(list, zip(*known, strict=True))
        outline = lows + highs[::-1]
        drawn = {"fill": "toself", "fillcolor": look.color + BAND, "line": {"width": 0}, "mode": "lines"}
        more = {"hoverinfo": "skip", "showlegend": False, "legendgroup": text(label)}
        traces.append(go.Scatter(x=tidy(along + along[::-1]), y=tidy(outline), **drawn, **more))
    digits = ".1f" if is_share(metric) else ".2g"
    half = ["" if one.half is None else f" ± {one.half:{digits}}" for one in found]
    line = go.Scatter(
        x=tidy(x),
        y=tidy([one.mean for one in found]),
        name=text(label),
        legendgroup=text(label),
        mode="lines+markers",
        line={"color": look.color, "dash": look.dash, "width": 2},
        marker={"symbol": look.symbol, "size": 7, "maxdisplayed": 12},
        customdata=half,
        hovertemplate=_hover(f"{_form(metric)}%{{customdata}}{unit(metric)} at %{{x:.4~g}}"),
    )
    return [*traces, line]


def thin_line(look: Look, label: str, x: Sequence[float], y: Sequence[float], dash: str) -> go.Scatter:
    """Draw a thin line that accompanies another one of the same color."""
    line = {"color": look.color, "dash": dash, "width": 1}
    return go.Scatter(
        x=tidy(x), y=tidy(y), name=text(label), mode="lines", line=line, hovertemplate=_hover("%{y:.3~g}")
    )


def spread_lines(look: Look, label: str, x: Sequence[float], ends: dict[str, list], metric: str) -> list[go.Scatter]:
    """Draw a value and its extremes during training; `ends` maps names to the seeds' values at each x."""
    hover, traces = _hover(f"{_form(metric)}{unit(metric)} at %{{x:.4~g}}"), []
    for (name, of_seeds), (dash, width) in zip(ends.items(), SPREAD, strict=True):
        means = [interval(_finite(seeds)).mean for seeds in of_seeds]
        line = {"color": look.color, "dash": dash, "width": width}
        shown, y = text(f"{name}: {label}"), tidy(_scale(metric) * np.array(means))
        traces.append(go.Scatter(x=tidy(x), y=y, name=shown, mode="lines", line=line, hovertemplate=hover))
    return traces


def _finite(of_seeds: Sequence[float]) -> np.ndarray:
    """Return the values of the seeds that have not diverged, or NaN if none is left."""
    seeds = np.asarray(of_seeds, float)
    return seeds[np.isfinite(seeds)] if np.isfinite(seeds).any() else np.full(1, np.nan)


def sorted_line(look: Look, label: str, clients: Sorted, metric: str) -> go.Scatter:
    """Draw the sorted values of clients."""
    return go.Scatter(
        x=tidy(clients.at),
        y=tidy(_scale(metric) * clients.values),
        name=text(label),
        mode="lines+markers",
        line={"color": look.color, "dash": look.dash, "width": 2},
        marker={"symbol": look.symbol, "size": 7, "maxdisplayed": 8},
        customdata=[text(name) for name in clients.names],
        hovertemplate=_hover(f"{_form(metric)}{unit(metric)}, %{{customdata}}"),
    )


def dots(look: Look, label: str, at: Sequence[tuple[float, float]], hover: str, texts: Sequence[str]) -> go.Scatter:
    """Draw points without a line; `texts` describe them."""
    return go.Scatter(
        x=tidy([x for x, _ in at]),
        y=tidy([y for _, y in at]),
        name=text(label),
        mode="markers",
        marker={"color": look.color, "symbol": look.symbol, "size": 9},
        customdata=[escape(one) for one in texts],
        hovertemplate=_hover(hover),
    )


def signed_bars(clients: Sorted, metric: str) -> list[go.Bar]:
    """Draw the sorted differences of clients, with separate colors for gains and losses."""
    lost, won = ("below", "above") if higher_is_better(metric) else ("above", "below")
    masks = {"below": clients.values < 0, "above": clients.values > 0}
    equal, rest = clients.values == 0, 1 - clients.below - clients.above
    parts = (
        ("worse off", masks[lost], getattr(clients, lost), PALETTE[1][0]),
        ("no change", equal, rest, GRAYS["local"][0]),
        ("better off", masks[won], getattr(clients, won), PALETTE[0][0]),
    )
    return [
        go.Bar(
            x=tidy(clients.at[mask]),
            y=tidy(_scale(metric) * clients.values[mask]),
            name=f"{name} ({100 * part:.0f} %)",
            width=0.9 * 100 / len(clients.at),
            marker={"color": color},
            customdata=[text(clients.names[i]) for i in np.flatnonzero(mask)],
            hovertemplate=_hover(f"{_form(metric)}{unit(metric)}, %{{customdata}}"),
        )
        for name, mask, part, color in parts
        if mask.any()
    ]


def bars(look: Look, label: str, x: np.ndarray, y: np.ndarray, hover: str, hover_texts: list[str]) -> go.Bar:
    """Draw a histogram; `hover_texts` describe the bars."""
    style = {"name": text(label), "marker": {"color": look.color}, "hovertemplate": _hover(hover)}
    return go.Bar(x=tidy(x), y=tidy(y), customdata=hover_texts, **style)


def steps(look: Look, label: str, x: np.ndarray, y: np.ndarray, hover: str) -> go.Scatter:
    """Draw a step function."""
    line = {"color": look.color, "shape": "hv", "width": 2}
    return go.Scatter(x=tidy(x), y=tidy(y), name=text(label), mode="lines", line=line, hovertemplate=_hover(hover))


def tidy(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Round numbers to six digits for JSON, with None for nonfinite ones."""
    return [float(f"{value:.6g}") if isfinite(value) else None for value in np.asarray(values, float).tolist()]


def text(name: str) -> str:
    """Escape and shorten a name for Plotly."""
    return escape(name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")


def _scale(metric: str) -> int:
    return 100 if is_share(metric) else 1


def _form(metric: str) -> str:
    return "%{y:.1f}" if is_share(metric) else "%{y:.4~g}"


def _hover(words: str) -> str:
    return f"<b>%{{fullData.name}}</b><br>{words}<extra></extra>"
