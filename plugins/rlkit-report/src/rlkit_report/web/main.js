// Reads the runs and the index, and draws; pages of rollouts are read when they are looked at.

function legend(state) {
  const items = state.runs.map((run, i) => {
    const mark = el("span", { class: "mark" });
    mark.style.background = colour(i);
    const box = el("input", { type: "checkbox", checked: state.visible[i] });
    box.addEventListener("change", () => {
      state.visible[i] = box.checked;
      const hidden = state.visible.flatMap((shown_, run) => (shown_ ? [] : [run]));
      address.set({ hidden: hidden.join(" ") || null });
      state.curves.forEach((curve) => curve.showRun());
    });
    return el("li", {}, el("label", {}, state.runs.length > 1 ? box : null, mark, state.labels[i]));
  });
  add(document.getElementById("legend"), items);
}

/** Links to a part of the page leave the address as it is. */
function links() {
  for (const link of document.querySelectorAll("nav a")) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      document.querySelector(link.getAttribute("href")).scrollIntoView();
    });
  }
}

/** Go back to where the page was before it was read again. */
function scrolled() {
  const { scroll, details } = history.state ?? {};
  if (!Number.isFinite(scroll)) return;
  document.getElementById("details").scrollTop = details;
  scrollTo(0, scroll);
  history.replaceState(null, "");
}

async function main() {
  const status = document.getElementById("status");
  if (typeof DecompressionStream === "undefined") {
    fill(status, "This report needs a browser with DecompressionStream: Chrome 80, Firefox 113, Safari 16.4 or later.");
    return;
  }
  const [runs, index] = await Promise.all([load("runs"), load("index")]);
  const hidden = (address.get("hidden") ?? "").split(" ");
  const visible = runs.map((_, i) => !hidden.includes(String(i)));
  const smoothing = Number(address.get("smoothing") ?? 0.6);
  const axis = address.get("axis") in X_AXES ? address.get("axis") : "step";
  const state = { runs, index, labels: labels(runs), visible, smoothing, axis, curves: [] };
  const part = (name) => document.getElementById(name);
  links();
  legend(state);
  headlines(part("summary"), state);
  difference(part("difference"), state);
  answers(part("answers"), state);
  curves(part("curves"), state);
  timeline(part("timeline"), state);
  state.list = new List(part("rollouts"), state, index);
  about(part("about"), state);
  await state.list.restore();
  status.hidden = true;
  scrolled();
  document.body.dataset.ready = "true";
  if (document.getElementById("version")) await watch();
}

main().catch((error) => {
  fill(document.getElementById("status"), `This report cannot be shown: ${error}`);
  throw error;
});
