// Curves: each metric of metrics.jsonl, in groups by the word before the slash, runs overlaid.

const FIRST = ["reward/mean", "accuracy", "validation/accuracy", "validation/reward", "policy/preference_accuracy",
  "policy/margin", "teacher/kl", "rollout/length", "policy/entropy", "policy/kl_ref", "policy/kl_old", "mismatch/kl",
  "grad_norm", "groups/no_signal", "lr"];
const BOUNDS = /_(low|high|stderr)$/;

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

/** Return the steps of all runs that have a metric, and for each run a function from a metric to its values there. */
function aligned(runs, name) {
  const has = (run) => run.steps.filter((_, i) => run.metrics[name] && run.metrics[name][i] !== null);
  const steps = [...new Set(runs.flatMap(has))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const column = (run, metric) => {
    if (!run.metrics[metric]) return null;
    const values = steps.map(() => null);
    run.steps.forEach((step, i) => { if (place.has(step)) values[place.get(step)] = number(run.metrics[metric][i]); });
    return values;
  };
  return [steps, column];
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

class Curve {
  constructor(place, name, state) {
    this.name = name;
    this.state = state;
    const [steps, column] = aligned(state.runs, name);
    this.steps = steps;
    this.values = state.runs.map((run) => column(run, name));
    this.intervals = state.runs.map((run) => interval(run, name, column));
    this.smoothed = !name.startsWith("validation/");
    this.build(place);
  }

  build(place) {
    const series = [{}];
    const bands = [];
    this.state.runs.forEach((_, run) => {
      const stroke = colour(run);
      const show = this.state.visible[run];
      const line = { show, spanGaps: true, points: { show: !this.smoothed || this.steps.length < 2 } };
      series.push({ ...line, stroke: faded(stroke, 0.3), width: 1, points: { show: false } });
      series.push({ ...line, stroke, width: 2 });
      if (this.intervals[run]) {
        const none = { show, spanGaps: true, stroke: "transparent", width: 0, points: { show: false } };
        series.push(none, { ...none });
        bands.push({ series: [series.length - 1, series.length - 2], fill: faded(stroke, 0.15) });
      }
    });
    this.plot = draw(place, this.name, series, this.data(), { bands, describe: (index) => this.text(index) });
  }

  data() {
    const columns = [this.steps];
    this.values.forEach((values, run) => {
      const known = finite(values || this.steps.map(() => null));
      columns.push(known, this.smoothed ? smooth(known, this.state.smoothing) : known);
      if (this.intervals[run]) columns.push(...this.intervals[run]);
    });
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
      return `${label}${shown(values[at])}${between} at step ${this.steps[at]}`;
    });
    return parts.filter((part) => part !== null).join(" · ") || "no value";
  }

  refresh() {
    this.plot.setData(this.data());
  }

  showRun() {
    let at = 1;
    this.values.forEach((_, run) => {
      for (let n = this.intervals[run] ? 4 : 2; n > 0; n -= 1, at += 1) {
        this.plot.setSeries(at, { show: this.state.visible[run] });
      }
    });
  }
}

/** Return the names of metrics by group; ends of intervals are drawn with their metric. */
function groups(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  const known = new Set(names);
  const first = known.has("reward/mean") ? FIRST : ["policy/loss", ...FIRST];
  const found = new Map([["overview", first.filter((name) => known.has(name))]]);
  for (const name of names) {
    if (BOUNDS.test(name) && known.has(name.replace(BOUNDS, ""))) continue;
    const group = name.includes("/") ? name.split("/")[0] : "training";
    found.set(group, [...(found.get(group) || []), name]);
  }
  return found;
}

function curves(root, state) {
  const slider = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(state.smoothing) });
  slider.addEventListener("input", () => {
    state.smoothing = Number(slider.value);
    state.curves.forEach((curve) => curve.refresh());
    address.set({ smoothing: slider.value });
  });
  const search = el("input", { type: "search", placeholder: "metric", "aria-label": "Filter metrics by name",
    value: address.get("metric") ?? "" });
  const opened = (address.get("open") ?? "overview").split("/");
  add(root, el("p", { class: "controls" }, el("label", {}, "smoothing ", slider), search));
  const folded = [...groups(state.runs)].filter(([, names]) => names.length > 0).map(([group, names]) => {
    const grid = el("div", { class: "grid" });
    const places = names.map((name) => [name, el("div", { class: "chart", "data-metric": name })]);
    add(grid, places.map(([, place]) => place));
    const details = el("details", { class: "group" }, el("summary", {}, `${group} (${names.length})`), grid);
    const build = () => {
      for (const [name, place] of places) {
        if (details.open && !place.hidden && !place.firstChild) state.curves.push(new Curve(place, name, state));
      }
    };
    details.addEventListener("toggle", () => {
      build();
      const open = folded.filter((one) => one.details.open).map((one) => one.group).join("/");
      address.set({ open: open === "overview" ? null : open });
    });
    details.open = opened.includes(group);
    return { group, details, places, build };
  });
  add(root, folded.map(({ details }) => details));
  folded.forEach(({ build }) => build());
  const find = () => {
    const wanted = search.value.trim().toLowerCase();
    for (const { details, places, build } of folded) {
      places.forEach(([name, place]) => { place.hidden = !name.toLowerCase().includes(wanted); });
      details.hidden = places.every(([, place]) => place.hidden);
      if (wanted && !details.hidden) details.open = true;
      build();
    }
  };
  search.addEventListener("input", () => {
    address.set({ metric: search.value || null });
    find();
  });
  if (search.value) find();
}
