// What the answers tell: those that training fixed or broke, those that stay wrong, and how rewards are distributed.

const MOST_ANSWERS = 5;
const RIGHT = 0.5;
const MOST_BINS = 10;
const RECORDED = "recorded answers"; // at the end of a method that samples nothing in its steps: rewards are the data's

/** Return the rows of a run that are of a kind: `step`, `greedy` or `sampled`. */
function rowsOf(index, run, kind) {
  const wanted = index.names.kind.indexOf(kind);
  return index.run.flatMap((own, i) => (own === run && index.kind[i] === wanted ? [i] : []));
}

/** Return a rollout in short; a click opens it in the list. */
function answerCard(state, i, earlier = null) {
  const { index } = state;
  const open = async () => {
    await state.list.reach(i, "one");
    document.getElementById("rollouts").scrollIntoView();
  };
  const text = (at) => index.excerpts[at] || "(empty)";
  return el("article", { class: "card", onclick: open },
    el("p", {}, el("button", { type: "button" }, index.asked[index.prompt[i]] || index.names.prompt[index.prompt[i]]), " ",
      el("b", { class: "reward" }, earlier === null ? "" : `${shown(index.reward[earlier])} → `, shown(index.reward[i]))),
    earlier === null ? null : el("div", { class: "text muted" }, text(earlier)),
    el("div", { class: "text" }, text(i)));
}

/** Return a run's greedy answers at a validation, the first or the last one, by prompt. */
function validated(index, run, which) {
  const rows = rowsOf(index, run, "greedy");
  const orders = rows.map((i) => index.order[i]);
  const order = which === "first" ? Math.min(...new Set(orders)) : Math.max(...new Set(orders));
  return new Map(rows.filter((i) => index.order[i] === order).map((i) => [index.prompt[i], i]));
}

/** Return pairs of answers to the same prompt, at the first and at the last validation; none if there is one. */
function answerPairs(index, run) {
  const [first, end] = ["first", "last"].map((which) => validated(index, run, which));
  const pairs = [...end].map(([prompt, i]) => [first.get(prompt), i]);
  return pairs.filter(([before, after]) => before !== undefined && before !== after);
}

/** Return lists of a run's answers: [title, what it says, pairs]. Without accuracy, rewards are compared. */
function answerLists(index, pairs) {
  if (pairs.some((pair) => pair.some((i) => index.accuracy[i] !== null))) {
    const isRight = (i) => index.accuracy[i] !== null && index.accuracy[i] >= RIGHT;
    const those = (before, after) => pairs.filter((pair) => isRight(pair[0]) === before && isRight(pair[1]) === after);
    return [["fixed", "wrong at first, right at last", those(false, true)],
      ["broken", "right at first, wrong at last", those(true, false)],
      ["still wrong", "at the first and the last validation", those(false, false)]];
  }
  const scored = pairs.filter((pair) => pair.every((i) => index.reward[i] !== null));
  const growth = ([before, after]) => index.reward[after] - index.reward[before];
  const by = (value) => [...scored].sort((a, b) => value(a) - value(b));
  return [["improved", "reward rose most", by((pair) => -growth(pair)).filter((pair) => growth(pair) > 0)],
    ["worsened", "reward fell most", by(growth).filter((pair) => growth(pair) < 0)],
    ["lowest", "rewards at the last validation", by(([, after]) => index.reward[after])]];
}

function answerColumns(state, pairs) {
  return el("div", { class: "columns" }, answerLists(state.index, pairs).map(([title, says, listed]) => el("div", { "data-answers": title },
    el("h4", {}, title === "lowest" ? title : `${listed.length} of ${pairs.length} ${title}`, " ", el("span", { class: "muted" }, says)),
    listed.slice(0, MOST_ANSWERS).map(([before, after]) => answerCard(state, after, before)))));
}

/** Return the rewards of a run's first and last steps: a tenth of its steps, ten at most. */
function rewardPeriods(index, run) {
  const rows = rowsOf(index, run, "step").filter((i) => index.reward[i] !== null);
  const steps = [...new Set(rows.map((i) => index.order[i]))].sort((a, b) => a - b);
  const size = Math.max(1, Math.min(10, Math.round(steps.length / 10)));
  const of = (chosen) => rows.filter((i) => chosen.has(index.order[i])).map((i) => index.reward[i]);
  const named = (chosen) => (chosen.length > 1 ? `steps ${chosen[0]} to ${chosen.at(-1)}` : `step ${chosen[0]}`);
  const periods = steps.length > 1 ? [steps.slice(0, size), steps.slice(-size)] : [steps];
  return periods.filter((chosen) => chosen.length > 0).map((chosen) => [named(chosen), of(new Set(chosen))]);
}

/** Return bins of rewards [label, from, to]: a bin for each value if these are few, otherwise of equal width. */
function rewardBins(rewards) {
  const values = [...new Set(rewards)].sort((a, b) => a - b);
  if (values.length <= MOST_BINS) return values.map((value) => [shown(value), value, value]);
  const [low, high] = [values[0], values.at(-1)];
  const edge = (n) => (n === MOST_BINS ? high : low + (high - low) * (n / MOST_BINS));
  return Array.from({ length: MOST_BINS }, (_, n) => [shown(Number(edge(n).toPrecision(2))), edge(n), edge(n + 1)]);
}

/** Return a histogram of rewards: for each bin the share of the samples of each period. */
function histogram(periods) {
  const bins = rewardBins(periods.flatMap(([, rewards]) => rewards));
  const counted = periods.map(([, rewards]) => bins.map(([, from, to], n) => rewards.filter((x) => x >= from
    && (x < to || from === to || n === bins.length - 1) && x <= to).length / rewards.length));
  const highest = Math.max(...counted.flat(), 1e-9);
  const sides = periods.length > 1 ? ["before", "after"] : ["after"];
  const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.01 ? 1 : 0)}%`;
  const bin = ([label], n) => el("div", { class: "bin", title: counted.map((shares) => percent(shares[n])).join(" → ") },
    el("div", { class: "bars" }, counted.map((shares, side) => {
      const bar = el("span", { class: `bar ${sides[side]}` });
      bar.style.height = `${(100 * shares[n]) / highest}%`;
      return bar;
    })), el("span", { class: "share" }, counted.map((shares) => percent(shares[n])).join(" → ")), el("b", {}, label));
  return el("figure", { class: "histogram" },
    el("figcaption", {}, "rewards of samples: ", periods.map(([name], side) => el("span", {},
      el("span", { class: `mark bar ${sides[side]}` }), `${name} `))),
    el("div", { class: "bins" }, bins.map(bin)));
}

function answers(root, state) {
  const parts = state.runs.map(({ headline: { facts } }, run) => {
    const isRecorded = (facts.method ?? "").endsWith(RECORDED);
    const [pairs, periods] = [answerPairs(state.index, run), isRecorded ? [] : rewardPeriods(state.index, run)];
    if (pairs.length === 0 && periods.length === 0) return null;
    const content = [pairs.length > 0 ? answerColumns(state, pairs) : null, periods.length > 0 ? histogram(periods) : null];
    return state.runs.length === 1 ? content : el("details", { class: "fold" }, el("summary", {}, state.labels[run]), content);
  }).filter((part) => part !== null);
  root.hidden = parts.length === 0;
  add(root, parts);
}
