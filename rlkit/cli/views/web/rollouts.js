// The list of rollouts: filtered and sorted by the index; a search of texts reads page after page.

const PER_LIST = 50;
const HEADS = [["order", "step"], ["prompt", "prompt"], ["source", "source"], ["reward", "reward"], ["length", "tokens"],
  ["stop", "stop"], ["text", "text"]];

class List {
  constructor(root, state, index) {
    this.state = state;
    this.index = index;
    this.size = index.excerpts.length;
    this.names = { run: state.labels, when: index.names.when, stop: index.names.stop, source: index.names.source };
    this.filter = {};
    for (const name of ["prompt", "reward", "most"]) this.filter[name] = address.get(name) ?? "";
    for (const [name, texts] of Object.entries(this.names)) {
      const at = texts.indexOf(address.get(name));
      this.filter[name] = at < 0 ? "" : String(at);
    }
    const sort = /^(-?)(\w+)$/.exec(address.get("sort") ?? "");
    const by = HEADS.some(([name]) => name === sort?.[2]) ? sort[2] : "order";
    this.sort = { by, sign: sort?.[1] ? -1 : 1 };
    this.found = null;
    this.search = 0;
    this.first = 0;
    this.chosen = null;
    this.table = el("table", { class: "list" });
    this.count = el("p", { role: "status", id: "count" });
    this.panel = el("div", { id: "details", "aria-live": "polite" }, el("p", { class: "muted" }, "Choose a rollout."));
    this.details = new Details(this.panel, state, index);
    this.moves = [["earlier", -PER_LIST], ["later", PER_LIST]].map(([text, by]) => [by,
      el("button", { type: "button", onclick: () => this.show(this.first + by) }, text)]);
    const left = el("div", { id: "list" }, this.count, el("div", { class: "scroll" }, this.table),
      el("p", { class: "controls" }, this.moves.map(([, button]) => button)));
    add(root, this.controls(), el("div", { class: "browser" }, left, this.panel));
    this.update();
  }

  /** Show what the address names: a text that is searched, and a rollout with the page of the list that has it. */
  async restore() {
    if (address.get("text")) await this.find(address.get("text"));
    const row = this.details.find(address.get("row") ?? "");
    if (row === undefined) return;
    this.first = Math.max(0, Math.floor(this.rows.indexOf(row) / PER_LIST) * PER_LIST);
    await this.open(row, address.get("view"));
  }

  controls() {
    const change = (name, value, text) => {
      this.filter[name] = value;
      address.set({ [name]: value === "" ? null : text });
      this.update();
    };
    const selects = ["run", "when", "source", "stop"].filter((name) => this.names[name].length > 1).map((name) => {
      const choices = this.names[name].map((text, i) => [i, text || "(none)"]);
      return select(name === "when" ? "step" : name, choices, this.filter[name],
        (value) => change(name, value, this.names[name][Number(value)]));
    });
    const field = (label, type, name) => el("label", {}, `${label} `, el("input", { type, step: "any",
      "data-filter": name, value: this.filter[name],
      oninput: ({ target }) => change(name, target.value, target.value) }));
    const search = el("input", { type: "search", id: "search", value: address.get("text") ?? "" });
    search.addEventListener("change", () => {
      address.set({ text: search.value || null });
      this.find(search.value);
    });
    return el("p", { class: "controls" }, selects, field("prompt", "search", "prompt"),
      field("reward from", "number", "reward"), field("to", "number", "most"), el("label", {}, "text ", search));
  }

  /** Keep the rows whose conversations have a text; each page is read once. */
  async find(wanted) {
    this.search += 1;
    const search = this.search;
    const text = wanted.trim().toLowerCase();
    this.found = text ? new Set() : null;
    const pages = new Map();
    if (text) this.index.page.forEach((page, i) => pages.set(page, [...(pages.get(page) || []), i]));
    let read = 0;
    for (const [name, rows] of pages) {
      const { rows: saved } = await load(`page-${name}`);
      if (search !== this.search) return;
      for (const i of rows) if (contains(saved[this.index.place[i]], text)) this.found.add(i);
      read += 1;
      if (read % 20 === 0) {
        this.update();
        add(this.count, ` — searched ${read} of ${pages.size} pages`);
      }
    }
    this.update();
  }

  kept(i) {
    const { filter, index } = this;
    for (const name of ["run", "when", "stop", "source"]) {
      if (filter[name] !== "" && index[name][i] !== Number(filter[name])) return false;
    }
    const reward = index.reward[i] ?? NaN;
    if (filter.reward !== "" && !(reward >= Number(filter.reward))) return false;
    if (filter.most !== "" && !(reward <= Number(filter.most))) return false;
    return this.found === null || this.found.has(i);
  }

  update() {
    const wanted = this.filter.prompt.trim().toLowerCase();
    const named = this.index.names.prompt.map((name, i) => `${name}\n${this.index.asked[i]}`);
    const asked = named.map((text) => text.toLowerCase().includes(wanted));
    const value = this.values(this.sort.by);
    this.rows = [];
    for (let i = 0; i < this.size; i += 1) if (asked[this.index.prompt[i]] && this.kept(i)) this.rows.push(i);
    this.rows.sort((a, b) => compared(value(a), value(b), this.sort.sign) || a - b);
    this.show(0);
  }

  values(by) {
    if (by === "text") return (i) => this.index.excerpts[i];
    if (by === "prompt" || by === "stop" || by === "source") return (i) => this.index.names[by][this.index[by][i]];
    return (i) => this.index[by][i];
  }

  show(first) {
    this.first = Math.max(0, Math.min(first, Math.floor((this.rows.length - 1) / PER_LIST) * PER_LIST));
    const rows = this.rows.slice(this.first, this.first + PER_LIST);
    const range = rows.length > 0 ? `, ${this.first + 1} to ${this.first + rows.length} shown` : "";
    fill(this.count, `${this.rows.length} of ${this.size} rollouts${range}`);
    const heads = HEADS.filter(([by]) => this.listed(by));
    fill(this.table, el("thead", {}, el("tr", {}, heads.map(([by, text]) => this.head(by, text)))),
      el("tbody", {}, rows.map((i) => this.line(i))));
    for (const [by, button] of this.moves) {
      button.disabled = by < 0 ? this.first === 0 : this.first + PER_LIST >= this.rows.length;
    }
  }

  /** Whether a column tells anything. */
  listed(by) {
    return by !== "source" || this.names.source.length > 1;
  }

  head(by, text) {
    const own = this.sort.by === by;
    const sort = () => {
      this.sort = { by, sign: own ? -this.sort.sign : by === "reward" || by === "length" ? -1 : 1 };
      address.set({ sort: `${this.sort.sign < 0 ? "-" : ""}${by}` });
      this.update();
    };
    const arrow = own ? (this.sort.sign > 0 ? " ▲" : " ▼") : "";
    const order = own ? (this.sort.sign > 0 ? "ascending" : "descending") : null;
    const button = el("button", { type: "button", "data-sort": by, onclick: sort }, text + arrow);
    return el("th", { scope: "col", class: `of-${by}`, "aria-sort": order }, button);
  }

  line(i) {
    const { index } = this;
    const open = () => this.open(i);
    const mark = el("span", { class: "mark" });
    mark.style.background = colour(index.run[i]);
    const asked = index.asked[index.prompt[i]];
    const name = index.names.prompt[index.prompt[i]];
    return el("tr", { "data-row": String(i), class: i === this.chosen ? "chosen" : null },
      el("td", {}, mark, el("button", { type: "button", onclick: open }, index.names.when[index.when[i]])),
      el("td", { class: "cut" }, asked && asked !== name ? `${name}: ${asked}` : name),
      this.listed("source") ? el("td", { class: "cut of-source" }, this.names.source[index.source[i]]) : null,
      el("td", {}, shown(index.reward[i])), el("td", {}, shown(index.length[i])),
      el("td", { class: "of-stop" }, index.names.stop[index.stop[i]]), el("td", { class: "cut" }, index.excerpts[i]));
  }

  async open(i, view = "one") {
    this.chosen = i;
    this.show(this.first);
    await this.details.show(i, VIEWS.has(view) ? view : "one");
    if (matchMedia("(max-width: 900px)").matches) this.panel.scrollIntoView();
  }
}

/** Return which of two values is first; those that are missing are last in both directions. */
function compared(a, b, sign) {
  if (a === b) return 0;
  if (a === null) return 1;
  if (b === null) return -1;
  return a < b ? -sign : sign;
}

/** Return whether a row's messages, its text or its error have a text. */
function contains(row, wanted) {
  const all = [...list(row.messages), ...list(row.conversation)].map((message) => message?.content);
  const texts = [...all, row.text, row.error, row.prompt];
  return texts.some((x) => x !== undefined && visible(x).toLowerCase().includes(wanted));
}
