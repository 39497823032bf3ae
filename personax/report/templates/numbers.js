// The numbers of a figure: their format, the ticks of an axis, and its range.
const Numbers = (() => {
  "use strict";
  const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'", "#39": "'" };

  const finite = value => typeof value === "number" && Number.isFinite(value);
  const plain = text => String(text ?? "").replace(/&(amp|lt|gt|quot|#x27|#39);/g, (_, name) => ENTITIES[name]);
  const minus = text => text.replace("-", "\u2212");

  // Format a number as in hover texts: ".1f" has fixed decimals, ".4~g" significant digits.
  function formatted(value, form) {
    if (!finite(value)) return String(value ?? "");
    const digits = Number((form || ".4~g").match(/\d+/)[0]);
    return minus(form?.endsWith("f") ? value.toFixed(digits) : String(Number(value.toPrecision(digits))));
  }

  function scale(log, [low, high], from, to) {
    const on = log ? Math.log10 : value => value;
    const a = on(low), b = on(high), part = (to - from) / (b - a);
    const back = place => { const value = a + (place - from) / part; return log ? 10 ** value : value; };
    return { log, low, high, at: value => from + (on(value) - a) * part, back };
  }

  function linearTicks(low, high, most) {
    const raw = (high - low) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find(factor => factor * power >= raw * 0.999) * power;
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => (first + at) * step);
  }

  function logTicks(low, high, most) {
    const decades = Math.log10(high / low);
    const factors = decades > 4 ? [1] : decades > 1.5 ? [1, 2, 5] : [1, 2, 3, 5, 7];
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const factor of factors) found.push(factor * 10 ** power);
    const inside = found.filter(value => value >= low * 0.999 && value <= high * 1.001);
    if (inside.length < 2) return linearTicks(low, high, most);
    const every = Math.ceil(inside.length / Math.max(most, 2));
    return inside.filter((_, at) => at % every === 0);
  }

  function label(value) {
    const size = Math.abs(value);
    if (size && (size >= 1e6 || size < 1e-3)) return minus(value.toExponential(1).replace(".0e", "e").replace("e+", "e"));
    return minus(String(Number(value.toPrecision(6))));
  }

  // The range that shows every point of the traces, along "x" or "y".
  function extent(traces, axis, key, margin = 0.04) {
    const values = [];
    for (const trace of traces) {
      const half = key === "x" && trace.type === "bar" ? (trace.width || trace.unit) / 2 : 0;
      for (const value of trace[key] || []) if (finite(value)) values.push(value - half, value + half);
      if (key === "y" && trace.type === "bar") values.push(0);
    }
    const log = axis.type === "log", kept = log ? values.filter(value => value > 0) : values;
    if (!kept.length) return log ? [1, 10] : [0, 1];
    let low = Math.min(...kept), high = Math.max(...kept);
    if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** margin, high * (high / low) ** margin];
    if (axis.rangemode === "tozero") { low = Math.min(0, low); high = Math.max(0, high); }
    const pad = margin && (low === high ? Math.abs(low) * 0.1 || 1 : margin * (high - low));
    const zero = axis.rangemode === "tozero";
    return [zero && low === 0 ? 0 : low - pad, zero && high === 0 ? 0 : high + pad];
  }

  const opening = axis => axis.range && (axis.type === "log" ? axis.range.map(power => 10 ** power) : [...axis.range]);

  return { extent, finite, formatted, label, linearTicks, logTicks, opening, plain, scale };
})();
