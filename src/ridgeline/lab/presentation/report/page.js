"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const unpack = async (node) => {
    const bytes = Uint8Array.from(atob(node.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  const read = async (node) => JSON.parse(await unpack(node));
  const byId = (id) => document.getElementById(id);
  const words = read(byId("words"));

  // A node with attributes and children. Text stays text: names in a run never become markup.
  const el = (tag, attributes, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) if (value) node.setAttribute(name, value);
    node.append(...children.flat(Infinity).filter((child) => child || child === 0));
    return node;
  };
  let names = {};
  const swatch = (group) =>
    el("span", { class: `swatch ${group}`, role: "img", "aria-label": names[group], title: names[group] });
  const share = (row) => {
    const fill = el("span", { class: row.group, style: `width:${Math.min(row.share * 100, 100).toFixed(1)}%` });
    return [el("span", { class: "bar", "aria-hidden": "true" }, fill), el("span", { class: "figure" }, row.percent)];
  };
  const badge = (panel) =>
    panel.badge && el("span", { class: panel.recorded ? "badge recorded" : "badge" }, panel.badge);
  const reason = (out) => [el("b", null, out.impls), `: ${out.status}: ${out.reason}`];
  const scroll = (label, ...inside) =>
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, inside);
  const heads = (columns) =>
    el("thead", null, el("tr", null, columns.map(([name, title]) => el("th", { scope: "col", title }, name))));
  const rung = (row) => el("th", { scope: "row" }, swatch(row.group), ` ${row.impl}`);

  const gain = (row) =>
    el("span", { class: `gain ${row.tone}`, title: "speed against the implementation before" }, row.gain);
  const step = (row) => el("li", null,
    el("div", { class: "rung" }, el("span", null, swatch(row.group), " ", el("b", null, row.impl)),
      el("span", { class: "time" }, row.time, row.gain && gain(row))),
    el("div", { class: "share" }, share(row)),
    row.idea && el("p", null, row.idea),
    row.counted && el("p", { class: "hint" }, row.counted),
    row.older && el("p", { class: "hint" }, `from an older run, ${row.older}`));

  const ladder = (panel) => el("div", { class: "panel" }, el("h4", null, panel.name, " ", badge(panel)),
    panel.ladder ? el("div", { class: "card" },
      el("p", { class: "caption" }, `Implementations in ${panel.ladder.work}`),
      el("ol", { class: "ladder" }, panel.ladder.steps.map(step)),
      panel.ladder.out.map((out) => el("p", { class: "hint" }, reason(out))))
      : el("p", { class: "hint" }, "Nothing was timed; the cases below say why."));

  const TIMES = [
    ["Implementation"],
    ["Time", "median, and half the width of its 95% interval"],
    ["Rate"],
    ["Share of the limit"],
    ["To the best alternative", "the best alternative's time divided by this one"],
    ["Host", "the CPU's own time to start the call"],
    ["Extra memory", "memory that the call needs beyond its inputs"],
    ["Error", "the worst error as a share of the tolerance: at most 1 passes"],
    ["What limits it"],
  ];
  const cell = (column, attributes, ...inside) => el("td", { "data-label": column, ...attributes }, inside);
  const timed = (row) => el("tr", null, rung(row),
    cell("Time", null,
      el("span", { class: "figure", title: row.interval }, row.time), " ", el("small", null, row.spread)),
    cell("Rate", null, row.rate), cell("Share of the limit", { class: "share" }, share(row)),
    cell("To the best alternative", null, row.ratio),
    cell("Host", null, row.host), cell("Extra memory", null, row.peak), cell("Error", null, row.law),
    el("td", { class: "verdict" }, row.verdict,
      row.throttled && " ", row.throttled && el("span", { class: "badge" }, "throttled")));
  const work = (op, table) => {
    const best = table.best;
    const fold = el("details", { class: "fold" }, el("summary", null,
      el("span", { class: "work" }, el("b", null, table.case), ` ${table.dtype} ${table.direction}`),
      best
        ? el("span", { class: "best" }, swatch(best.group), ` ${best.impl} `, el("span", { class: "quiet" }, best.time))
        : el("span", { class: "best not" }, "nothing timed"),
      best
        ? el("span", { class: "share" }, share(best))
        : el("span", { class: "not why" }, table.out.length && table.out[0].status)));
    const untimed = (out) =>
      el("tr", { class: "out" }, el("td", { colspan: TIMES.length, class: "reason" }, reason(out)));
    once(fold, () => fold.append(scroll(`${op} ${table.case} ${table.dtype} ${table.direction}`,
      el("table", { class: "rungs" }, heads(TIMES),
        el("tbody", null, table.rows.map(timed), table.out.map(untimed))))));
    return fold;
  };

  const BUILT = ["Implementation", "Kernel", "Built for", "Registers", "Spills", "Shared memory", "Loads", "Stores",
    "Matrix instructions", "Occupancy"];
  const kernel = (row) => el("tr", null, rung(row),
    cell(BUILT[1], null,
      el("code", null, row.kernel), " ", el("small", null, `${row.direction}, ${row.case} ${row.dtype}`)),
    cell(BUILT[2], null, row.arch), cell(BUILT[3], null, row.registers),
    cell(BUILT[4], { class: row.spilled && "warn" }, row.spills), cell(BUILT[5], null, row.shared),
    cell(BUILT[6], null, row.loads), cell(BUILT[7], null, row.stores), cell(BUILT[8], null, row.matrix),
    cell(BUILT[9], null, row.occupancy));
  const refused = (row) => el("tr", { class: "out" }, rung(row),
    cell(BUILT[1], null, "not compiled"), cell(BUILT[2], null, row.arch),
    el("td", { class: "verdict", colspan: 7 }, row.reason));
  const kernels = (table) => {
    const left = Object.values(table.left).reduce((sum, n) => sum + n, 0);
    const spill = table.spills ? `${table.spills} spill` : "none spills";
    const late = left ? `; ${left} not compiled, for time` : "";
    const fold = el("details", { class: "fold" }, el("summary", null,
      el("span", { class: "work" }, el("b", null, "Compiled for other GPUs")),
      el("span", { class: "best" }, `${table.rows.length} kernels, ${spill}${late}`)));
    once(fold, () => fold.append(scroll(`Resources of ${table.op}'s kernels`,
      el("table", { class: "kernels" }, heads(BUILT.map((name) => [name])),
        el("tbody", null, table.rows.map(kernel), table.not_built.map(refused))))));
    return fold;
  };

  const once = (fold, fill) => fold.addEventListener("toggle", () => fold.open && fill(), { once: true });
  const fill = async (fold) => {
    const inside = fold.querySelector(".inside");
    if (inside.childNodes.length) return;
    inside.append(el("p", { class: "hint" }, "\u2026"));
    const [data, { groups }] = await Promise.all([read(fold.querySelector("script")), words]);
    names = groups;
    inside.replaceChildren(
      el("div", { class: "panels" }, data.panels.map(ladder)),
      ...data.panels.flatMap((panel) => [el("h4", { class: "works" }, `All cases on ${panel.name}`),
        el("div", null, panel.tables.map((table) => work(data.op, table)))]),
      ...data.kernels ? [el("h4", { class: "works" }, "Kernels"), el("div", null, kernels(data.kernels))] : []);
  };
  for (const fold of document.querySelectorAll("details.op")) {
    fold.addEventListener("toggle", () => fold.open && fill(fold));
  }
  const follow = () => {
    const fold = byId(decodeURIComponent(location.hash.slice(1)));
    if (fold?.matches("details.op")) fold.open = true;
  };
  addEventListener("hashchange", follow);
  follow();

  // Charts are drawn when they come into view; Vega is unpacked for the first one.
  let vega;
  const load = async () => document.head.append(el("script", null, await unpack(byId("bundle"))));
  const views = new Map();
  const draw = async (figure) => {
    const [spec, { themes }] = await Promise.all([read(byId(`chart-${figure.dataset.chart}`)), words, vega ??= load()]);
    views.get(figure)?.finalize();
    const actions = { export: { svg: true, png: true }, source: false, compiled: false, editor: false };
    const config = themes[dark.matches ? "dark" : "light"];
    const options = { actions, renderer: "svg", config, tooltip: { theme: "custom" } };
    views.set(figure, await vegaEmbed(figure, spec, options));
  };
  const charts = [...document.querySelectorAll("[data-chart]")];
  const seen = new IntersectionObserver((entries) => {
    for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
      seen.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "400px" });
  charts.forEach((chart) => seen.observe(chart));
  addEventListener("beforeprint", () => charts.filter((chart) => !views.has(chart)).forEach(draw));
  dark.addEventListener("change", () => [...views.keys()].forEach(draw));
})();
