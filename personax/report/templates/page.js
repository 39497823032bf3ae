(() => {
  "use strict";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const read = from => JSON.parse(from.getElementById("figures").textContent);
  let page = read(document);

  const colors = text => {
    if (dark.matches) for (const [light, other] of page.colors) text = text.replaceAll(light, other);
    return text;
  };

  function keep(content, type, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  // A bar of buttons above a figure.
  function tools(bar, name, chart) {
    const button = (text, title, act) => {
      const made = document.createElement("button");
      Object.assign(made, { type: "button", textContent: text, title, onclick: act });
      bar.append(made);
      return made;
    };
    button("+", "Zoom in. With a mouse, drag across the part to enlarge.", () => chart.magnify(0.5)).ariaLabel = "Zoom in";
    button("\u2212", "Zoom out", () => chart.magnify(2)).ariaLabel = "Zoom out";
    const whole = button("", "Or double-click the figure", () => chart.reset());
    chart.onDraw = () => {
      whole.hidden = !(chart.isZoomed || chart.opensZoomed);
      whole.textContent = chart.isZoomed ? "Show all" : "Zoom back";
    };
    button("SVG", "Save this figure as SVG", () => keep(chart.picture(), "image/svg+xml", `${name}.svg`));
    button("CSV", "Save the numbers of this figure", () => keep(chart.csv(), "text/csv", `${name}.csv`));
  }

  // Fill the table below a figure with the numbers of the visible view.
  function fill(name, view) {
    const table = document.querySelector(`#numbers-${CSS.escape(name)} table`);
    if (!table) return;
    table.querySelector("caption span").textContent = view.numbers.caption;
    table.tBodies[0].replaceChildren(...view.numbers.rows.map(cells => {
      const row = document.createElement("tr");
      cells.forEach((text, at) => {
        const cell = document.createElement(at ? "td" : "th");
        if (!at) cell.scope = "row";
        cell.textContent = text;
        row.append(cell);
      });
      return row;
    }));
  }

  const drawn = {};
  function draw(figure) {
    const box = document.getElementById("plot-" + figure.name);
    if (!box || drawn[figure.name]) return;
    const selectors = [...document.querySelectorAll("select[data-figure]")].filter(one => one.dataset.figure === figure.name);
    const chart = new Chart(box, { alt: box.getAttribute("aria-label"), colors });
    box.removeAttribute("role");
    box.removeAttribute("aria-label");
    tools(box.parentElement.querySelector(".tools"), figure.name, chart);
    const show = () => {
      const at = selectors.reduce((place, one) => place * one.options.length + one.selectedIndex, 0);
      const now = page.figures.find(one => one.name === figure.name), view = now && now.views[at];
      if (!view) return;
      chart.show(view);
      fill(figure.name, view);
    };
    drawn[figure.name] = show;
    selectors.forEach(one => one.addEventListener("change", show));
    dark.addEventListener("change", show);
    show();
    new ResizeObserver(() => { if (box.clientWidth !== chart.width) chart.draw(); }).observe(box);
  }

  const hints = new ResizeObserver(entries => {
    for (const { target } of entries) {
      const hint = target.previousElementSibling, fits = target.scrollWidth <= target.clientWidth;
      hint.hidden = fits;
      hint.classList.toggle("on", !fits);
    }
  });
  const watchTables = () => document.querySelectorAll(".scroll").forEach(box => hints.observe(box));

  // A page that follows a run updates its text and numbers, and keeps the zoom that the user has set.
  const seen = {};
  function update(fresh) {
    const figures = from => [...from.querySelectorAll("figure")].map(one => one.querySelector(".plot").id + one.querySelectorAll("option").length);
    if (String(figures(fresh)) !== String(figures(document))) return location.reload();
    for (const block of document.querySelectorAll("[data-live]")) {
      const other = fresh.getElementById(block.id);
      if (!other || seen[block.id] === other.innerHTML) continue;
      seen[block.id] = other.innerHTML;
      const scrolled = [...block.querySelectorAll(".scroll")].map(box => box.scrollLeft);
      block.replaceChildren(...document.importNode(other, true).childNodes);
      block.querySelectorAll(".scroll").forEach((box, at) => { box.scrollLeft = scrolled[at] || 0; });
    }
    document.title = fresh.title;
    page = read(fresh);
    Object.values(drawn).forEach(show => show());
    watchTables();
  }

  async function follow(seconds) {
    const state = document.getElementById("state");
    for (;;) {
      await new Promise(done => setTimeout(done, 1000 * seconds));
      if (document.hidden) continue;
      try {
        const answer = await fetch("/", { cache: "no-store" });
        update(new DOMParser().parseFromString(await answer.text(), "text/html"));
        state.hidden = true;
      } catch {
        state.hidden = false;
      }
    }
  }

  page.figures.forEach(draw);
  watchTables();
  const seconds = Number(document.documentElement.dataset.follow);
  if (seconds) follow(seconds);
})();
