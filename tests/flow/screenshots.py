"""`python -m tests.flow.screenshots`: the pictures in `rlkit/docs/report/`, of runs that it makes, in a browser."""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.flow.browser import Tab, chromium

FOLDER = Path(__file__).parents[2] / "rlkit" / "docs" / "report"
RUNS = {"grpo": "quickstart", "dpo": "quick_dpo", "lora": "quick_lora"}
SIZES = {"1280": (1280, 1300, False), "390": (390, 1300, False), "dark": (1280, 1300, True)}
"""Width, height and theme of a picture."""

ADDRESS = {"1280": "", "390": "#row=0/step 20/1", "dark": "#row=0/step 20/1"}
SCROLL = {
    "1280": "scrollTo(0, 0)",
    "390": "document.querySelector('tr.chosen').scrollIntoView()",
    "dark": "document.getElementById('rollouts').scrollIntoView()",
}


def take(tab: Tab, report: Path, name: str) -> None:
    """Write the pictures of a report."""
    for kind, (width, height, dark) in SIZES.items():
        tab.resize(width, height, dark)
        tab.open(report, ADDRESS[kind])
        tab.run(SCROLL[kind])
        tab.run("new Promise((resolve) => { setTimeout(resolve, 500); })")
        picture = tab.call("Page.captureScreenshot", format="webp", quality=70)["data"]
        (FOLDER / f"{name}-{kind}.webp").write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder) / "profile") as tab:
        for name, recipe in RUNS.items():
            rlkit, run = str(Path(sys.executable).parent / "rlkit"), f"runs/{name}"
            subprocess.run([rlkit, "fit", "--recipe", recipe, "--out", run], cwd=folder, check=True)
            subprocess.run([rlkit, "report", run], cwd=folder, check=True)
            take(tab, Path(folder) / run / "report.html", name)
