"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const themes = read("themes");
  const actions = { export: { svg: true, png: true }, source: false, compiled: false, editor: false };
  const views = new Map();

  const draw = async (figure) => {
    const spec = read(`chart-${figure.dataset.chart}`);
    views.get(figure)?.finalize();
    const options = { actions, renderer: "svg", config: themes[dark.matches ? "dark" : "light"], tooltip: { theme: "custom" } };
    views.set(figure, await vegaEmbed(figure, spec, options));
  };
  const drawAll = () => document.querySelectorAll("[data-chart]").forEach(draw);

  dark.addEventListener("change", drawAll);
  drawAll();
})();
