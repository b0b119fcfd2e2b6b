// One rollout: its tokens with a colour for a number of each, or its messages; tool calls and results are folded.

const TITLES = { logps: "log-prob", ratio: "ratio, trainer to engine", entropy: "entropy", advantages: "advantage",
  values: "value of the critic", mask: "mask", trainer_logps: "log-prob of the trainer",
  versions: "version of the weights" };
const MAX_TOKENS = 20000;

/** Return the names of a row's lists that have a number for each token. */
function perToken(row) {
  const size = list(row.tokens).length;
  const names = Object.keys(row).filter((name) => name !== "tokens" && Array.isArray(row[name])
    && row[name].length === size && size > 0 && row[name].every((x) => x === null || typeof x !== "object"));
  const rank = (name) => (name in TITLES ? Object.keys(TITLES).indexOf(name) : 99);
  return names.sort((a, b) => rank(a) - rank(b));
}

/** Add to a row how much likelier each token is to the trainer than it was to the engine, where both are known. */
function withRatio(row) {
  if (list(row.trainer_logps).length !== list(row.logps).length || list(row.logps).length === 0) return row;
  return { ...row, ratio: row.trainer_logps.map((x, i) => Math.exp(number(x) - number(row.logps[i]))) };
}

const RED = "225, 29, 72";
const ORANGE = "232, 113, 10";
const GREEN = "18, 161, 80";
const OWN = "rgba(59, 130, 246, 0.35)";

/** Return whether the policy chose a token; of a row without a mask, it chose all. */
function isOwn(row, i) {
  return !Array.isArray(row.mask) || Boolean(row.mask[i]);
}

/**
 * Return the colours of a number of each token: `colour(x)`, null for none; and the `stops` of the bar that explains
 * them, from the lowest value to the highest.
 */
function scale(row, name) {
  const values = row[name].map(number).filter((x, i) => x !== null && Number.isFinite(x) && isOwn(row, i));
  const most = (of, least) => values.reduce((a, x) => Math.max(a, Number.isFinite(of(x)) ? of(x) : 0), least);
  const stops = (at) => [0, 1, 2, 3, 4, 5, 6, 7, 8].map((n) => at(n / 8));
  if (name === "logps" || name === "trainer_logps") {
    const strength = (x) => 0.75 * Math.sqrt(Math.min(1, -x / 5));
    return { colour: (x) => (x < 0 ? `rgba(${RED}, ${strength(x)})` : null), stops: stops((share) => 5 * share - 5),
      texts: ["−5 and less", "", "0"] };
  }
  if (name === "ratio") {
    const far = most((x) => Math.abs(Math.log(x)), 0.01);
    const strength = (x) => 0.7 * Math.min(1, Math.abs(Math.log(x)) / far);
    return { colour: (x) => (x === 1 ? null : `rgba(${x < 1 ? RED : ORANGE}, ${strength(x)})`),
      stops: stops((share) => Math.exp(far * (2 * share - 1))), texts: [shown(Math.exp(-far)), "1", shown(Math.exp(far))] };
  }
  const high = most(Math.abs, 0) || 1;
  const low = values.some((x) => x < 0) ? -high : 0;
  const above = name === "advantages" ? GREEN : ORANGE;
  return { colour: (x) => (x ? `rgba(${x < 0 ? RED : above}, ${0.7 * Math.min(1, Math.abs(x) / high)})` : null),
    stops: stops((share) => low + share * (high - low)), texts: [shown(low), low < 0 ? "0" : "", shown(high)] };
}

/** Return the bar that explains the colours of tokens. */
function colourBar(row, name) {
  if (name === "mask") {
    const mark = el("span", { class: "mark" });
    mark.style.background = OWN;
    return el("p", { class: "muted" }, mark, "chosen by the policy");
  }
  const { colour: paint, stops, texts } = scale(row, name);
  const bar = el("span", { class: "gradient" });
  bar.style.background = `linear-gradient(to right, ${stops.map((x) => paint(x) ?? "transparent").join(", ")})`;
  return el("div", { class: "colours" }, bar, el("span", { class: "ends muted" }, texts.map((text) => el("span", {}, text))));
}

/** Return a function from a token's index to its colour, null for none. */
function painter(row, name) {
  if (name === "mask") return (i) => (isOwn(row, i) ? OWN : null);
  const { colour: paint } = scale(row, name);
  return (i) => {
    const x = number(row[name][i]);
    return isOwn(row, i) && x !== null && Number.isFinite(x) ? paint(x) : null;
  };
}

/** Return a row's spans [role, start, end]: what it shares with an earlier sample, and its turns, or all as one. */
function spans(row) {
  const size = row.tokens.length;
  const turns = list(row.turns);
  const isValid = turns.every((t) => Array.isArray(t) && Number.isInteger(t[1]) && Number.isInteger(t[2]));
  const all = isValid && turns.length > 0 && turns.at(-1)[2] === size ? turns : [["conversation", 0, size]];
  const shared = Math.min(forkOf(row)?.[1] ?? 0, size);
  return shared === 0 ? all : [["shared", 0, shared], ...all.filter(([, , end]) => end > shared)
    .map(([role, start, end]) => [role, Math.max(start, shared), end])];
}

const CALLS = /<tool_call>[\s\S]*?(?:<\/tool_call>|$)|\[TOOL_CALLS\][\s\S]*|<\|python_tag\|>[\s\S]*/g;
const NAMED = /"name"\s*:\s*"([^"]{1,60})"/;

/** Return a tool call as an element that is folded; its text is read for the tool's name. */
function call(text, ...content) {
  const name = NAMED.exec(text)?.[1] ?? "a tool";
  return el("details", { class: "call" }, el("summary", {}, `calls ${name}`), el("div", { class: "text" }, content));
}

/** Return a text as pieces, of which tool calls are folded. */
function foldedText(text) {
  const pieces = [];
  let end = 0;
  for (const match of text.matchAll(CALLS)) {
    pieces.push(text.slice(end, match.index), call(match[0], match[0]));
    end = match.index + match[0].length;
  }
  return [...pieces, text.slice(end)];
}

/** Return the elements of tokens, those of each tool call in one that is folded. */
function foldedTokens(elements, texts) {
  const ends = [];
  texts.reduce((sum, text, i) => (ends[i] = sum + text.length), 0);
  const pieces = [];
  let at = 0;
  for (const match of texts.join("").matchAll(CALLS)) {
    const first = ends.findIndex((end) => end > match.index);
    const after = ends.findIndex((end) => end >= match.index + match[0].length) + 1;
    pieces.push(...elements.slice(at, first), call(match[0], elements.slice(first, after)));
    at = after;
  }
  return [...pieces, ...elements.slice(at)];
}

function tokenText(row, texts, i) {
  return texts[String(row.tokens[i])] ?? `⟨${row.tokens[i]}⟩`;
}

/** Return the numbers of a token as text; those that only the policy's own tokens have are left out of others. */
function numbersOf(row, i) {
  const title = `token ${i}, id ${row.tokens[i]}`;
  if (i < (forkOf(row)?.[1] ?? 0)) return `${title}: shared with ${sampleName(forkOf(row)[0])}`;
  if (!isOwn(row, i)) return `${title}: not chosen by the policy`;
  return `${title}: ${perToken(row).map((name) => `${TITLES[name] || name} ${shown(row[name][i])}`).join(", ")}`;
}

function tokens(row, texts, name) {
  const paint = name ? painter(row, name) : () => null;
  const readout = el("p", { class: "readout", "aria-live": "polite" }, "Point at a token for its numbers.");
  const turns = spans(row).map(([role, start, end]) => {
    const elements = [];
    for (let i = start; i < Math.min(end, MAX_TOKENS); i += 1) {
      const span = el("span", { "data-token": String(i) }, tokenText(row, texts, i));
      const background = paint(i);
      if (background) span.style.background = background;
      elements.push(span);
    }
    const words = elements.map((_, i) => tokenText(row, texts, start + i));
    const content = role === "assistant" ? foldedTokens(elements, words) : elements;
    return turn(role, `${end - start} tokens`, el("div", { class: "text", tabindex: "0" }, content));
  });
  const show = (event) => {
    const at = event.target.closest?.("[data-token]")?.getAttribute("data-token");
    if (at !== null && at !== undefined) fill(readout, numbersOf(row, Number(at)));
  };
  const size = row.tokens.length;
  const cut = size > MAX_TOKENS ? el("p", {}, `The first ${MAX_TOKENS} of ${size} tokens.`) : null;
  const box = el("div", { class: "tokens", onmouseover: show, onclick: show }, turns);
  return [name ? colourBar(row, name) : null, readout, box, cut];
}

/** Return a turn; those of tools are folded. */
function turn(role, note, ...content) {
  const head = [el("b", {}, role), " ", el("span", { class: "muted" }, note)];
  if (role === "tool" || role === "shared") return el("details", { class: "turn tool" }, el("summary", {}, head), content);
  return el("div", { class: "turn" }, el("p", { class: "role" }, head), content);
}

/** Return a picture of a row's messages; the name of one that the page does not have. */
function picture(name, row) {
  const src = (row.pictures || {})[name];
  return src ? el("img", { class: "picture", src, alt: "picture" }) : el("span", { class: "muted" }, `[picture ${visible(name)}]`);
}

/** Return the contents of a message: texts and pictures, of typed parts, or one text. */
function contentsOf(saved, row) {
  if (!Array.isArray(saved)) return [typeof saved === "string" ? saved : JSON.stringify(saved ?? "", null, 2)];
  return saved.map((part) => {
    if (part && part.type === "image") return picture(part.image, row);
    return part && typeof part.text === "string" ? part.text : JSON.stringify(part);
  });
}

/** Return the pictures of a row's messages, to be shown beside its tokens. */
function picturesOf(row) {
  const parts = [...list(row.messages), ...list(row.conversation)].flatMap((message) => list(message && message.content));
  const shown = parts.filter((part) => part && part.type === "image").map((part) => picture(part.image, row));
  return shown.length > 0 ? el("div", { class: "pictures" }, shown) : null;
}

function messages(row) {
  const all = [...list(row.messages), ...list(row.conversation)].filter((m) => m && typeof m === "object");
  if (!Array.isArray(row.conversation)) all.push({ role: "assistant", content: row.text });
  const asked = row.agent ? list(row.messages) : [];
  return all.map((message) => {
    const contents = contentsOf(message.content, row);
    const length = contents.reduce((sum, part) => sum + (typeof part === "string" ? part.length : 0), 0);
    const text = contents.map((part) => (message.role === "assistant" && typeof part === "string" ? foldedText(part) : part));
    const folded = list(message.tool_calls).map((made) => call(JSON.stringify(made), JSON.stringify(made, null, 2)));
    const role = visible(message.role);
    return turn(asked.includes(message) ? `task (${role})` : role, `${length} characters`, el("div", { class: "text" }, text), folded);
  });
}

/** Show a rollout's tokens or messages, with the controls that choose. */
function conversation(row, texts) {
  const body = el("div", {});
  const can = list(row.tokens).length > 0;
  const views = [["messages", "messages"], ...(can ? [["", "tokens, plain"]] : [])];
  for (const name of perToken(row)) views.push([name, `tokens by ${TITLES[name] || name}`]);
  const options = views.map(([value, text]) => el("option", { value }, text));
  const choice = el("select", { class: "view" }, options);
  const exists = (wanted) => views.some(([value]) => value === wanted);
  choice.value = [address.get("show"), "logps", views[2]?.[0]].find(exists) ?? "messages";
  const show = () => fill(body, choice.value === "messages" ? messages(row)
    : [picturesOf(row), tokens(row, texts, choice.value)]);
  choice.addEventListener("change", () => {
    address.set({ show: choice.value });
    show();
  });
  show();
  return el("div", { class: "conversation" }, el("p", {}, el("label", {}, "show ", choice)), body);
}
