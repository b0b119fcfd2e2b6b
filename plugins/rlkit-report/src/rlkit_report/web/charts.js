// Charts of uPlot with the report's colours, which follow the theme and the width of the element that holds them.

const charts = new Set();

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** What the horizontal axis counts: how a value of it is written, and where that is told. */
const X_AXES = {
  step: { title: "steps", text: (x) => (Number.isInteger(x) ? String(x) : "") },
  tokens: { title: "tokens of the policy", text: inShort },
  time: { title: "time in steps", text: duration },
};

/** Return where a run's steps are on the horizontal axis: their numbers, or the tokens or seconds of all steps so far. */
function xValues(run, axis) {
  if (axis === "step") return run.steps;
  const names = axis === "tokens" ? ["rollout/tokens"] : run.phases;
  let sum = 0;
  return run.steps.map((_, i) => {
    for (const name of names) sum += Math.max(0, number(run.metrics[name]?.[i]) || 0);
    return sum;
  });
}

function axes(unit, x) {
  const common = { stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1 },
    ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return [
    { ...common, size: 26, space: 60, values: (_, ticks) => ticks.map(X_AXES[x].text) },
    { ...common, size: 60, values: (plot, ticks, axis, space, width) => ticks.map((y) => `${tick(y, width)}${unit}`) },
  ];
}

/** Return the text of a tick, with as many digits as tell it from the next one. */
function tick(value, width) {
  const size = Math.abs(value);
  const isInteger = (x) => x > 0.5 && Math.abs(x - Math.round(x)) < 1e-3;
  const digits = [0, 1, 2, 3, 4, 5, 6, 7, 8].find((n) => isInteger(width * 10 ** n)) ?? 9;
  if (value === 0) return "0";
  return size >= 1e6 || (size < 1e-3 && digits > 4) || digits > 8 ? value.toExponential(1) : value.toFixed(digits);
}

/** Return the ends of an axis of values and intervals: never so close that a tick's width is lost to rounding. */
function range(intervals, lowest, highest) {
  if (lowest === null || highest === null) return [0, 1];
  const ends = intervals.flatMap(([, , sides]) => sides.flat()).filter((end) => end !== null);
  const [low, high] = [Math.min(lowest, ...ends), Math.max(highest, ...ends)];
  const least = Math.max(Math.abs(low), Math.abs(high)) * 1e-4 || 1;
  return high - low < least ? [low - least, high + least] : uPlot.rangeNum(low, high, 0.1, true);
}

/** Return a hook that draws an interval at each value of a series: [series, colour, values of its ends]. */
function errorBars(intervals) {
  return (plot, drawn) => {
    const interval = intervals.find(([series]) => series === drawn);
    if (!interval || !plot.series[drawn].show) return;
    const [, stroke, ends] = interval;
    const { ctx } = plot;
    const cap = 3 * devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = stroke;
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.beginPath();
    plot.data[0].forEach((x, i) => {
      if (ends.some((side) => side[i] === null)) return;
      const at = plot.valToPos(x, "x", true);
      const [low, high] = ends.map((side) => plot.valToPos(side[i], "y", true));
      ctx.moveTo(at, low);
      ctx.lineTo(at, high);
      for (const end of [low, high]) {
        ctx.moveTo(at - cap, end);
        ctx.lineTo(at + cap, end);
      }
    });
    ctx.stroke();
    ctx.restore();
  };
}

/**
 * Draw a chart in an element; its line of text shows what `describe(index)` returns, null for the last one.
 *
 * Options: `intervals` of series, the `unit` of values, the `x` axis, the `height` in pixels, and `enlarge`, which is
 * called when the title is clicked.
 */
function draw(element, title, series, data, { intervals = [], unit = "", x = "step", describe, height = 170, enlarge }) {
  const readout = el("p", { class: "readout" });
  const box = el("div", { class: "plot", role: "img", "aria-label": `${title}: ${describe(null)}` });
  const head = enlarge ? el("button", { type: "button", class: "title", title: "Enlarge", onclick: enlarge }, title) : title;
  fill(element, el("h4", {}, head), readout, box);
  forget();
  const show = (index) => fill(readout, describe(index));
  show(null);
  const options = {
    width: Math.max(200, box.clientWidth || 320), height, series, axes: axes(unit, x),
    legend: { show: false }, scales: { x: { time: false }, y: { range: (_, low, high) => range(intervals, low, high) } },
    cursor: { y: false, sync: { key: x }, drag: { x: true, y: false } },
    hooks: { setCursor: [(plot) => show(plot.cursor.idx)], drawSeries: [errorBars(intervals)] },
  };
  const plot = new uPlot(options, data, box);
  charts.add([plot, box]);
  return plot;
}

/** Free the charts that are no longer on the page. */
function forget() {
  for (const chart of charts) {
    if (chart[1].isConnected) continue;
    chart[0].destroy();
    charts.delete(chart);
  }
}

addEventListener("resize", () => {
  forget();
  for (const [plot, box] of charts) {
    if (box.clientWidth > 0 && box.clientWidth !== plot.width) {
      plot.setSize({ width: Math.max(200, box.clientWidth), height: plot.height });
    }
  }
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [plot] of charts) plot.redraw(false, true);
});
