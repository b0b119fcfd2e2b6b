// Seconds of each phase, stacked by step, a chart for each run; speed, memory and mismatch beside them.

const ORDER = ["time/sample", "time/score", "time/logps", "time/update", "time/sync"];
const BESIDE = ["time/tokens_per_second", "time/mfu", "time/engine_idle_share", "memory/peak_device_mb", "memory/rss_mb",
  "memory/share", "mismatch/kl", "mismatch/max", "mismatch/ess"];

function phasesOf(run) {
  const rank = (name) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);
  return [...run.phases].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
}

function timeline(root, state) {
  state.runs.forEach((run, i) => {
    const phases = phasesOf(run);
    const measured = run.steps.map((_, at) => at).filter((at) => phases.some((name) => run.metrics[name][at] !== null));
    if (measured.length === 0) return;
    const seconds = phases.map((name) => measured.map((at) => Math.max(0, number(run.metrics[name][at]) || 0)));
    const totals = seconds.map((column) => column.reduce((a, b) => a + b, 0));
    const all = totals.reduce((a, b) => a + b, 0);
    const chart = el("div", { class: "chart wide", "data-timeline": String(i) });
    const key = phases.map((name, phase) => {
      const mark = el("span", { class: "mark" });
      mark.style.background = colour(phase);
      const share = all > 0 ? Math.round((100 * totals[phase]) / all) : 0;
      return el("li", {}, mark, `${name.replace("time/", "")} ${shown(totals[phase])} s (${share}%)`);
    });
    add(root, chart, el("ul", { class: "key" }, key));
    stacked(chart, state.labels[i], measured.map((at) => run.steps[at]), phases, seconds);
  });
  if (root.children.length === 1) add(root, el("p", {}, "No step has been made yet."));
  const beside = BESIDE.filter((name) => state.runs.some((run) => run.metrics[name]) && constantOf(state.runs, name) === null)
    .map((name) => [name, el("div", { class: "chart", "data-beside": name })]);
  add(root, el("div", { class: "grid" }, beside.map(([, element]) => element)));
  for (const [name, element] of beside) state.curves.push(new Curve(element, name, state));
}

/** Draw columns on one another: sums are drawn from the highest down, each over the last. */
function stacked(element, title, steps, phases, seconds) {
  const sums = [];
  seconds.forEach((column, i) => sums.push(column.map((x, at) => x + (i > 0 ? sums[i - 1][at] : 0))));
  const bars = uPlot.paths.bars({ size: [1, 60] });
  const series = phases.map((_, i) => ({
    fill: colour(i), stroke: colour(i), width: 0, paths: bars, points: { show: false },
  })).reverse();
  const describe = (index) => {
    const at = index === null || index === undefined ? steps.length - 1 : index;
    const parts = phases.map((name, i) => `${name.replace("time/", "")} ${shown(seconds[i][at])} s`);
    return `step ${steps[at]}: ${parts.join(", ")}`;
  };
  draw(element, title, [{}, ...series], [steps, ...sums.reverse()], { unit: " s", describe, height: 220 });
}
