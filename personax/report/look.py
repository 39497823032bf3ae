"""The page's style sheet and script."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1c2128; --soft: #59636e; --line: #d8dee4; --shade: #f4f6f8; --accent: #0b5cad;
  --good: #0a6b4f; --bad: #a8480a; --note: #fff1cc; --note-ink: #6b4a00;
  --text: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --code: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171c; --ink: #e4e8ed; --soft: #a0a9b4; --line: #323942; --shade: #1d2229; --accent: #7bb8f5;
    --good: #56c9a2; --bad: #f0a06a; --note: #3a2f12; --note-ink: #f2d489;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 var(--text); overflow-wrap: anywhere; }
main, header, footer { max-width: 1100px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 40px; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 12px; letter-spacing: -0.01em; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 32px 0 12px; padding-top: 24px; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 46rem; }
a { color: var(--accent); }
code, pre { font-family: var(--code); font-size: 0.86em; }
pre {
  background: var(--shade); border-radius: 6px; padding: 14px 16px; margin: 8px 0; line-height: 1.5;
  white-space: pre-wrap;
}
.line { display: block; padding-left: 15ch; text-indent: -15ch; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 20px 0 0; }
nav a { text-decoration: none; font-size: 0.92rem; }
nav a:hover, nav a:focus { text-decoration: underline; }
.facts { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 12px 0; }
.facts dt { color: var(--soft); font-size: 0.8rem; }
.facts dd { margin: 0; font-variant-numeric: tabular-nums; }
.verdict {
  border-left: 4px solid var(--accent); background: var(--shade); padding: 14px 18px; margin: 0 0 20px;
  border-radius: 0 6px 6px 0; max-width: none; font-size: 1.05rem;
}
.words { color: var(--soft); font-size: 0.92rem; margin: 0 0 10px; max-width: 52rem; }

.scroll { overflow-x: auto; margin: 12px 0; position: relative; }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
table {
  border-collapse: collapse; width: 100%; font-size: 0.87rem; line-height: 1.4; font-variant-numeric: tabular-nums;
  overflow-wrap: normal;
}
caption { text-align: left; font-weight: 600; padding: 0 0 10px; }
caption span { display: inline-block; max-width: calc(100vw - 40px); position: sticky; left: 0; }
th, td {
  padding: 8px 7px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; white-space: nowrap;
}
thead th { font-weight: 600; vertical-align: bottom; color: var(--soft); font-size: 0.82rem; white-space: normal; }
thead .over th, thead .over td { border-bottom: 0; padding-bottom: 4px; white-space: nowrap; }
thead .over th[colspan] { text-align: center; }
thead .over span { display: block; border-bottom: 1px solid var(--line); padding-bottom: 2px; }
th:first-child, th.text, td.text, td.fact { text-align: left; }
tbody th {
  font-weight: 500; white-space: normal; min-width: 11.5em; position: sticky; left: 0; background: var(--page);
  overflow-wrap: anywhere;
}
thead tr:last-child th:first-child { position: sticky; left: 0; z-index: 1; background: var(--page); }
tbody th.drawn { padding-left: 30px; }
td.mean, td.change { white-space: normal; }
td.text { white-space: normal; overflow-wrap: anywhere; }
tr.baseline td, tr.baseline th { background: var(--shade); }
tr.best .mean { font-weight: 700; }
tr.run th { font-weight: 700; padding-top: 20px; }
.swatch { position: absolute; left: 8px; top: 1.15em; width: 15px; border-top: 4px solid var(--light); }
.swatch.dotted { border-top-style: dotted; }
.swatch.dashed { border-top-style: dashed; border-top-width: 3px; }
.small, .tag { display: block; font-size: 0.78rem; color: var(--soft); font-weight: 400; }
.flag {
  display: inline-block; font-size: 0.78rem; font-weight: 600; color: var(--note-ink); background: var(--note);
  border-radius: 4px; padding: 1px 7px; margin-top: 3px;
}
.gain { color: var(--good); }
.loss { color: var(--bad); }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }

figure { margin: 8px 0 24px; min-width: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 0 32px; }
.pair figure { display: grid; grid-template-rows: subgrid; grid-row: span 3; }
.plot { width: 100%; min-width: 0; min-height: 300px; }
.choices { display: flex; flex-wrap: wrap; gap: 8px 24px; margin: 10px 0 6px; font-size: 0.88rem; }
.choices label { display: flex; align-items: center; gap: 8px; color: var(--soft); min-width: 0; }
.choices label[hidden] { display: none; }
.choices select {
  font: inherit; color: var(--ink); background: var(--page); border: 1px solid var(--line); border-radius: 6px;
  padding: 5px 8px; max-width: 15rem; min-width: 0;
}
details { margin: 10px 0; }
summary { cursor: pointer; color: var(--accent); }
footer { padding-top: 24px; padding-bottom: 48px; color: var(--soft); font-size: 0.88rem; }
@media (prefers-color-scheme: dark) { .swatch { border-color: var(--dark); } }
@media (max-width: 600px) {
  main, header, footer { padding-left: 16px; padding-right: 16px; }
  header { padding-top: 24px; }
  h1 { font-size: 1.5rem; }
  tbody th { min-width: 9.5em; max-width: 11em; }
  tr.run th { max-width: none; }
  th, td { padding: 7px; }
  .line { padding-left: 2ch; text-indent: -2ch; }
}
@media print {
  .choices, nav { display: none; }
  h2 { break-after: avoid; }
  figure { break-inside: avoid; }
}
"""

SCRIPT = """
(() => {
  "use strict";
  const page = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const read = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const settings = {
    displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  };

  // A copy of the view that the selectors ask for, in the colours of the page.
  function chosen(figure, selectors) {
    const at = [...selectors].reduce((place, selector) => place * selector.options.length + selector.selectedIndex, 0);
    let text = JSON.stringify(figure.views[at]);
    if (dark.matches) for (const [light, other] of page.colours) text = text.replaceAll(light, other);
    return JSON.parse(text);
  }

  // The legend stands below the plot, in columns; the height makes room for its rows.
  function fit(layout, data, width) {
    const narrow = width < 600, clear = "rgba(0,0,0,0)";
    const family = read("--text"), line = read("--line"), ink = read("--ink");
    const names = data.filter(trace => trace.showlegend !== false).map(trace => trace.name || "");
    const longest = Math.max(0, ...names.map(name => name.replace(/&[^;]+;/g, "x").length));
    const entry = Math.min(longest * 6.6 + 12, width - 60);
    const columns = Math.max(1, Math.floor((width - 80) / (entry + 46)));
    const legend = Math.ceil(names.length / columns) * 19 + 10;
    Object.assign(layout, {
      width, height: (narrow ? 250 : 340) + 76 + legend, uirevision: "same",
      margin: { l: narrow ? 46 : 60, r: narrow ? 8 : 16, t: 16, b: 60 + legend },
      paper_bgcolor: clear, plot_bgcolor: clear, font: { family, size: narrow ? 12 : 13, color: ink },
      legend: {
        orientation: "h", xref: "container", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom",
        entrywidth: entry, tracegroupgap: 0, bgcolor: clear, font: { size: 12 },
      },
      hoverlabel: { bgcolor: read("--shade"), bordercolor: line, align: "left", font: { family, color: ink } },
      modebar: { bgcolor: clear, color: read("--soft"), activecolor: ink },
      dragmode: narrow ? false : "zoom",
    });
    for (const axis of [layout.xaxis, layout.yaxis]) {
      Object.assign(axis, { gridcolor: line, linecolor: line, zerolinecolor: ink, zerolinewidth: 1.5 });
      axis.uirevision = axis.title.text;
      axis.title.font = { size: narrow ? 12 : 13 };
    }
    return layout;
  }

  for (const figure of page.figures) {
    const box = document.getElementById("plot-" + figure.name);
    const selectors = document.querySelectorAll("select[data-figure='" + figure.name + "']");
    let width = 0;
    const draw = () => {
      const view = chosen(figure, selectors), first = width === 0;
      width = box.clientWidth;
      const layout = fit(view.layout, view.data, width);
      const more = { ...settings, displayModeBar: width < 600 ? false : "hover" };
      (first ? Plotly.newPlot : Plotly.react)(box, view.data, layout, more);
    };
    selectors.forEach(selector => selector.addEventListener("change", draw));
    dark.addEventListener("change", draw);
    new ResizeObserver(() => { if (box.clientWidth !== width) draw(); }).observe(box);
  }
})();
"""
