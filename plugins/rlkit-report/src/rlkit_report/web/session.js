// An agent's session: its samples as a tree along their tokens, what is shared and trained on where, and the agent's log.

/** Return the samples of a rollout: its own, and those of an agent's further conversations. */
function samplesOf(row) {
  return [row, ...list(row.branches).filter((branch) => branch && typeof branch === "object")];
}

/** Return where a sample leaves an earlier one, as [sample, tokens]; null if they share no turn. */
function forkOf(sample) {
  const [of, tokens] = list(sample.fork);
  return Number.isInteger(of) && Number.isInteger(tokens) && of >= 0 && tokens > 0 ? [of, tokens] : null;
}

function sampleName(i) {
  return i === 0 ? "the main conversation" : `branch ${i}`;
}

/** Return indices and depths of samples, each sample before those that leave it. */
function asTree(samples) {
  const parent = (i) => { const of = forkOf(samples[i])?.[0]; return of < i ? of : null; };
  const below = (of, depth) => samples.flatMap((_, i) => (parent(i) === of ? [[i, depth], ...below(i, depth + 1)] : []));
  return below(null, 0);
}

/** Return a sample's tokens as a line: those it shares are dashed, those it is trained on are coloured. */
function tokenLine(sample, longest) {
  const line = el("span", { class: "token-line" });
  const shared = forkOf(sample)?.[1] ?? 0;
  for (const [role, start, end] of spans({ ...sample, tokens: list(sample.tokens) })) {
    const kind = end <= shared ? "shared" : role === "assistant" ? "trained" : "read";
    const part = el("span", { class: kind });
    part.style.left = `${(100 * start) / longest}%`;
    part.style.width = `${(100 * (end - start)) / longest}%`;
    add(line, part);
  }
  return line;
}

function sampleFacts(sample) {
  const fork = forkOf(sample);
  const size = list(sample.tokens).length;
  const trained = list(sample.mask).filter(Boolean).length;
  const positions = list(sample.positions).filter(Number.isInteger).map((x) => x + 1);
  return [
    fork ? `leaves ${sampleName(fork[0])} after ${fork[1]} shared tokens` : null,
    `${size - trained - (fork?.[1] ?? 0)} tokens read`, `${trained} trained on`,
    positions.length > 0 ? `turn${positions.length === 1 ? "" : "s"} ${positions.join(", ")} of the session` : null,
    sample.stop === "stop" ? null : `stopped by ${visible(sample.stop)}`,
  ].filter((fact) => fact).join(" · ");
}

/** Return what an agent wrote, and how it ended. */
function agentLog(agent) {
  if (!agent || typeof agent !== "object") return null;
  const failed = agent.status !== 0;
  const head = el("span", { class: failed ? "notes" : null }, `the agent ended with status ${visible(agent.status)}`);
  if (!agent.output) return el("p", {}, head, ", and wrote nothing");
  return el("details", { class: "log", open: failed }, el("summary", {}, head, ", and wrote:"), el("pre", {}, agent.output));
}

/** Show an agent's session; a click on a sample shows its conversation. */
function session(row, texts) {
  const samples = samplesOf(row);
  const body = el("div", {});
  const longest = Math.max(1, ...samples.map((sample) => list(sample.tokens).length));
  const buttons = asTree(samples).map(([i, depth]) => {
    const label = el("span", {}, depth > 0 ? "└ " : null, el("b", {}, sampleName(i)), " ",
      el("span", { class: "muted" }, sampleFacts(samples[i])));
    label.style.paddingLeft = `${12 * Math.min(depth, 8)}px`;
    return el("button", { type: "button", "data-sample": String(i), onclick: () => choose(i) }, label,
      tokenLine(samples[i], longest));
  });
  const choose = (chosen) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.sample === String(chosen)));
    const branch = { ...withRatio(samples[chosen]), messages: [], pictures: row.pictures };
    fill(body, conversation(chosen === 0 ? row : branch, texts));
  };
  choose(0);
  const key = [["trained", "trained on here"], ["read", "read"], ["shared", "shared with an earlier one, trained on there"]]
    .map(([kind, text]) => el("li", {}, el("span", { class: `mark ${kind}` }), text));
  const tree = samples.length === 1 ? null
    : [el("ul", { class: "key" }, key), el("div", { class: "session" }, buttons)];
  return [agentLog(row.agent), tree, body];
}
