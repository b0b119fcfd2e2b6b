// Curves: each metric of metrics.jsonl, in groups by the word before the slash, runs overlaid.

const FIRST = ["reward/mean", "accuracy", "validation/accuracy", "validation/reward", "validation/loss",
  "policy/preference_accuracy",
  "policy/margin", "teacher/kl", "rollout/length", "policy/entropy", "policy/kl_ref", "policy/kl_old", "mismatch/kl",
  "grad_norm", "groups/no_signal", "lr"];
const BOUNDS = /_(low|high|stderr)$/;
const ALWAYS_DRAWN = ["reward/mean", "accuracy", "validation/accuracy", "validation/reward"]; // also where they never change
const EXACT = /^(validation\/|memory\/|lr$|version$)/; // without noise that an average would remove

/** Return an exponential moving average without a bias to 0, in which missing values are skipped. */
function smooth(values, weight) {
  let sum = 0;
  let rest = 1;
  return values.map((x) => {
    if (x === null || !Number.isFinite(x)) return null;
    sum = weight * sum + (1 - weight) * x;
    rest *= weight;
    return sum / (1 - rest);
  });
}

function finite(values) {
  return values.map((x) => (x !== null && Math.abs(x) < 1e150 ? x : null));
}

/** Return where on the horizontal axis any run has a metric, and a function from a run and a metric to its values there. */
function aligned(runs, name, axis) {
  const own = new Map(runs.map((run) => [run, xValues(run, axis)]));
  const has = (run) => own.get(run).filter((_, i) => run.metrics[name] && run.metrics[name][i] !== null);
  const xs = [...new Set(runs.flatMap(has))].sort((a, b) => a - b);
  const indices = new Map(xs.map((x, i) => [x, i]));
  const column = (run, metric) => {
    if (!run.metrics[metric]) return null;
    const values = xs.map(() => null);
    own.get(run).forEach((x, i) => {
      const value = number(run.metrics[metric][i]);
      if (indices.has(x) && value !== null) values[indices.get(x)] = value;
    });
    return values;
  };
  return [xs, column];
}

/** Return the ends of a metric's interval: 95%, from its own metrics or from its standard error. */
function interval(run, name, column) {
  const [low, high] = [column(run, `${name}_low`), column(run, `${name}_high`)];
  if (low && high) return [finite(low), finite(high)];
  const [values, error] = [column(run, name), column(run, `${name}_stderr`)];
  if (!values || !error) return null;
  const at = (far) => values.map((x, i) => (x === null || error[i] === null ? null : x + far * error[i]));
  return [finite(at(-1.96)), finite(at(1.96))];
}

/** A metric of all runs as a chart, which is drawn again when the smoothing or the horizontal axis changes. */
class Curve {
  constructor(element, name, state, height = 170) {
    this.element = element;
    this.name = name;
    this.state = state;
    this.height = height;
    this.isSmoothed = !EXACT.test(name);
    this.build();
  }

  build() {
    const { state, name } = this;
    const [xs, column] = aligned(state.runs, name, state.axis);
    this.xs = xs;
    this.values = state.runs.map((run) => column(run, name));
    this.steps = state.runs.map((run) => new Map(xValues(run, state.axis).map((x, i) => [x, run.steps[i]])));
    this.intervals = state.runs.map((run) => interval(run, name, column));
    const series = [{}];
    const intervals = [];
    state.runs.forEach((_, run) => {
      const stroke = colour(run);
      const line = { show: state.visible[run], spanGaps: true, points: { show: false } };
      series.push({ ...line, stroke: faded(stroke, 0.3), width: 1 });
      series.push({ ...line, stroke, width: 2, points: { show: name.startsWith("validation/") || xs.length < 2 } });
      if (this.intervals[run]) intervals.push([series.length - 1, faded(stroke, 0.6), this.intervals[run]]);
    });
    const isLarge = this.element.closest("dialog") !== null;
    this.plot = draw(this.element, name, series, this.data(), { intervals, x: state.axis, height: this.height,
      describe: (index) => this.text(index), enlarge: isLarge ? null : () => state.enlarge(name) });
  }

  data() {
    const columns = [this.xs];
    for (const values of this.values) {
      const known = finite(values || this.xs.map(() => null));
      columns.push(known, this.isSmoothed ? smooth(known, this.state.smoothing) : known);
    }
    return columns;
  }

  text(index) {
    const parts = this.values.map((values, run) => {
      if (!values || !this.state.visible[run]) return null;
      const at = index === null || index === undefined ? values.findLastIndex((x) => x !== null) : index;
      if (at < 0 || values[at] === null) return null;
      const ends = this.intervals[run] ? this.intervals[run].map((side) => side[at]) : [null];
      const between = ends.includes(null) ? "" : ` (${ends.map(shown).join(" to ")})`;
      const label = this.values.length > 1 ? `${this.state.labels[run]} ` : "";
      const x = this.state.axis === "step" ? "" : ` (${X_AXES[this.state.axis].text(this.xs[at])})`;
      return `${label}${shown(values[at])}${between} at step ${this.steps[run].get(this.xs[at])}${x}`;
    });
    return parts.filter((part) => part !== null).join(" · ") || "no value";
  }

  refresh() {
    this.plot.setData(this.data());
  }

  showRun() {
    this.values.forEach((_, run) => {
      for (const at of [1, 2]) this.plot.setSeries(2 * run + at, { show: this.state.visible[run] });
    });
  }
}

/** Return the only value that a metric has in all runs, to float32's digits; null if it has several, or one step alone. */
function constantOf(runs, name) {
  const values = runs.flatMap((run) => (run.metrics[name] ?? []).filter((x) => x !== null));
  const [first] = values;
  const isSame = (x) => x === first || Math.abs(x - first) < 1e-6 * Math.abs(first);
  return values.length > 1 && values.every(isSame) ? first : null;
}

/** Return the names of metrics by group; ends of intervals are drawn with their metric. */
function groups(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  const known = new Set(names);
  const first = known.has("reward/mean") ? FIRST : ["policy/loss", ...FIRST];
  const byGroup = new Map([["overview", first.filter((name) => known.has(name))]]);
  for (const name of names) {
    if (BOUNDS.test(name) && known.has(name.replace(BOUNDS, ""))) continue;
    const group = name.includes("/") ? name.split("/")[0] : "training";
    byGroup.set(group, [...(byGroup.get(group) || []), name]);
  }
  return byGroup;
}

/** A group of charts that unfolds; metrics that never change are named with their value, and enlarge when clicked. */
class ChartGroup {
  constructor(name, metrics, state) {
    this.name = name;
    this.state = state;
    const isDrawn = (metric) => name === "overview" && ALWAYS_DRAWN.includes(metric);
    const constants = new Map(metrics.map((metric) => [metric, isDrawn(metric) ? null : constantOf(state.runs, metric)]));
    this.constants = metrics.filter((metric) => constants.get(metric) !== null).map((metric) => [metric,
      el("button", { type: "button", "data-constant": metric, onclick: () => state.enlarge(metric) },
        `${metric} ${shown(constants.get(metric))}`)]);
    this.charts = metrics.filter((metric) => constants.get(metric) === null)
      .map((metric) => [metric, el("div", { class: "chart", "data-metric": metric })]);
    this.constantLine = this.constants.length > 0
      ? el("p", { class: "constants" }, el("span", { class: "muted" }, "never changes: "),
        this.constants.map(([, button]) => button)) : null;
    this.details = el("details", { class: "group" }, el("summary", {}, `${name} (${metrics.length})`),
      el("div", { class: "grid" }, this.charts.map(([, element]) => element)), this.constantLine);
  }

  /** Draw the charts that are visible and have not been drawn. */
  build() {
    for (const [metric, element] of this.charts) {
      if (this.details.open && !element.hidden && !element.firstChild) {
        this.state.curves.push(new Curve(element, metric, this.state));
      }
    }
  }

  /** Show the metrics whose names have a text; return how many these are. */
  filter(wanted) {
    let count = 0;
    for (const [metric, element] of [...this.charts, ...this.constants]) {
      element.hidden = !metric.toLowerCase().includes(wanted);
      count += element.hidden ? 0 : 1;
    }
    if (this.constantLine) this.constantLine.hidden = this.constants.every(([, button]) => button.hidden);
    this.details.hidden = count === 0;
    return count;
  }
}

/** Return a function that shows a metric's chart in a dialog of the size of the window. */
function enlarger(state) {
  const holder = el("div", { class: "chart" });
  const dialog = el("dialog", { id: "large", "aria-label": "A chart, enlarged" }, holder,
    el("form", { method: "dialog" }, el("button", {}, "close")));
  dialog.addEventListener("click", ({ target }) => { if (target === dialog) dialog.close(); });
  dialog.addEventListener("close", () => {
    state.curves = state.curves.filter((curve) => curve.element !== holder);
    holder.replaceChildren();
    address.set({ chart: null });
  });
  document.body.append(dialog);
  return (metric) => {
    if (!state.runs.some((run) => run.metrics[metric])) return;
    dialog.showModal();
    state.curves.push(new Curve(holder, metric, state, Math.max(220, Math.round(innerHeight * 0.65))));
    address.set({ chart: metric });
  };
}

/** Return what the lines and the dots of the charts mean. */
function chartKey(runs) {
  const stroke = (kind) => el("span", { class: `stroke ${kind}` });
  const isValidated = runs.some((run) => Object.keys(run.metrics).some((name) => name.startsWith("validation/")));
  return el("ul", { class: "key muted" }, el("li", {}, stroke("thin"), "each step"), el("li", {}, stroke("thick"), "smoothed"),
    isValidated ? el("li", {}, stroke("dotted"), "a validation, with its 95% interval") : null);
}

function curves(root, state) {
  state.enlarge = enlarger(state);
  const slider = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(state.smoothing) });
  slider.addEventListener("input", () => {
    state.smoothing = Number(slider.value);
    state.curves.forEach((curve) => curve.refresh());
    address.set({ smoothing: slider.value });
  });
  const axis = el("select", { id: "axis" }, Object.entries(X_AXES)
    .filter(([name]) => name !== "tokens" || state.runs.some((run) => run.metrics["rollout/tokens"]))
    .map(([name, { title }]) => el("option", { value: name }, title)));
  axis.value = state.axis;
  axis.addEventListener("change", () => {
    state.axis = axis.value;
    state.curves.forEach((curve) => curve.build());
    address.set({ axis: axis.value === "step" ? null : axis.value });
  });
  const search = el("input", { type: "search", placeholder: "name of a metric", "aria-label": "Filter metrics by name",
    value: address.get("metric") ?? "" });
  const count = el("span", { class: "muted", role: "status", id: "metrics" });
  add(root, el("p", { class: "controls" }, el("label", {}, "smoothing ", slider), el("label", {}, "by ", axis), search,
    count), chartKey(state.runs));
  const opened = (address.get("open") ?? "overview").split("/");
  const all = [...groups(state.runs)].filter(([, names]) => names.length > 0)
    .map(([name, names]) => new ChartGroup(name, names, state));
  for (const group of all) {
    group.details.addEventListener("toggle", () => {
      group.build();
      const open = all.filter(({ details }) => details.open).map(({ name }) => name).join("/");
      address.set({ open: open === "overview" ? null : open });
    });
    group.details.open = opened.includes(group.name);
  }
  add(root, all.map(({ details }) => details));
  const total = all.filter(({ name }) => name !== "overview").reduce((sum, { charts: drawn, constants }) => sum
    + drawn.length + constants.length, 0);
  /** Show what the search names, each metric once: the overview, whose metrics the groups have too, is hidden. */
  const filter = () => {
    const wanted = search.value.trim().toLowerCase();
    let matches = 0;
    for (const group of all) {
      const own = group.filter(wanted);
      if (wanted && group.name === "overview") group.details.hidden = true;
      else matches += own;
      if (wanted && !group.details.hidden) group.details.open = true;
      group.build();
    }
    fill(count, wanted ? `${matches} of ${total} metrics` : "");
  };
  search.addEventListener("input", () => {
    address.set({ metric: search.value || null });
    filter();
  });
  filter();
  if (address.get("chart")) state.enlarge(address.get("chart"));
}
