// Draws a figure in Plotly's JSON as SVG: lines, bands, markers, bars; with hover, zoom, keys and a legend.
const Chart = (() => {
  "use strict";
  const { extent, finite, formatted, label, linearTicks, logTicks, opening, plain, scale } = Numbers;
  const { DASHES, NS, colorOf, html, make, mark, path, sample, shows } = Marks;
  const REACH = 48; // pixels within which a point responds to the pointer

  // Bars without an explicit width are drawn side by side.
  function arranged(data) {
    const traces = data.map(trace => ({ ...trace, type: trace.type || "scatter" }));
    const groups = traces.filter(trace => trace.type === "bar" && !trace.width);
    const all = [...new Set(groups.flatMap(trace => trace.x))].sort((a, b) => a - b);
    const unit = Math.min(...all.slice(1).map((value, at) => value - all[at]).filter(gap => gap > 0), Infinity);
    groups.forEach((trace, at) => {
      trace.unit = finite(unit) ? unit : 1;
      trace.bar = trace.unit * 0.88 / groups.length;
      trace.shift = (at - (groups.length - 1) / 2) * trace.bar;
    });
    return traces;
  }

  // The hover text of a point: its template with formatted numbers.
  function words(trace, at) {
    const custom = Array.isArray(trace.customdata) ? trace.customdata[at] : trace.customdata;
    const known = { "fullData.name": trace.name, customdata: custom, x: trace.x[at], y: trace.y[at], text: trace.text?.[at] };
    const template = trace.hovertemplate || (trace.text ? "%{text}<br>%{x}, %{y}" : "<b>%{fullData.name}</b><br>%{y} at %{x}");
    return template.replace(/<extra>.*/, "").split("<br>").map(line => {
      const filled = line.replace(/<\/?b>/g, "").replace(/%\{([\w.]+)(?::([^}]+))?\}/g, (_, name, form) =>
        typeof known[name] === "number" ? formatted(known[name], form) : plain(known[name]));
      return filled;
    });
  }

  return class Chart {
    constructor(box, { alt, colors }) {
      this.box = box;
      this.alt = alt;
      this.colors = colors; // converts a text to the colors of the page
      this.hidden = new Set();
      this.zoom = {};
      box.replaceChildren();
      this.stage = html("div", { class: "stage" }, box);
      this.tip = html("div", { class: "tip", role: "status", "aria-live": "polite" }, this.stage);
      this.legend = html("ul", { class: "legend" }, box);
    }

    // Draw a view, and keep the zoom of axes that do not change.
    show(view) {
      const titles = { x: view.layout.xaxis?.title?.text, y: view.layout.yaxis?.title?.text };
      for (const key of ["x", "y"]) if (titles[key] !== this.titles?.[key]) delete this.zoom[key];
      this.titles = titles;
      this.view = view;
      this.draw();
    }

    axis(key) { return this.view.layout[`${key}axis`] || {}; }

    whole(key) { return extent(this.shown, this.axis(key), key); }

    range(key) { return this.zoom[key] || opening(this.axis(key)) || this.whole(key); }

    // True if a part of the traces is outside the visible range.
    get isZoomed() {
      return ["x", "y"].some(key => {
        const [low, high] = this.range(key), [least, most] = extent(this.shown, this.axis(key), key, 0);
        return low > least || high < most;
      });
    }

    get opensZoomed() { return Boolean(this.axis("y").range); }

    // Show everything; if everything is visible, return to the initial zoom.
    reset() {
      this.zoom = this.isZoomed ? { y: this.whole("y") } : {};
      this.draw();
    }

    magnify(factor) {
      for (const key of ["x", "y"]) {
        const log = this.axis(key).type === "log", on = log ? Math.log10 : v => v, off = log ? v => 10 ** v : v => v;
        const [low, high] = this.range(key).map(on), middle = (low + high) / 2, half = ((high - low) / 2) * factor;
        this.zoom[key] = [off(middle - half), off(middle + half)];
      }
      this.draw();
    }

    draw() {
      const { view, stage } = this, width = this.width = this.box.clientWidth;
      if (!width || !view) return;
      this.traces = arranged(JSON.parse(this.colors(JSON.stringify(view.data))));
      this.shown = this.traces.filter(trace => !this.hidden.has(trace.legendgroup || trace.name));
      const narrow = width < 600, height = narrow ? 290 : 380;
      const style = getComputedStyle(document.documentElement);
      const [ink, soft, line] = ["--ink", "--soft", "--line"].map(name => style.getPropertyValue(name).trim());
      const size = narrow ? 12 : 13, family = style.getPropertyValue("--text").trim();
      this.svg?.remove();
      const svg = this.svg = make("svg", {
        width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.alt, tabindex: 0,
        "font-family": family, "font-size": size, fill: ink,
      });
      stage.prepend(svg);
      const yTicks = this.ticks("y", this.range("y"), narrow ? 5 : 7);
      const longest = Math.max(1, ...yTicks.map(value => label(value).length));
      this.inside = { left: 30 + longest * size * 0.56, right: width - 10, top: 10, bottom: height - 50 };
      const { left, right, top, bottom } = this.inside;
      this.x = scale(this.axis("x").type === "log", this.range("x"), left, right);
      this.y = scale(this.axis("y").type === "log", this.range("y"), bottom, top);
      this.drawAxes(svg, { ink, soft, line, size, yTicks });
      const clip = `clip-${this.box.id}`;
      make("rect", { x: left, y: top - 4, width: right - left, height: bottom - top + 8 }, make("clipPath", { id: clip }, svg));
      const plot = make("g", { "clip-path": `url(#${clip})` }, svg);
      for (const trace of this.shown) this.drawTrace(plot, trace);
      this.drawNotes(svg, soft);
      this.cursor = make("circle", { r: 6, fill: "none", stroke: ink, "stroke-width": 2, visibility: "hidden" }, svg);
      this.drawLegend();
      this.listen(svg);
      this.onDraw?.();
    }

    ticks(key, [low, high], most) {
      const axis = this.axis(key);
      if (axis.tickvals) return axis.tickvals.filter(value => value >= low && value <= high);
      return (axis.type === "log" ? logTicks : linearTicks)(low, high, most);
    }

    drawAxes(svg, { ink, soft, line, size, yTicks }) {
      const { left, right, top, bottom } = this.inside;
      const straight = (x1, y1, x2, y2, color, more = {}) =>
        make("line", { x1, y1, x2, y2, stroke: color, ...more }, svg);
      for (const value of yTicks) {
        const y = this.y.at(value);
        straight(left, y, right, y, line);
        make("text", { x: left - 6, y: y + size * 0.35, "text-anchor": "end", fill: soft }, svg, label(value));
      }
      const { tickvals, ticktext } = this.axis("x");
      const named = value => (ticktext ? plain(ticktext[tickvals.indexOf(value)]).slice(0, 18) : label(value));
      const longest = Math.max(4, ...(ticktext || []).map(text => Math.min(plain(text).length, 18)));
      const room = Math.max(2, Math.floor((right - left) / (size * (0.6 * longest + 2))));
      const values = this.ticks("x", this.range("x"), room), every = Math.ceil(values.length / (room + 1));
      values.forEach((value, at) => {
        const x = this.x.at(value);
        straight(x, top, x, bottom, line);
        if (at % every === 0) make("text", { x, y: bottom + size + 5, "text-anchor": "middle", fill: soft }, svg, named(value));
      });
      if (this.axis("y").zeroline && this.y.low < 0 && this.y.high > 0)
        straight(left, this.y.at(0), right, this.y.at(0), ink, { "stroke-width": 1.5 });
      straight(left, bottom, right, bottom, soft);
      make("text", { x: (left + right) / 2, y: bottom + 2 * size + 14, "text-anchor": "middle", class: "xtitle" }, svg,
        plain(this.titles.x));
      const middle = (top + bottom) / 2;
      make("text", { x: 0, y: 0, transform: `translate(${size + 1} ${middle}) rotate(-90)`, "text-anchor": "middle", class: "ytitle" },
        svg, plain(this.titles.y));
    }

    drawTrace(plot, trace) {
      const group = make("g", { "data-trace": plain(trace.name), class: "trace" }, plot);
      trace.group = group;
      const color = colorOf(trace);
      if (trace.type === "bar") return this.drawBars(group, trace, color);
      const places = trace.x.map((x, at) => [this.place(this.x, x), this.place(this.y, trace.y[at])]);
      if (trace.fill === "toself") {
        make("path", { d: `${path(places)}Z`, fill: trace.fillcolor, class: "band" }, group);
        return;
      }
      if (shows(trace, "lines")) {
        make("path", {
          d: path(places, trace.line?.shape === "hv"), fill: "none", stroke: color, class: "line",
          "stroke-width": trace.line?.width || 2, "stroke-dasharray": DASHES[trace.line?.dash] || "", "stroke-linejoin": "round",
        }, group);
      }
      const most = trace.marker?.maxdisplayed || Infinity, every = Math.max(1, Math.ceil(places.length / most));
      trace.places = places;
      if (shows(trace, "markers"))
        places.forEach(([x, y], at) => {
          const last = at === places.length - 1;
          if (finite(x) && finite(y) && (at % every === 0 || last)) mark(group, { ...trace.marker, color }, x, y);
        });
    }

    drawBars(group, trace, color) {
      const zero = this.y.at(Math.max(0, this.y.low)), wide = trace.width || trace.bar;
      trace.places = trace.x.map((x, at) => {
        const middle = x + (trace.shift || 0), begin = this.x.at(middle - wide / 2), end = this.x.at(middle + wide / 2);
        const y = this.y.at(trace.y[at]);
        make("rect", {
          x: begin.toFixed(1), width: Math.max(end - begin, 0.6).toFixed(1), class: "bar", fill: color,
          y: Math.min(y, zero).toFixed(1), height: Math.abs(y - zero).toFixed(1),
        }, group);
        return [(begin + end) / 2, y];
      });
    }

    // The position of a number, or NaN if the axis cannot show it.
    place(axis, value) { return finite(value) && !(axis.log && value <= 0) ? axis.at(value) : NaN; }

    drawNotes(svg, soft) {
      const { left, right, top, bottom } = this.inside;
      for (const note of this.view.layout.annotations || [])
        make("text", { x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle", fill: soft }, svg, plain(note.text));
    }

    drawLegend() {
      const focused = document.activeElement?.dataset?.name;
      this.legend.replaceChildren();
      const named = this.traces.filter(trace => trace.name && trace.showlegend !== false);
      if (named.length < 2 && !this.hidden.size && named.every(trace => trace.type === "bar")) return;
      for (const trace of named) {
        const key = trace.legendgroup || trace.name, on = !this.hidden.has(key);
        const button = html("button", { type: "button", "aria-pressed": on, "data-name": key }, html("li", {}, this.legend));
        button.append(sample(trace));
        html("span", { class: "legendtext" }, button, plain(trace.name));
        button.addEventListener("click", () => {
          this.hidden[on ? "add" : "delete"](key);
          this.draw();
        });
        for (const [event, name] of [["pointerenter", key], ["focus", key], ["pointerleave", null], ["blur", null]])
          button.addEventListener(event, () => this.emphasize(name));
        if (key === focused) button.focus();
      }
    }

    emphasize(key) {
      for (const trace of this.shown)
        trace.group.style.opacity = key === null || (trace.legendgroup || trace.name) === key || this.hidden.has(key) ? "" : 0.15;
    }

    // Interaction

    listen(svg) {
      const here = event => {
        const box = svg.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
      };
      let start = null, frame = null;
      svg.addEventListener("pointermove", event => {
        if (start) frame = this.drag(frame, start, here(event));
        else this.point(this.nearest(...here(event)));
      });
      svg.addEventListener("pointerleave", () => start || this.point(null));
      svg.addEventListener("pointerdown", event => {
        if (event.pointerType !== "mouse" || event.button) return this.point(this.nearest(...here(event)));
        start = here(event);
        svg.setPointerCapture(event.pointerId);
        event.preventDefault();
        svg.focus({ preventScroll: true });
      });
      svg.addEventListener("pointerup", event => {
        const begin = start;
        start = null;
        frame = frame?.remove();
        if (begin) this.select(begin, here(event));
      });
      svg.addEventListener("dblclick", () => this.reset());
      svg.addEventListener("keydown", event => this.key(event));
      svg.addEventListener("blur", () => this.point(null));
    }

    drag(frame, [x1, y1], [x2, y2]) {
      this.point(null);
      frame ??= make("rect", { fill: "currentColor", "fill-opacity": 0.12, stroke: "currentColor" }, this.svg);
      const box = { x: Math.min(x1, x2), y: Math.min(y1, y2), width: Math.abs(x1 - x2), height: Math.abs(y1 - y2) };
      for (const [key, value] of Object.entries(box)) frame.setAttribute(key, value);
      return frame;
    }

    select([x1, y1], [x2, y2]) {
      const wide = Math.abs(x1 - x2) > 12, high = Math.abs(y1 - y2) > 12;
      if (!wide && !high) return;
      const between = (axis, a, b) => [axis.back(a), axis.back(b)].sort((one, other) => one - other);
      if (wide) this.zoom.x = between(this.x, x1, x2);
      if (high) this.zoom.y = between(this.y, y1, y2);
      this.draw();
    }

    nearest(x, y) {
      const { left, right, top, bottom } = this.inside;
      let best = null, least = REACH;
      for (const trace of this.shown) {
        if (trace.hoverinfo === "skip") continue;
        (trace.places || []).forEach(([px, py], at) => {
          if (!(px >= left - 1 && px <= right + 1 && py >= top - 5 && py <= bottom + 5)) return;
          const distance = trace.type === "bar" ? Math.abs(px - x) : Math.hypot(px - x, py - y);
          if (distance < least) [best, least] = [{ trace, at }, distance];
        });
      }
      return best;
    }

    point(found) {
      this.current = found;
      this.cursor.setAttribute("visibility", found ? "visible" : "hidden");
      this.tip.classList.toggle("on", Boolean(found));
      if (!found) return this.tip.replaceChildren();
      const [x, y] = found.trace.places[found.at];
      this.cursor.setAttribute("cx", x);
      this.cursor.setAttribute("cy", y);
      this.tip.replaceChildren();
      words(found.trace, found.at).forEach((line, at) => html(at ? "span" : "strong", {}, this.tip, line));
      const wide = this.tip.offsetWidth, high = this.tip.offsetHeight;
      this.tip.style.left = `${Math.max(0, Math.min(x + 12, this.width - wide - 2))}px`;
      this.tip.style.top = `${y - high - 12 < 0 ? y + 14 : y - high - 12}px`;
    }

    key(event) {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (event.key === "Escape") this.point(null);
      else if (event.key === "+" || event.key === "=") this.magnify(0.5);
      else if (event.key === "-") this.magnify(2);
      else if (event.key === "0") this.reset();
      else if (moves[event.key]) this.walk(...moves[event.key]);
      else return;
      event.preventDefault();
      if (!moves[event.key]) this.svg.focus({ preventScroll: true });
    }

    // The next point along a line, or the same place on the next line.
    walk(lines, points) {
      const able = this.shown.filter(trace => trace.hoverinfo !== "skip" && trace.places?.length);
      if (!able.length) return;
      const now = this.current || { trace: able[0], at: -points };
      const which = (able.indexOf(now.trace) + lines + able.length) % able.length, trace = able[which];
      let at = Math.min(Math.max(now.at + points, 0), trace.places.length - 1);
      while (points && !finite(trace.places[at][1]) && trace.places[at + points]) at += points;
      if (finite(trace.places[at][1])) this.point({ trace, at });
    }

    // Saving

    csv() {
      const cell = value => { const text = plain(value ?? ""); return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
      const quoted = text => (/^[=+\-@\t]/.test(text) ? `'${text}` : text);
      const rows = [["line", this.titles.x, this.titles.y, "note"]];
      for (const trace of this.view.data.filter(one => one.hoverinfo !== "skip"))
        trace.x.forEach((x, at) => rows.push([quoted(plain(trace.name)), x, trace.y[at], quoted(plain(trace.customdata?.[at] ?? trace.text?.[at]))]));
      return rows.map(row => row.map(cell).join(",")).join("\r\n");
    }

    picture() {
      const copy = this.svg.cloneNode(true), legend = [...this.legend.querySelectorAll("button")];
      const height = this.svg.height.baseVal.value, style = getComputedStyle(document.documentElement);
      make("rect", { width: "100%", height: "100%", fill: style.getPropertyValue("--page").trim() });
      legend.forEach((button, at) => {
        const row = make("g", { transform: `translate(40 ${height + at * 20})` }, copy);
        row.append(...[...button.querySelector("svg").cloneNode(true).childNodes]);
        make("text", { x: 38, y: 12 }, row, button.textContent);
      });
      const tall = height + legend.length * 20 + 8;
      copy.setAttribute("height", tall);
      copy.setAttribute("viewBox", `0 0 ${this.width} ${tall}`);
      copy.setAttribute("style", `background:${style.getPropertyValue("--page").trim()}`);
      copy.setAttribute("xmlns", NS);
      return new XMLSerializer().serializeToString(copy);
    }
  };
})();
