// The list of rollouts: filtered and sorted by the index; a search of texts reads page after page.

const PER_LIST = 50;
const HEADS = [["order", "step"], ["prompt", "prompt"], ["source", "source"], ["reward", "reward"], ["length", "tokens"],
  ["stop", "stop"], ["text", "text"]];
const NARROW = matchMedia("(max-width: 900px)");

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
    this.matches = null;
    this.search = 0;
    this.first = 0;
    this.chosen = null;
    this.table = el("table", { class: "list" });
    this.table.addEventListener("keydown", (event) => this.move(event));
    this.count = el("p", { role: "status", id: "count" });
    this.panel = el("div", { id: "details", "aria-live": "polite" }, el("p", { class: "muted" }, "Choose a rollout."));
    this.details = new Details(this.panel, state, index);
    this.moves = [["earlier", -PER_LIST], ["later", PER_LIST]].map(([text, step]) => [step,
      el("button", { type: "button", onclick: () => this.show(this.first + step) }, text)]);
    const left = el("div", { id: "list" }, this.count, el("div", { class: "scroll" }, this.table),
      el("p", { class: "controls" }, this.moves.map(([, button]) => button)));
    this.browser = el("div", { class: "browser" }, left, this.panel);
    this.filters = this.controls();
    add(root, this.filters, this.browser);
    NARROW.addEventListener("change", () => this.placePanel());
    this.update();
  }

  /** Show what the address names: a text that is searched, and a rollout with the page of the list that has it. */
  async restore() {
    if (address.get("text")) await this.find(address.get("text"));
    const row = this.details.find(address.get("row") ?? "");
    if (row !== undefined) await this.reach(row, address.get("view"));
  }

  /** Open a row on the page of the list that has it; filters that leave it out are removed. */
  async reach(row, view = null) {
    if (!this.rows.includes(row)) {
      this.clear();
      this.update();
    }
    this.show(Math.floor(this.rows.indexOf(row) / PER_LIST) * PER_LIST);
    await this.open(row, view);
    this.reveal(row);
  }

  /** Remove all filters. */
  clear() {
    for (const name of Object.keys(this.filter)) this.filter[name] = "";
    this.matches = null;
    this.search += 1; // one in progress ends
    address.set({ ...Object.fromEntries(Object.keys(this.filter).map((name) => [name, null])), text: null });
    const controls = this.controls();
    this.filters.replaceWith(controls);
    this.filters = controls;
  }

  controls() {
    const change = (name, value, text) => {
      this.filter[name] = value;
      address.set({ [name]: value === "" ? null : text });
      this.update();
    };
    const selects = ["run", "when", "source", "stop"].filter((name) => this.names[name].length > 1).map((name) => {
      const choices = this.names[name].map((text, i) => [i, text || "(none)"]);
      return select({ when: "step", stop: "stopped by" }[name] ?? name, choices, this.filter[name],
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
    this.matches = text ? new Set() : null;
    const pages = new Map();
    if (text) this.index.page.forEach((page, i) => pages.set(page, [...(pages.get(page) || []), i]));
    let read = 0;
    for (const [name, rows] of pages) {
      const { rows: saved } = await load(`page-${name}`);
      if (search !== this.search) return;
      for (const i of rows) if (contains(saved[this.index.offset[i]], text)) this.matches.add(i);
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
    return this.matches === null || this.matches.has(i);
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
    this.browser.append(this.panel); // out of the rows that are replaced
    fill(this.table, el("thead", {}, el("tr", {}, heads.map(([by, text]) => this.head(by, text)))),
      el("tbody", {}, rows.map((i) => this.line(i))));
    this.placePanel();
    for (const [step, button] of this.moves) {
      button.disabled = step < 0 ? this.first === 0 : this.first + PER_LIST >= this.rows.length;
    }
  }

  /** Whether a column has more than one value. */
  listed(by) {
    return !["source", "stop"].includes(by) || this.names[by].length > 1;
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

  /** Return a row, which opens wherever it is clicked; its button is for the keyboard. */
  line(i) {
    const { index } = this;
    const mark = el("span", { class: "mark" });
    mark.style.background = colour(index.run[i]);
    const asked = index.asked[index.prompt[i]];
    const name = index.names.prompt[index.prompt[i]];
    const cells = [
      el("td", {}, this.names.run.length > 1 ? mark : null, el("button", { type: "button" }, index.names.when[index.when[i]])),
      el("td", { class: "cut of-prompt" }, asked && asked !== name ? `${name}: ${asked}` : name),
      this.listed("source") ? el("td", { class: "cut of-source" }, this.names.source[index.source[i]]) : null,
      el("td", {}, shown(index.reward[i])), el("td", { class: "of-length" }, shown(index.length[i])),
      this.listed("stop") ? el("td", { class: "of-stop" }, index.names.stop[index.stop[i]]) : null,
      el("td", { class: "cut of-text" }, index.excerpts[i])];
    return el("tr", { "data-row": String(i), class: i === this.chosen ? "chosen" : null, onclick: () => this.toggle(i) },
      cells);
  }

  /** Open the row above or below the one whose button has the focus. */
  async move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const row = event.target.closest("[data-row]");
    if (!step || !row) return;
    event.preventDefault();
    const i = this.rows[this.rows.indexOf(Number(row.dataset.row)) + step];
    if (i === undefined) return;
    const at = this.rows.indexOf(i);
    if (at < this.first || at >= this.first + PER_LIST) this.show(this.first + step * PER_LIST);
    await this.open(i);
    this.lineOf(i)?.querySelector("button").focus();
  }

  /** Scroll the list alone to a row. */
  reveal(i) {
    const line = this.lineOf(i);
    if (line) this.table.parentElement.scrollTop = line.offsetTop - this.table.parentElement.clientHeight / 3;
  }

  lineOf(i) {
    return this.table.querySelector(`[data-row="${i}"]`);
  }

  /** Open a row; on a narrow page, where its details unfold below it, a second click folds them. */
  async toggle(i) {
    if (!getSelection().isCollapsed) return; // its text is selected
    if (i !== this.chosen || !NARROW.matches) {
      await this.open(i);
      return;
    }
    this.chosen = null;
    this.lineOf(i).classList.remove("chosen");
    this.placePanel();
  }

  async open(i, view = null) {
    this.table.querySelector("tr.chosen")?.classList.remove("chosen");
    this.chosen = i;
    this.lineOf(i)?.classList.add("chosen");
    await this.details.show(i, view);
    this.placePanel();
  }

  /** Put the details beside the list, or, on a narrow page, below the row that is open. */
  placePanel() {
    const line = this.chosen === null ? null : this.lineOf(this.chosen);
    const inside = this.panel.closest("tr.unfolded");
    if (!NARROW.matches) this.browser.append(this.panel);
    else if (line && line.nextSibling !== inside) line.after(this.unfolded());
    else if (!line) this.browser.append(this.panel);
    if (inside && !inside.contains(this.panel)) inside.remove();
    this.panel.hidden = NARROW.matches && !line;
  }

  /** Return a row that holds the details, as wide as the columns that are shown. */
  unfolded() {
    const columns = [...this.table.tHead.rows[0].cells].filter((cell) => cell.offsetParent !== null).length;
    return el("tr", { class: "unfolded" }, el("td", { colspan: columns }, this.panel));
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
  const saved = [...list(row.messages), ...samplesOf(row).flatMap((sample) => list(sample.conversation))];
  const texts = [...saved.map((message) => message?.content), row.text, row.error, row.prompt, row.agent?.output];
  return texts.some((x) => x !== undefined && visible(x).toLowerCase().includes(wanted));
}
