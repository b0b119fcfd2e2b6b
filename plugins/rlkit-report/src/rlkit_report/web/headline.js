// The headline of each run: what it trained, how far it is, what has changed, its warnings, the command that goes on.

function headlines(root, state) {
  add(root, state.runs.map((run, i) => headline(run, state, i)));
}

function headline(run, state, i) {
  const { facts, verdict, changes, warnings, error, command, diagnosis } = run.headline;
  const mark = el("span", { class: "mark" });
  mark.style.background = colour(i);
  const badges = [verdict, run.headline.status].filter((text) => text).map((text) => el("b", { class: `badge ${text}` }, text));
  const rows = [...Object.entries(facts), ["progress", progress(run)]];
  const terms = rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  const noted = [...warnings, ...run.notes].map((text) => el("li", {}, text));
  const isUsable = run.headline.status !== "ok" || !diagnosis;
  const goOn = run.headline.status === "ok" ? "to use the model" : "to continue";
  return el("article", { class: "headline" },
    el("h2", {}, mark, state.labels[i], " ", badges),
    error ? el("p", { class: "notes" }, error) : null,
    diagnosis ? el("div", { class: "diagnosis" }, el("p", {}, diagnosis), twoSamples(state, i)) : null,
    el("div", { class: "changes" }, changes.map(change)),
    changes.some(({ before, after }) => before && after) ? beforeAfter() : null,
    el("dl", { class: "facts" }, terms),
    noted.length ? el("details", { class: "notes", open: noted.length <= 5 },
      el("summary", {}, `${noted.length} warning${noted.length === 1 ? "" : "s"}`), el("ul", {}, noted)) : null,
    command && isUsable ? el("p", { class: "command" }, el("span", { class: "muted" }, `${goOn}: `), el("code", {}, command)) : null);
}

/** Return two samples of a run's last step, of different prompts where there are. */
function twoSamples(state, run) {
  const { index } = state;
  const rows = rowsOf(index, run, "step");
  const lastStep = rows.filter((i) => index.order[i] === index.order[rows.at(-1)]);
  const first = lastStep[0];
  const second = lastStep.find((i) => index.prompt[i] !== index.prompt[first]) ?? lastStep[1];
  return el("div", { class: "side" }, [first, second].filter((i) => i !== undefined).map((i) => answerCard(state, i)));
}

/** Return what the marks on a headline's lines mean. */
function beforeAfter() {
  const mark = (side) => el("span", { class: "sign" }, el("span", { class: `interval ${side}` }), el("span", { class: `dot ${side}` }));
  return el("p", { class: "key muted" }, el("span", {}, mark("before"), "before"), el("span", {}, mark("after"), "after, with 95% intervals"));
}

/** Return how far a run is, in words. */
function progress(run) {
  const { steps, seconds } = run.headline;
  const passed = Math.max(0, last(run.steps) ?? 0);
  const spent = Math.max(number(seconds) ?? 0, last(xValues(run, "time")) ?? 0); // those of before a resume, too
  const left = run.headline.status === "in progress" && passed > 0 && steps > passed
    ? `, ${duration((steps - passed) * (last(xValues(run, "time")) / passed))} left` : "";
  return `${passed}${steps ? ` of ${steps}` : ""} steps in ${duration(spent)}${left}`;
}

/** Return a metric of validation before and after: values, intervals on a line, the p-value. */
function change({ name, before, after, p_value: pValue }) {
  const text = ({ value, bounds }) => [el("b", {}, shown(value)),
    bounds ? el("span", { class: "muted" }, ` (${bounds.map((x) => number(x).toFixed(3)).join(" to ")})`) : null];
  const smallest = Math.abs(pValue - 1 / 4001) < 1e-12; // of a resampling test
  const p = pValue === null || pValue === undefined ? "" : smallest ? "p < 0.0003" : `p = ${pValue < 1e-3 ? number(pValue).toExponential(1) : number(pValue).toPrecision(2)}`;
  const values = [before, after].filter((side) => side);
  const onLine = values.every(({ value, bounds }) => [value, ...(bounds ?? [])].every((x) => x >= 0 && x <= 1));
  return el("div", { class: "change" }, el("span", { class: "name" }, name.replaceAll("_", " ")),
    el("span", {}, text(before), after ? [" → ", text(after)] : null, " ", el("span", { class: "muted" }, p)),
    onLine ? el("span", { class: "line", "aria-hidden": "true" }, values.map(onTheLine)) : el("span", {}));
}

/** Return the mark of a value from 0 to 1 with its interval, as a part of a line of full width. */
function onTheLine({ value, bounds }, i) {
  const side = i === 0 ? "before" : "after";
  const dot = el("span", { class: `dot ${side}` });
  dot.style.left = `${100 * value}%`;
  if (!bounds) return [dot];
  const bar = el("span", { class: `interval ${side}` });
  bar.style.left = `${100 * bounds[0]}%`;
  bar.style.width = `${100 * (bounds[1] - bounds[0])}%`;
  return [bar, dot];
}
