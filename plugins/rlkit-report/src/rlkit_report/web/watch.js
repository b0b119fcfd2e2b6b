// Of a page that is served: asks whether there is a newer one, and reads it once nothing is typed, chosen or selected.

const ASK_MS = 2000;
const QUIET_MS = 2500;

let touched = 0;
for (const kind of ["keydown", "pointerdown", "input", "wheel"]) {
  addEventListener(kind, () => { touched = Date.now(); }, { capture: true, passive: true });
}

/** Return the version that the server has; null if it does not answer. */
async function newest() {
  try {
    const answer = await fetch(location.pathname, { method: "HEAD", cache: "no-store" });
    return answer.ok ? answer.headers.get("etag") : null;
  } catch {
    return null;
  }
}

async function watch() {
  const version = await load("version");
  const note = el("p", { role: "status", class: "notes", id: "served", hidden: "" });
  document.querySelector("main").prepend(note);
  for (;;) {
    await new Promise((resolve) => { setTimeout(resolve, ASK_MS); });
    if (document.hidden) continue;
    const found = await newest();
    note.hidden = found !== null;
    if (found === null) fill(note, "The server of this page does not answer; what is shown is the last that it sent.");
    const busy = Date.now() - touched < QUIET_MS || !getSelection().isCollapsed;
    if (found !== null && found !== `"${version}"` && !busy) {
      address.write({ scroll: scrollY, details: document.getElementById("details").scrollTop });
      location.reload();
      return;
    }
  }
}
