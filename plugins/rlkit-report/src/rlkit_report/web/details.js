// What is shown of the rollout that was chosen: its numbers, its conversation, its group, its pairs, its prompt over
// the steps.

const VIEWS = new Map([["one", "this rollout"], ["group", "its group"], ["pairs", "its pairs"],
  ["prompt", "its prompt over the steps"]]);
const MAX_CARDS = 200;

/** Return a value as text: of an object or a list, what is in it. */
function plain(value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) return value.map(plain).join(", ");
  if (typeof value === "number") return shown(value);
  return typeof value === "object" ? Object.entries(value).map(([name, x]) => `${name} ${plain(x)}`).join(", ") : visible(value);
}

class Details {
  constructor(root, state, index) {
    this.root = root;
    this.state = state;
    this.index = index;
    this.turn = 0;
    this.chosenView = null;
  }

  /** Show a view of a row, null for the one that was chosen last; what was asked for last is shown, whatever loads first. */
  async show(at, view = null) {
    this.turn += 1;
    const turn = this.turn;
    const views = [...VIEWS].filter(([name]) => name !== "pairs" || this.isPreference(at));
    const wanted = [view, this.chosenView, views.some(([name]) => name === "pairs") ? "pairs" : "one"];
    const shownView = wanted.find((name) => views.some(([other]) => other === name));
    const choose = (name) => {
      this.chosenView = name;
      this.show(at, name);
    };
    const buttons = views.map(([name, text]) => el("button", { type: "button",
      "aria-pressed": String(name === shownView), "data-view": name, onclick: () => choose(name) }, text));
    const content = await this[shownView](at);
    if (turn !== this.turn) return;
    address.set({ row: this.key(at), view: shownView });
    fill(this.root, el("p", { class: "controls" }, buttons), content);
  }

  /** Whether a row is of a step that compares the completions of a prompt. */
  isPreference(at) {
    const { run, names, when } = this.index;
    return "policy/preference_accuracy" in this.state.runs[run[at]].metrics && names.when[when[at]].startsWith("step");
  }

  async row(at) {
    const { rows, texts, pictures } = await page(this.index.page[at]);
    return [{ ...withRatio(rows[this.index.offset[at]]), pictures }, texts];
  }

  async one(at) {
    const [row, texts] = await this.row(at);
    const facts = [["prompt", row.prompt], ["step", this.when(at)], ["kind", row.kind],
      ["source", this.index.names.source[this.index.source[at]]], ["reward", shown(row.reward)],
      ["stopped by", row.stop], ["tokens", shown(this.index.length[at])], ["extracted answer", row.final_answer],
      ["reference answer", row.answer], ["components", row.components], ["rewards of turns", list(row.turn_rewards).some((x) => x) ? row.turn_rewards : null],
      ["counts", row.counts], ["metrics", row.metrics], ["error", row.error]];
    const terms = facts.map(([name, value]) => [name, plain(value)]).filter(([, text]) => text !== "")
      .map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
    const meta = row.meta && typeof row.meta === "object" && Object.keys(row.meta).length > 0
      ? el("details", {}, el("summary", {}, "other columns"), el("pre", {}, pretty(row.meta))) : null;
    return [el("dl", { class: "facts" }, terms), meta, session(row, texts)];
  }

  /** Return what names a row also when there are more of them: its run, its step, and its number there. */
  key(at) {
    const { run, when } = this.index;
    let earlier = 0;
    for (let i = 0; i < at; i += 1) if (run[i] === run[at] && when[i] === when[at]) earlier += 1;
    return `${run[at]}/${this.when(at)}/${earlier}`;
  }

  /** Return the row that a name is of; undefined if there is none. */
  find(key) {
    const [ofRun, step, earlier] = key.split("/");
    const { run, when, names } = this.index;
    const rows = run.flatMap((other, i) => (String(other) === ofRun && names.when[when[i]] === step ? [i] : []));
    return rows[earlier];
  }

  when(at) {
    return this.index.names.when[this.index.when[at]];
  }

  /** Return the rows of which a column is the same as at a row, of its run. */
  alike(at, column) {
    const { run } = this.index;
    return run.flatMap((_, i) => (run[i] === run[at] && this.index[column][i] === this.index[column][at] ? [i] : []));
  }

  async group(at) {
    const rows = this.alike(at, "group");
    return [await this.asked(at), this.summary(rows), await this.cards(rows, at, (i) => `sample ${this.index.sample[i]}`)];
  }

  async prompt(at) {
    const { order, sample } = this.index;
    const rows = this.alike(at, "prompt").sort((a, b) => order[a] - order[b] || sample[a] - sample[b]);
    return [await this.asked(at), this.summary(rows), await this.cards(rows, at, (i) => this.when(i))];
  }

  /** Return how many samples there are, and the mean and standard deviation of their rewards. */
  summary(rows) {
    const rewards = rows.map((i) => this.index.reward[i]).filter((x) => x !== null);
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    const deviation = Math.sqrt(rewards.reduce((a, b) => a + (b - mean) ** 2, 0) / Math.max(1, rewards.length - 1));
    const text = rewards.length > 0 ? `, reward ${shown(mean)} on average, standard deviation ${shown(deviation)}` : "";
    return el("p", { class: "muted" }, `${rows.length} sample${rows.length === 1 ? "" : "s"}${text}`);
  }

  async cards(rows, at, title) {
    const cards = await Promise.all(rows.slice(0, MAX_CARDS).map(async (i) => {
      const [row] = await this.row(i);
      return this.card(i, at, row, title(i));
    }));
    const more = rows.length > MAX_CARDS ? el("p", {}, `The first ${MAX_CARDS} of ${rows.length}.`) : null;
    return [el("div", { class: "side" }, cards), more];
  }

  /** Return the pairs of a group: each two completions of which one has the higher reward, and is preferred. */
  async pairs(at) {
    const rows = await Promise.all(this.alike(at, "group").slice(0, MAX_CARDS).map(async (i) => [i, (await this.row(i))[0]]));
    const reward = ([i]) => this.index.reward[i] ?? -Infinity;
    const pairs = rows.flatMap((better) => rows.filter((worse) => reward(worse) < reward(better))
      .map((worse) => [better, worse]));
    const gaps = pairs.map(([better, worse]) => logpOf(better[1]) - logpOf(worse[1]));
    const known = gaps.filter(Number.isFinite);
    const text = known.length === 0 ? "" : `; the policy finds the preferred one likelier in ${known.filter((gap) => gap > 0).length}`;
    const head = ["preferred", "rejected", ...(known.length > 0 ? ["difference of log-probs"] : [])];
    const lines = pairs.slice(0, MAX_CARDS).map((pair, n) => el("tr", {}, pair.map(([i, row]) => el("td", {},
      this.card(i, at, row, `reward ${shown(this.index.reward[i])}`))),
    known.length > 0 ? el("td", { class: gaps[n] < 0 ? "notes" : null }, shown(gaps[n])) : null));
    return [await this.asked(at), el("p", { class: "muted" }, `${pairs.length} pair${pairs.length === 1 ? "" : "s"}${text}`),
      pairs.length > 0 ? el("table", { class: "pairs" }, el("thead", {}, el("tr", {}, head.map((name) => el("th", {}, name)))),
        el("tbody", {}, lines)) : el("p", {}, "All completions of this prompt have the same reward: nothing is compared.")];
  }

  /** Return a row's prompt, of which only the beginning is unfolded. */
  async asked(at) {
    const [row] = await this.row(at);
    const excerpt = this.index.asked[this.index.prompt[at]];
    return el("details", { class: "asked" }, el("summary", {}, excerpt || "prompt"),
      messages({ messages: row.messages, conversation: [], pictures: row.pictures }));
  }

  /** Return a sample in short; a click opens it. */
  card(i, at, row, title) {
    const { reward } = this.index;
    const badge = el("b", { class: "reward" }, shown(reward[i]));
    const facts = [`${shown(this.index.length[i])} tokens`, row.stop === "stop" ? null : visible(row.stop)];
    const turns = list(row.conversation);
    const content = turns.length > 1 ? messages({ conversation: turns, pictures: row.pictures }) : el("div", { class: "text" }, row.text);
    const open = () => { if (getSelection().isCollapsed) this.show(i, "one"); };
    return el("article", { class: i === at ? "card chosen" : "card", onclick: open },
      el("p", {}, el("button", { type: "button" }, title), " ", title.startsWith("reward") ? null : badge),
      el("p", { class: "muted" }, facts.filter((fact) => fact).join(" · ")), content);
  }
}

/** Return the log-prob of a row's completion; NaN if there are none, or all are 0, as for a reward model. */
function logpOf(row) {
  const logps = [row.trainer_logps, row.logps].find((values) => list(values).some((x) => x));
  return logps ? logps.reduce((sum, x, i) => sum + (list(row.mask)[i] === false ? 0 : number(x)), 0) : NaN;
}
