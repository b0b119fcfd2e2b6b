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

/** Return a function from a token's place to its colour, and what the colours mean. */
function scale(row, name) {
  const values = (row[name] || []).map(number);
  const own = (i) => !Array.isArray(row.mask) || Boolean(row.mask[i]);
  if (name === "mask") {
    return [(i) => (values[i] ? "rgba(59, 130, 246, 0.35)" : null), "blue: chosen by the policy"];
  }
  if (name === "logps" || name === "trainer_logps") {
    const strength = (x) => 0.75 * Math.sqrt(Math.min(1, -x / 5));
    return [(i) => (own(i) && values[i] < 0 ? `rgba(225, 29, 72, ${strength(values[i])})` : null),
      "red: unlikely; full at a log-prob of −5 and below"];
  }
  if (name === "ratio") {
    const far = values.map((x) => Math.abs(Math.log(x)));
    const most = far.reduce((a, x, i) => (own(i) && Number.isFinite(x) ? Math.max(a, x) : a), 0.01);
    return [(i) => (own(i) && far[i] > 0
      ? `rgba(${values[i] < 1 ? "225, 29, 72" : "232, 113, 10"}, ${0.7 * Math.min(1, far[i] / most)})` : null),
      `orange above 1, red below; full at ${shown(Math.exp(most))} and ${shown(Math.exp(-most))}`];
  }
  const known = values.filter((x, i) => x !== null && Number.isFinite(x) && own(i));
  const most = known.reduce((a, x) => Math.max(a, Math.abs(x)), 0) || 1;
  const tone = (x) => (x < 0 ? "225, 29, 72" : name === "advantages" ? "18, 161, 80" : "232, 113, 10");
  return [(i) => (own(i) && values[i] && Number.isFinite(values[i])
    ? `rgba(${tone(values[i])}, ${0.7 * Math.abs(values[i]) / most})` : null),
    known.some((x) => x < 0) ? `full at ${shown(most)} and, in red, at −${shown(most)}` : `full at ${shown(most)}`];
}

/** Return a row's spans [role, start, end]: its turns, or one span of everything. */
function spans(row) {
  const size = row.tokens.length;
  const given = list(row.turns);
  const whole = given.every((t) => Array.isArray(t) && Number.isInteger(t[1]) && Number.isInteger(t[2]));
  return whole && given.length > 0 && given.at(-1)[2] === size ? given : [["conversation", 0, size]];
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
  let last = 0;
  for (const found of text.matchAll(CALLS)) {
    pieces.push(text.slice(last, found.index), call(found[0], found[0]));
    last = found.index + found[0].length;
  }
  return [...pieces, text.slice(last)];
}

/** Return the elements of tokens, those of each tool call in one that is folded. */
function foldedTokens(made, texts) {
  const ends = [];
  texts.reduce((sum, text, i) => (ends[i] = sum + text.length), 0);
  const pieces = [];
  let at = 0;
  for (const found of texts.join("").matchAll(CALLS)) {
    const first = ends.findIndex((end) => end > found.index);
    const after = ends.findIndex((end) => end >= found.index + found[0].length) + 1;
    pieces.push(...made.slice(at, first), call(found[0], made.slice(first, after)));
    at = after;
  }
  return [...pieces, ...made.slice(at)];
}

function tokenText(row, texts, i) {
  const known = texts[String(row.tokens[i])];
  return known === undefined ? `⟨${row.tokens[i]}⟩` : known;
}

function tokens(row, texts, name) {
  const [paint, meaning] = name ? scale(row, name) : [() => null, ""];
  const names = perToken(row);
  const readout = el("p", { class: "readout", "aria-live": "polite" }, "Point at a token for its numbers.");
  const turns = spans(row).map(([role, start, end]) => {
    const made = [];
    for (let i = start; i < Math.min(end, MAX_TOKENS); i += 1) {
      const span = el("span", { "data-token": String(i) }, tokenText(row, texts, i));
      const background = paint(i);
      if (background) span.style.background = background;
      made.push(span);
    }
    const words = made.map((_, i) => tokenText(row, texts, start + i));
    const content = role === "assistant" ? foldedTokens(made, words) : made;
    return turn(role, `${end - start} tokens`, el("div", { class: "text", tabindex: "0" }, content));
  });
  const show = (event) => {
    const at = event.target.closest?.("[data-token]")?.getAttribute("data-token");
    if (at === null || at === undefined) return;
    const numbers = names.map((one) => `${TITLES[one] || one} ${shown(row[one][Number(at)])}`);
    fill(readout, `token ${at}, id ${row.tokens[Number(at)]}: ${numbers.join(", ")}`);
  };
  const size = row.tokens.length;
  const cut = size > MAX_TOKENS ? el("p", {}, `The first ${MAX_TOKENS} of ${size} tokens.`) : null;
  const box = el("div", { class: "tokens", onmouseover: show, onclick: show }, turns);
  return [el("p", { class: "muted" }, meaning), readout, box, cut];
}

/** Return a turn; those of tools are folded. */
function turn(role, note, ...content) {
  const head = [el("b", {}, role), " ", el("span", { class: "muted" }, note)];
  if (role === "tool") return el("details", { class: "turn tool" }, el("summary", {}, head), content);
  return el("div", { class: "turn" }, el("p", { class: "role" }, head), content);
}

function messages(row) {
  const all = [...list(row.messages), ...list(row.conversation)].filter((m) => m && typeof m === "object");
  if (!Array.isArray(row.conversation)) all.push({ role: "assistant", content: row.text });
  return all.map((message) => {
    const { content: given } = message;
    const content = typeof given === "string" ? given : JSON.stringify(given ?? "", null, 2);
    const text = message.role === "assistant" ? foldedText(content) : content;
    const folded = list(message.tool_calls).map((one) => call(JSON.stringify(one), JSON.stringify(one, null, 2)));
    return turn(visible(message.role), `${content.length} characters`, el("div", { class: "text" }, text), folded);
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
  const known = (wanted) => views.some(([value]) => value === wanted);
  choice.value = [address.get("show"), "logps", views[2]?.[0]].find(known) ?? "messages";
  const show = () => fill(body, choice.value === "messages" ? messages(row) : tokens(row, texts, choice.value));
  choice.addEventListener("change", () => {
    address.set({ show: choice.value });
    show();
  });
  show();
  return el("div", { class: "conversation" }, el("p", {}, el("label", {}, "show ", choice)), body);
}
