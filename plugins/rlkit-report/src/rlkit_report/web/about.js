// What a run was made of, and how it ended.

function about(root, state) {
  state.runs.forEach((run, i) => {
    const part = (title, text) => (text ? el("details", {}, el("summary", {}, title),
      el("pre", { tabindex: "0" }, text)) : null);
    add(root, el("article", { class: "run" }, el("h3", {}, state.labels[i]), el("p", {}, run.name),
      profile(run),
      part("recipe", run.recipe),
      part("environment", pretty(run.environment)),
      part("result", pretty(run.result))));
  });
}

function size(bytes) {
  return bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

/** Return the traces of single steps: their names and sizes, and how they are opened. */
function profile(run) {
  if (run.profile.length === 0) return null;
  const files = run.profile.map(({ name, bytes, text }) => el("li", {}, `${name} (${size(bytes)})`,
    text ? el("details", {}, el("summary", {}, "show"), el("pre", { tabindex: "0" }, text)) : null));
  return el("details", { class: "profile" }, el("summary", {}, `profile (${files.length} files)`),
    el("p", { class: "muted" }, "In the run's folder. Open .trace.json.gz at ui.perfetto.dev, .memory.pickle at ",
      "pytorch.org/memory_viz: both read the file in the browser, and send it nowhere."), el("ul", {}, files));
}

function pretty(value) {
  return Object.keys(value).length > 0 ? JSON.stringify(value, null, 2) : "";
}
