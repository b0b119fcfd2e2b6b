// Charts of uPlot with the report's colours, which follow the theme and the width of their place.

const charts = new Set();

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axes(unit) {
  const common = { stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1 },
    ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return [
    { ...common, size: 26, space: 50, values: (_, ticks) => ticks.map((x) => (Number.isInteger(x) ? x : "")) },
    { ...common, size: 60, values: (plot, ticks, axis, space, width) => ticks.map((x) => `${tick(x, width)}${unit}`) },
  ];
}

/** Return the text of a tick, with as many digits as tell it from the next one. */
function tick(value, width) {
  const size = Math.abs(value);
  const whole = (x) => x > 0.5 && Math.abs(x - Math.round(x)) < 1e-3;
  const digits = [0, 1, 2, 3, 4, 5, 6, 7, 8].find((n) => whole(width * 10 ** n)) ?? 9;
  if (value === 0) return "0";
  return size >= 1e6 || (size < 1e-3 && digits > 4) || digits > 8 ? value.toExponential(1) : value.toFixed(digits);
}

/** Return the ends of an axis of values: never so close that a tick's width is lost to rounding. */
function range(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const least = Math.max(Math.abs(low), Math.abs(high)) * 1e-4 || 1;
  return high - low < least ? [low - least, high + least] : uPlot.rangeNum(low, high, 0.1, true);
}

/** Draw a chart in a place; its line of text shows what `describe(index)` returns, null for the last one. */
function draw(place, title, series, data, { bands = [], unit = "", describe, height = 170 }) {
  const readout = el("p", { class: "readout" });
  const box = el("div", { class: "plot", role: "img", "aria-label": `${title}: ${describe(null)}` });
  fill(place, el("h4", {}, title), readout, box);
  const show = (index) => fill(readout, describe(index));
  show(null);
  const options = {
    width: Math.max(200, box.clientWidth || 320), height, series, bands, axes: axes(unit),
    legend: { show: false }, scales: { x: { time: false }, y: { range } },
    cursor: { y: false, sync: { key: "steps" }, drag: { x: true, y: false } },
    hooks: { setCursor: [(plot) => show(plot.cursor.idx)] },
  };
  const plot = new uPlot(options, data, box);
  charts.add([plot, box]);
  return plot;
}

addEventListener("resize", () => {
  for (const [plot, box] of charts) {
    if (box.clientWidth > 0 && box.clientWidth !== plot.width) {
      plot.setSize({ width: Math.max(200, box.clientWidth), height: plot.height });
    }
  }
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [plot] of charts) plot.redraw(false, true);
});
