// The marks of a figure: elements, lines, point shapes, and samples of them for the legend.
const Marks = (() => {
  "use strict";
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = { dot: "2 4", dash: "8 4", longdash: "14 5", dashdot: "9 4 2 4" };
  const { finite } = Numbers;

  function make(name, attributes, parent, text) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent?.append(node);
    return node;
  }

  function html(name, attributes, parent, text) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent?.append(node);
    return node;
  }

  const polygon = (num, size, turn, inner = 1) => Array.from({ length: inner === 1 ? num : 2 * num }, (_, at) => {
    const angle = (at / (inner === 1 ? num : 2 * num)) * 2 * Math.PI + turn, radius = at % 2 && inner !== 1 ? size * inner : size;
    return `${at ? "L" : "M"}${(radius * Math.sin(angle)).toFixed(2)} ${(-radius * Math.cos(angle)).toFixed(2)}`;
  }).join("") + "Z";
  const arms = (size, turn) => [0, 1].map(at => {
    const angle = turn + (at * Math.PI) / 2, x = size * Math.cos(angle), y = size * Math.sin(angle);
    return `M${-x} ${-y}L${x} ${y}`;
  }).join("");
  const SHAPES = {
    circle: size => `M${-size} 0A${size} ${size} 0 1 0 ${size} 0A${size} ${size} 0 1 0 ${-size} 0Z`,
    square: size => `M${-size} ${-size}H${size}V${size}H${-size}Z`,
    diamond: size => polygon(4, size * 1.3, 0),
    "triangle-up": size => polygon(3, size * 1.3, 0),
    "triangle-down": size => polygon(3, size * 1.3, Math.PI),
    pentagon: size => polygon(5, size * 1.15, 0),
    star: size => polygon(5, size * 1.4, 0, 0.45),
    cross: size => arms(size * 1.2, 0),
    x: size => arms(size * 1.3, Math.PI / 4),
  };

  function mark(parent, marker, x, y) {
    const symbol = marker?.symbol || "circle", name = symbol.replace("-open", "");
    const stroked = symbol.endsWith("-open") || name === "cross" || name === "x";
    make("path", {
      d: (SHAPES[name] || SHAPES.circle)((marker?.size || 7) / 2), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
      fill: stroked ? "none" : marker.color, stroke: marker.color, "stroke-width": stroked ? 2 : 0,
      "fill-opacity": marker?.opacity ?? 1, class: "mark",
    }, parent);
  }

  function path(points, steps) {
    let text = "", open = false, last = 0;
    for (const [x, y] of points) {
      if (!finite(x) || !finite(y)) { open = false; continue; }
      if (open && steps) text += `L${x.toFixed(1)} ${last.toFixed(1)}`;
      text += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      [open, last] = [true, y];
    }
    return text;
  }

  const colorOf = trace => trace.line?.color || trace.marker?.color || "currentColor";
  const shows = (trace, what) => (trace.mode || "lines+markers").includes(what);

  // A sample of a trace for the legend.
  function sample(trace) {
    const svg = make("svg", { width: 30, height: 14, "aria-hidden": "true" });
    const color = colorOf(trace);
    if (trace.type === "bar") make("rect", { x: 9, y: 1, width: 12, height: 12, fill: color }, svg);
    else {
      const dash = DASHES[trace.line?.dash] || "";
      if (shows(trace, "lines"))
        make("path", { d: "M1 7H29", stroke: color, "stroke-width": trace.line?.width || 2, "stroke-dasharray": dash }, svg);
      if (shows(trace, "markers")) mark(svg, { ...trace.marker, color }, 15, 7);
    }
    return svg;
  }

  return { DASHES, NS, colorOf, html, make, mark, path, sample, shows };
})();
