// Reads the runs and the index, and draws; pages of rollouts are read when they are looked at.

function legend(state) {
  const items = state.runs.map((run, i) => {
    const mark = el("span", { class: "mark" });
    mark.style.background = colour(i);
    const box = el("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      state.visible[i] = box.checked;
      state.curves.forEach((curve) => curve.showRun());
    });
    return el("li", {}, el("label", {}, state.runs.length > 1 ? box : null, mark, state.labels[i]));
  });
  add(document.getElementById("legend"), items);
}

async function main() {
  const status = document.getElementById("status");
  if (typeof DecompressionStream === "undefined") {
    fill(status, "This report needs a browser with DecompressionStream: Chrome 80, Firefox 113, Safari 16.4 or later.");
    return;
  }
  const [runs, index] = await Promise.all([load("runs"), load("index")]);
  const state = { runs, labels: labels(runs), visible: runs.map(() => true), smoothing: 0.6, curves: [] };
  const part = (name) => document.getElementById(name);
  legend(state);
  curves(part("curves"), state);
  timeline(part("timeline"), state);
  state.list = new List(part("rollouts"), state, index);
  about(part("about"), state);
  await state.list.restore();
  status.hidden = true;
  document.body.dataset.ready = "true";
}

main().catch((error) => {
  fill(document.getElementById("status"), `This report cannot be shown: ${error}`);
  throw error;
});
