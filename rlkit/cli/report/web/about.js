// What a run was made of, and how it ended.

function about(root, state) {
  state.runs.forEach((run, i) => {
    const ended = run.result.status ? `${run.result.status} after ${shown(run.result.steps)} steps` : "in progress";
    const open = state.runs.length === 1;
    const part = (title, text) => (text ? el("details", { open: title === "recipe" && open },
      el("summary", {}, title), el("pre", { tabindex: "0" }, text)) : null);
    const listed = run.notes.map((note) => el("li", {}, note));
    add(root, el("article", { class: "run" }, el("h3", {}, state.labels[i]), el("p", {}, `${run.name}: ${ended}`),
      listed.length ? el("ul", { class: "notes" }, listed) : null,
      part("recipe", run.recipe),
      part("environment", pretty(run.environment)),
      part("result", pretty(run.result))));
  });
}

function pretty(value) {
  return Object.keys(value).length > 0 ? JSON.stringify(value, null, 2) : "";
}
