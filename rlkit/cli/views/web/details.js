// What is shown of the rollout that was chosen: its numbers, its conversation, its group, its prompt over the steps.

const VIEWS = new Map([["one", "this rollout"], ["group", "its group side by side"],
  ["prompt", "its prompt over the steps"]]);

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
  }

  /** Show one of the three views of a row; what was asked for last is shown, whatever is loaded first. */
  async show(at, view = "one") {
    this.turn += 1;
    const turn = this.turn;
    const buttons = [...VIEWS].map(([name, text]) => el("button", { type: "button", "aria-pressed": String(name === view),
      "data-view": name, onclick: () => this.show(at, name) }, text));
    const content = await this[view](at);
    if (turn !== this.turn) return;
    address.set({ row: this.key(at), view });
    fill(this.root, el("p", { class: "controls" }, buttons), content);
  }

  async row(at) {
    const { rows, texts } = await page(this.index.page[at]);
    return [withRatio(rows[this.index.place[at]]), texts];
  }

  async one(at) {
    const [row, texts] = await this.row(at);
    const facts = [["prompt", row.prompt], ["step", this.when(at)], ["kind", row.kind],
      ["source", this.index.names.source[this.index.source[at]]], ["reward", shown(row.reward)],
      ["stop", row.stop], ["tokens", shown(this.index.length[at])], ["answer found", row.final_answer],
      ["reference answer", row.answer], ["components", row.components], ["rewards of turns", row.turn_rewards],
      ["counts", row.counts], ["error", row.error]];
    const known = facts.map(([name, value]) => [name, plain(value)]).filter(([, text]) => text !== "");
    const terms = known.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
    const meta = row.meta && typeof row.meta === "object" && Object.keys(row.meta).length > 0
      ? el("details", {}, el("summary", {}, "other columns"), el("pre", {}, pretty(row.meta))) : null;
    return [el("dl", { class: "facts" }, terms), meta, conversation(row, texts)];
  }

  /** Return what names a row also when there are more of them: its run, its step, and its place there. */
  key(at) {
    const { run, when } = this.index;
    let place = 0;
    for (let i = 0; i < at; i += 1) if (run[i] === run[at] && when[i] === when[at]) place += 1;
    return `${run[at]}/${this.when(at)}/${place}`;
  }

  /** Return the row that a name is of; undefined if there is none. */
  find(key) {
    const [own, step, place] = key.split("/");
    const { run, when, names } = this.index;
    const rows = run.flatMap((one, i) => (String(one) === own && names.when[when[i]] === step ? [i] : []));
    return rows[place];
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
    const columns = await Promise.all(this.alike(at, "group").slice(0, 64).map(async (i) => {
      const [row] = await this.row(i);
      return this.card(i, at, row, `sample ${this.index.sample[i]}`);
    }));
    return [await this.asked(at), el("div", { class: "side", tabindex: "0" }, columns)];
  }

  async prompt(at) {
    const { order, sample } = this.index;
    const rows = this.alike(at, "prompt").sort((a, b) => order[a] - order[b] || sample[a] - sample[b]);
    const cards = await Promise.all(rows.slice(0, 200).map(async (i) => {
      const [row] = await this.row(i);
      return this.card(i, at, row, this.when(i));
    }));
    const more = rows.length > 200 ? el("p", {}, `The first 200 of ${rows.length}.`) : null;
    return [await this.asked(at), el("div", { class: "over" }, cards), more];
  }

  /** Return a row's prompt, of which only the beginning is unfolded. */
  async asked(at) {
    const [row] = await this.row(at);
    const excerpt = this.index.asked[this.index.prompt[at]];
    const whole = messages({ messages: row.messages, conversation: [] });
    return el("details", {}, el("summary", {}, excerpt || "prompt"), whole);
  }

  card(i, at, row, title) {
    const facts = `reward ${shown(row.reward)} · ${shown(this.index.length[i])} tokens · ${visible(row.stop)}`;
    const open = el("button", { type: "button", onclick: () => this.show(i) }, title);
    const { conversation: turns } = row;
    const content = list(turns).length > 1 ? messages({ conversation: turns }) : el("div", { class: "text" }, row.text);
    return el("article", { class: i === at ? "card chosen" : "card" }, el("p", {}, open),
      el("p", { class: "muted" }, facts), content);
  }
}
