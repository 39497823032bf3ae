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
