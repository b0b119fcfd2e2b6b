"""The page of `rlkit report` in a headless Chromium: what is drawn and shown as text, and that nothing is fetched."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkit.cli.main import main
from rlkit.cli.views.runs import RunFiles
from rlkit.cli.views.server import Pages, ReportServer
from rlkit.run.folder import RunFolder
from rlkit.run.rows import as_row
from tests.flow.browser import Tab, chromium
from tests.unit.cli.test_report import HOSTILE, trajectory, write_run

pytestmark = pytest.mark.slow

SHOWN = HOSTILE.replace("\x1b", "\\x1b").replace("\x00", "\\x00")
SHOWN = SHOWN.replace("\u2028", "\\u2028").replace("\u202e", "\\u202e").replace("\ud800", "\\ud800")
"""What a reader sees of the text: each control code written out."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def page(tab: Tab) -> Iterator[Tab]:
    """The tab, whose console must be empty at the end, and which must have fetched nothing."""
    tab.console.clear()
    tab.requests.clear()
    tab.resize(1280, 900)
    yield tab
    tab.run("1")  # what is still on its way is read
    assert tab.console == []
    assert [url for url in tab.requests if not url.startswith(("file:", "about:", "http://127.0.0.1:"))] == []


def written(*runs: Path, out: Path) -> Path:
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    return out


def click(page: Tab, selector: str) -> None:
    page.run(f"document.querySelector({json.dumps(selector)}).click()")


def text(page: Tab, selector: str) -> str:
    return str(page.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def painted(page: Tab, selector: str) -> int:
    """Return how many pixels of a canvas are drawn."""
    script = f"""(() => {{ const canvas = document.querySelector({json.dumps(selector + " canvas")});
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return data.filter((x, i) => i % 4 === 3 && x > 0).length; }})()"""
    return int(page.run(script))


def test_curves_and_the_timeline_are_drawn(page: Tab, tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", steps=5)
    (one / "profile").mkdir()
    (one / "profile" / "step-00003.trace.json.gz").write_bytes(b"x" * 2_500_000)
    (one / "profile" / "step-00003.txt").write_text("aten::mm")
    page.open(written(one, two, out=tmp_path / "report.html"))
    assert text(page, "#legend") == "onetwo"
    assert text(page, '[data-metric="reward/mean"] .readout') == "one 0.3 at step 3 · two 0.5 at step 5"
    expected = "one 0.75 (0.1 to 0.5) at step 3 · two 0.75 (0.1 to 0.5) at step 5"
    assert text(page, '[data-metric="validation/accuracy"] .readout') == expected
    assert painted(page, '[data-metric="reward/mean"]') > 500
    assert "step 3: sample 2 s, update 1 s" in text(page, '[data-timeline="0"] .readout')
    assert painted(page, '[data-timeline="0"]') > 2000
    assert "sample 6 s (67%)update 3 s (33%)" in text(page, "#timeline")
    assert "python" in text(page, "#about")
    assert "profile/step-00003.trace.json.gz (2.5 MB)profile/step-00003.txt (1 kB)" in text(page, "#about .profile")
    click(page, "details.group:last-of-type summary")
    page.wait("document.querySelector('details.group:last-of-type .readout') !== null")


def test_metrics_of_any_size_are_drawn(page: Tab, tmp_path: Path) -> None:
    """Of values that differ in the last digit, an axis has ticks all the same."""
    run = write_run(tmp_path / "run", steps=0)
    metrics = {"a": [0.99999994, 1.0], "b": [1e308, -1e308], "c": [0, 0], "d": [1e-320, 0], "e": [float("nan"), 1]}
    rows = [{"step": step, **{name: both[step - 1] for name, both in metrics.items()}} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.open(written(run, out=tmp_path / "report.html"))
    page.run("document.querySelectorAll('details.group').forEach((group) => { group.open = true; })")
    page.wait("document.querySelectorAll('[data-metric] canvas').length >= 5")
    assert painted(page, '[data-metric="a"]') > 300


def test_rollouts_are_filtered_sorted_searched_and_opened(page: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    RunFolder(run, "").dump("step-00002", [trajectory("rare", 7, 0.25, "a needle"), trajectory("rare", 7, 0.75)])
    page.open(written(run, out=tmp_path / "report.html"))
    assert text(page, "#count").startswith("10 of 10 rollouts")
    click(page, '[data-sort="reward"]')
    assert "0 + 1" in text(page, "tbody tr")
    page.run("""(() => { const box = document.querySelector('[data-filter="prompt"]');
        box.value = "rare"; box.dispatchEvent(new Event("input")); })()""")
    assert text(page, "#count").startswith("2 of 10 rollouts")
    page.run("""(() => { const box = document.querySelector('[data-filter="most"]');
        box.value = "0.25"; box.dispatchEvent(new Event("input")); })()""")
    assert text(page, "#count").startswith("1 of 10 rollouts")
    page.run("""(() => { const box = document.querySelector('[data-filter="most"]');
        box.value = ""; box.dispatchEvent(new Event("input")); })()""")
    page.run("""(() => { const box = document.getElementById("search");
        box.value = "NEEDLE"; box.dispatchEvent(new Event("change")); })()""")
    page.wait("document.getElementById('count').textContent.startsWith('1 of 10')")
    click(page, "tbody tr button")
    page.wait("document.querySelectorAll('[data-token]').length === 4")
    assert text(page, "[data-token='0']") == "<|im_start|>"
    colours = page.run("[...document.querySelectorAll('[data-token]')].map((span) => span.style.background)")
    assert colours[:2] == ["", ""]
    assert colours[2:] == ["rgba(225, 29, 72, 0.235)", "rgba(225, 29, 72, 0.5)"]  # 0.75 sqrt(x / 5), in 255ths
    click(page, '[data-view="group"]')
    page.wait("document.querySelectorAll('.side .card').length === 2")
    click(page, '[data-view="prompt"]')
    page.wait("document.querySelectorAll('.over .card').length === 2")


def test_tokens_are_coloured_by_ratio_and_entropy(page: Tab, tmp_path: Path) -> None:
    """Ratios exp(0.1) and exp(-0.2): the one farther from 1 is full, which is 0.7, the other half of it."""
    run = write_run(tmp_path / "run", steps=0)
    row = trajectory("1", 0, 1.0)  # with log-probs of -0.5 and -2.25 in its last two tokens
    row.credit |= {"trainer_logps": [0.0, 0.0, -0.4, -2.45], "entropy": [0.0, 0.0, 1.5, 0.75]}
    RunFolder(run, "").dump("step-00001", [row])
    colours = "[...document.querySelectorAll('[data-token]')].map((span) => span.style.background)"
    path = written(run, out=tmp_path / "report.html")
    page.open(path, "#row=0/step 1/0&show=ratio")
    assert page.run(colours) == ["", "", "rgba(232, 113, 10, 0.35)", "rgba(225, 29, 72, 0.7)"]
    assert text(page, ".conversation .muted") == "orange above 1, red below; full at 1.221 and 0.8187"
    page.run("document.querySelectorAll('[data-token]')[3].click()")
    assert "ratio, trainer to engine 0.8187, entropy 0.75" in text(page, ".conversation .readout")
    page.open(path, "#row=0/step 1/0&show=entropy")
    assert page.run(colours) == ["", "", "rgba(232, 113, 10, 0.698)", "rgba(232, 113, 10, 0.35)"]
    assert text(page, ".conversation .muted") == "full at 1.5"


def test_rows_of_any_shape_are_shown(page: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=0)
    names = ("prompt", "messages", "conversation", "tokens", "mask", "logps", "turns", "text", "reward", "components",
             "counts", "trainer_logps", "entropy", "meta", "source", "group")  # fmt: skip
    values = (None, float("nan"), [None, {"a": 1}], {"b": [2]}, "text", [1e400, -1, 0, 3], True, [])
    rows = [{**as_row(trajectory("1", 0, 1.0)), name: value} for name in names for value in values]
    lines = "".join(json.dumps(row) + "\n" for row in [{}, *rows])
    (run / "rollouts" / "step-00001.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    path = written(run, out=tmp_path / "report.html")
    page.open(path)
    opened = page.run("""(async () => {
        const panel = document.getElementById("details");
        const shown = async (selector, button) => {
            panel.replaceChildren();
            button.click();
            while (!panel.querySelector(selector)) await new Promise((resolve) => { setTimeout(resolve, 1); });
        };
        let opened = 0;
        for (let more = true; more;) {
            for (let i = 0; i < document.querySelectorAll("tbody tr").length; i += 1, opened += 1) {
                await shown(".conversation", document.querySelectorAll("tbody tr button")[i]);
                const [one, group, prompt] = panel.querySelectorAll("[data-view]");
                const select = panel.querySelector(".view");
                for (const { value } of select.options) {
                    select.value = value;
                    select.dispatchEvent(new Event("change"));
                }
                await shown(".side .card", group);
                await shown(".over .card", prompt);
            }
            const later = document.querySelectorAll("#list > .controls button")[1];
            more = !later.disabled;
            later.click();
        }
        return opened;
    })()""")
    assert opened == len(rows) + 1


def test_texts_of_models_are_shown_as_texts(page: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, text=HOSTILE, recipe="model:\n  path: tiny\n# </script><b>bold</b>\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, f"reward/{HOSTILE}": 1.0}) + "\n")
    page.open(written(run, out=tmp_path / "report.html"), "#row=0/step 1/0&view=group")
    scripts = "document.querySelectorAll('script').length"
    before = page.run(scripts)
    assert text(page, ".side .card .text") == SHOWN
    assert "</script><b>bold</b>" in text(page, "#about pre")
    click(page, '[data-view="one"]')
    page.wait("document.querySelector('.view') !== null")
    page.run("""(() => { const view = document.querySelector(".view");
        view.value = "messages"; view.dispatchEvent(new Event("change")); })()""")
    assert SHOWN in text(page, ".conversation")
    assert page.run(scripts) == before
    assert page.run("document.querySelectorAll('img, iframe, link').length") == 0
    blocked = page.run("fetch('https://example.org/').then(() => 'sent', () => 'blocked')")
    assert blocked == "blocked"
    page.run("1")
    assert all("Content Security Policy" in line for line in page.console)
    page.console.clear()  # the browser's own words on the request that this test made
    page.requests.clear()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_it_fits_wide_and_narrow_views_in_both_themes(page: Tab, tmp_path: Path, width: int, dark: bool) -> None:
    page.resize(width, 800, dark)
    page.open(written(write_run(tmp_path / "run"), out=tmp_path / "report.html"), "#row=0/step 1/0&view=one")
    assert page.run("document.documentElement.scrollWidth") <= width
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    columns = page.run("getComputedStyle(document.querySelector('.browser')).gridTemplateColumns.split(' ').length")
    assert columns == (1 if width < 900 else 2)
    count, low, high = page.run("""(() => { const canvas = document.querySelector('[data-metric="reward/mean"] canvas');
        const { data } = canvas.getContext("2d").getImageData(0, 0, 56, canvas.height);  // the axis of values
        const ticks = data.filter((_, i) => i % 4 === 0 && data[i + 3] > 128);
        return [ticks.length, Math.min(...ticks), Math.max(...ticks)]; })()""")
    assert count > 50
    assert (low > 100) if dark else (high < 160)


def test_a_served_page_is_renewed_and_what_is_looked_at_stays(page: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    with ReportServer(Pages(lambda: [RunFiles(run, 1e9)]), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        looked_at = "#row=0/step+2/1&view=group&sort=-reward&when=step+2&reward=0.5&open=overview/time&smoothing=0.9"
        page.open(server.url, looked_at)
        page.run("document.getElementById('rollouts').scrollIntoView()")
        scroll = page.run("scrollY")
        assert text(page, "#count").startswith("2 of 8 rollouts")
        RunFolder(run, "").dump("step-00001", [trajectory("0 + 1", 0, 1.0)] * 9)  # more rows before the one looked at
        RunFolder(run, "").dump("step-00003", [trajectory("new", 0, 1.0)])
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "reward/mean": 0.75}) + "\n")
        page.wait("document.querySelector('[data-metric=\"reward/mean\"]')?.textContent.includes('0.75 at step 3')")
        page.wait("document.body.dataset.ready === 'true'")
        assert text(page, "#count").startswith("2 of 14 rollouts")
        assert page.run("location.hash") == looked_at
        assert page.run("scrollY") == scroll
        assert text(page, "tr.chosen td:nth-child(2)") == "0 + 2: What is 0 + 2?"
        assert page.run("document.querySelectorAll('.side .card').length") == 2
        assert page.run("document.querySelector('[data-metric=\"time/sample\"] canvas') !== null")
        assert page.run("document.querySelector('input[type=range]').value") == "0.9"
        server.shutdown()
    page.wait("document.getElementById('served').textContent.startsWith('The server of this page does not answer')")
    page.call("Page.navigate", url="about:blank")
    page.run("1")
    assert all("ERR_CONNECTION_REFUSED" in line for line in page.console)
    page.console.clear()


def test_ten_thousand_rollouts_open_at_once(page: Tab, tmp_path: Path) -> None:
    """Only the index is read: pages are decompressed when they are looked at."""
    run = write_run(tmp_path / "run", steps=0)
    folder = RunFolder(run, "")
    for step in range(1, 21):
        rows = [trajectory(str(i // 8), i // 8, i % 2 * 1.0, f"answer {i} " * 20) for i in range(500)]
        for row in rows:
            row.tokens, row.mask, row.logps = row.tokens * 50, row.mask * 50, row.logps * 50
        folder.dump(f"step-{step:05d}", rows)
    page.open(written(run, out=tmp_path / "report.html"))
    assert text(page, "#count").startswith("10000 of 10000 rollouts")
    assert page.run("document.querySelectorAll('tbody tr').length") == 50
    click(page, "tbody tr button")
    page.wait("document.querySelectorAll('[data-token]').length === 200")
