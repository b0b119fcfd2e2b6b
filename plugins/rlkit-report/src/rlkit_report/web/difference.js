// Two runs: the difference of their metrics, of their answers to the same prompts, and of their recipes.

const SAME = { "validation/reward": "validation/accuracy", accuracy: "reward/mean" }; // listed once where they are equal
const COMPARED = ["validation/accuracy", "validation/reward", "reward/mean", "accuracy", "rollout/length", "policy/entropy"];
const RECENT_STEPS = 20;
const MOST_OPTIONS = 30;

function mean(values) {
  return values.reduce((sum, x) => sum + x, 0) / values.length;
}

/** Return a mean with the ends of its 95% interval, of independent values. */
function meanInterval(values) {
  const centre = mean(values);
  const variance = values.reduce((sum, x) => sum + (x - centre) ** 2, 0) / Math.max(1, values.length - 1);
  const half = 1.96 * Math.sqrt(variance / values.length);
  return [centre, values.length > 1 ? [centre - half, centre + half] : null];
}

/** Return a metric's last value: of training, the mean over the last steps. */
function lastValue(run, name) {
  const values = list(run.metrics[name]).map(number).filter((x) => x !== null && Number.isFinite(x));
  if (values.length === 0) return null;
  return name.startsWith("validation/") ? values.at(-1) : mean(values.slice(-RECENT_STEPS));
}

/** Return the paired difference of two runs' last answers to the same prompts, by accuracy or by reward. */
function pairedDifference(index) {
  const [one, two] = [0, 1].map((run) => validated(index, run, "last"));
  const shared = [...one].filter(([prompt]) => two.has(prompt)).map(([prompt, i]) => [i, two.get(prompt)]);
  const name = shared.some(([i]) => index.accuracy[i] !== null) ? "accuracy" : "reward";
  const pairs = shared.filter((pair) => pair.every((i) => index[name][i] !== null));
  return { name, pairs, differences: pairs.map(([i, j]) => index[name][j] - index[name][i]) };
}

/** Return the options of a recipe's YAML by keys with dots. */
function options(recipe) {
  const parents = [];
  const values = new Map();
  for (const line of recipe.split("\n")) {
    const [, indent, name, value] = /^( *(?:- )*)([\w.-]+):(?: (.*))?$/.exec(line) ?? [];
    if (name === undefined) continue;
    while (parents.length > 0 && parents.at(-1)[0] >= indent.length) parents.pop();
    parents.push([indent.length, name]);
    if (value === undefined) continue;
    const key = parents.map(([, part]) => part).filter((part) => part !== "class_path" && part !== "init_args").join(".");
    values.set(key, values.has(key) ? `${values.get(key)}, ${value}` : value);
  }
  return values;
}

function table(head, rows) {
  return el("div", { class: "scroll" }, el("table", { class: "table" }, el("thead", {}, el("tr", {}, head.map((text) => el("th", {}, text)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((text) => el("td", {}, text)))))));
}

function metricTable(state) {
  const rows = COMPARED.map((name) => [name, ...state.runs.map((run) => lastValue(run, name))])
    .filter(([, one, two]) => one !== null && two !== null)
    .filter(([name, one, two]) => !(name in SAME && one === lastValue(state.runs[0], SAME[name]) && two === lastValue(state.runs[1], SAME[name])))
    .map(([name, one, two]) => [name, shown(one), shown(two), signed(two - one)]);
  return rows.length > 0 ? table(["at the end", ...state.labels, "difference"], rows) : null;
}

function signed(x) {
  return `${x > 0 ? "+" : ""}${shown(x)}`;
}

function promptComparison(state) {
  const { name, pairs, differences } = pairedDifference(state.index);
  if (pairs.length === 0) return null;
  const [centre, bounds] = meanInterval(differences);
  const between = bounds ? ` (95% interval ${bounds.map(signed).join(" to ")})` : "";
  const better = (sign) => pairs.filter((_, n) => Math.sign(differences[n]) === sign);
  const columns = [-1, 1].map((sign, run) => el("div", {},
    el("h4", {}, `${better(sign).length} better in ${state.labels[run]}`),
    better(sign).slice(0, MOST_ANSWERS).map(([i, j]) => answerCard(state, run === 0 ? i : j, run === 0 ? j : i))));
  return [el("p", {}, `${name} of the same ${pairs.length} validation prompts: ${state.labels[1]} minus ${state.labels[0]} `,
    el("b", {}, signed(centre)), between), el("div", { class: "columns" }, columns)];
}

function recipeTable(state) {
  const [one, two] = state.runs.map((run) => options(run.recipe));
  const differing = [...new Set([...one.keys(), ...two.keys()])].filter((key) => one.get(key) !== two.get(key));
  if (differing.length === 0) return el("p", { class: "muted" }, "The recipes are the same.");
  const rows = differing.slice(0, MOST_OPTIONS).map((key) => [key, one.get(key) ?? "–", two.get(key) ?? "–"]);
  const more = differing.length > MOST_OPTIONS ? el("p", {}, `The first ${MOST_OPTIONS} of ${differing.length}.`) : null;
  return [table(["option", ...state.labels], rows), more];
}

function difference(root, state) {
  if (state.runs.length !== 2) return;
  root.hidden = false;
  add(root, metricTable(state), promptComparison(state), recipeTable(state));
}
