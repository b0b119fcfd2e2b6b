"""The page of `rlkit report` in a headless Chromium: what is drawn and shown as text, and that nothing is fetched."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlkit_report.files import RunFiles
from rlkit_report.server import Pages, ReportServer

from rlkit.cli.main import main
from rlkit.records.rows import as_row
from rlkit.run.folder import RunFolder
from rlkit.types import Fork
from tests.flow.browser import Tab, chromium
from tests.run_folders import HOSTILE, trajectory, write_run

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
    page.wait("document.querySelectorAll('[data-metric] canvas').length >= 3")
    assert page.run("[...document.querySelectorAll('[data-constant]')].map((b) => b.textContent)") == ["a 1", "c 0"]
    click(page, '[data-constant="a"]')
    assert painted(page, "dialog") > 300


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
    page.wait("document.querySelectorAll('.side .card p.muted').length === 2")
    page.wait("document.querySelector('[data-view=\"prompt\"]').getAttribute('aria-pressed') === 'true'")


def test_an_agents_session_is_a_tree_of_text_alone(page: Tab, tmp_path: Path) -> None:
    """Branch 1 leaves the main sample after 2 of its 4 tokens and is trained on the last 2; branch 2 shares nothing."""
    run = write_run(tmp_path / "run", steps=0)
    row, *branches = (trajectory("1", 0, 1.0, HOSTILE) for _ in range(3))
    for number, branch in enumerate(branches, 1):
        branch.messages = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": f"{number}"}]
        branch.span.positions = [number]
    branches[0].span.fork = Fork(0, 2)
    row.span.branches, row.span.result = branches, {"status": 3, "output": HOSTILE}
    RunFolder(run, "").dump("step-00001", [row])
    page.open(written(run, out=tmp_path / "report.html"), "#row=0/step 1/0&show=logps")
    assert "status 3" in text(page, ".log summary")
    assert text(page, ".log pre") == SHOWN
    labels = page.run("[...document.querySelectorAll('.session b')].map((label) => label.textContent)")
    assert labels == ["the main conversation", "branch 1", "branch 2"]
    facts = "leaves the main conversation after 2 shared tokens · 0 tokens read · 2 trained on · turn 2 of the session"
    assert text(page, '[data-sample="1"] .muted') == facts
    spans = (
        "[...document.querySelectorAll('[data-sample=\"1\"] .token-line span')].map((x) => [x.className, x.style.left])"
    )
    assert page.run(spans) == [["shared", "0%"], ["trained", "50%"]]
    click(page, '[data-sample="1"]')
    page.run("document.querySelector('[data-token=\"0\"]').click()")
    assert text(page, ".conversation .readout") == "token 0, id 257: shared with the main conversation"
    page.run("""(() => { const view = document.querySelector("select.view");
        view.value = "messages"; view.dispatchEvent(new Event("change")); })()""")
    contents = page.run("[...document.querySelectorAll('.conversation .text')].map((x) => x.textContent)")
    assert contents == [SHOWN, "1"]
    assert text(page, "#count").startswith("1 of 1 rollouts")
    assert text(page, ".of-length:not(th)") == "6"  # all that the policy sampled
    assert page.run("document.querySelectorAll('img, script[src]').length") == 0


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
    assert text(page, ".colours .ends") == "0.818711.221"
    bar = page.run("getComputedStyle(document.querySelector('.gradient')).backgroundImage")
    assert "rgba(225, 29, 72, 0.7)" in bar
    assert "rgba(232, 113, 10, 0.7)" in bar
    page.run("document.querySelectorAll('[data-token]')[3].click()")
    assert "ratio, trainer to engine 0.8187, entropy 0.75" in text(page, ".conversation .readout")
    page.run("document.querySelectorAll('[data-token]')[0].click()")
    assert text(page, ".conversation .readout") == "token 0, id 257: not chosen by the policy"
    page.open(path, "#row=0/step 1/0&show=entropy")
    assert page.run(colours) == ["", "", "rgba(232, 113, 10, 0.7)", "rgba(232, 113, 10, 0.35)"]
    assert text(page, ".colours .ends") == "01.5"


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
            for (let i = 0; i < document.querySelectorAll("#list tbody tr").length; i += 1, opened += 1) {
                await shown("[data-view]", document.querySelectorAll("#list tbody tr button")[i]);
                const [one, group, prompt] = panel.querySelectorAll("[data-view]");
                await shown(".conversation", one);
                const select = panel.querySelector(".view");
                for (const { value } of select.options) {
                    select.value = value;
                    select.dispatchEvent(new Event("change"));
                }
                await shown(".side .card", group);
                await shown(".side .card", prompt);
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
        assert page.run("document.querySelector('[data-constant=\"time/sample\"]').offsetParent !== null")
        assert page.run("document.querySelector('input[type=range]').value") == "0.9"
        server.shutdown()
    page.wait("document.getElementById('served').textContent.startsWith('The server of this page does not answer')")
    page.call("Page.navigate", url="about:blank")
    page.run("1")
    assert all("ERR_CONNECTION_REFUSED" in line for line in page.console)
    page.console.clear()


def test_the_headline_says_what_a_run_is_and_what_it_has_changed(page: Tab, tmp_path: Path) -> None:
    recipe = "model: {path: tiny, lora: {rank: 8}}\nloss: rlkit.losses.ClipLoss\ntrain: {steps: 3}\n"
    run = write_run(tmp_path / "run", recipe=recipe)
    result = json.loads((run / "result.json").read_text())
    warnings = ["warning: the reward rises while accuracy does not: see rlkit docs metrics"]
    verdict = {"change": "worse", "p_value": 0.001}
    (run / "result.json").write_text(json.dumps(result | {"warnings": warnings, "verdict": verdict, "seconds": 75}))
    (run / "checkpoints" / "step-00003").mkdir(parents=True)
    page.open(written(run, out=tmp_path / "report.html"))
    assert text(page, ".headline h2") == "run worseok"
    assert "greedy accuracy0.25 (0.100 to 0.500) → 0.75 (0.100 to 0.500)" in text(page, ".headline")
    assert text(page, ".headline .facts") == "modeltiny, LoRA of rank 8methodClipLossprogress3 of 3 steps in 1:15 min"
    assert text(page, ".headline .notes") == f"1 warning{warnings[0]}"
    assert text(page, ".headline code") == f"rlkit export --checkpoint {run} --out MODEL"
    left = page.run("[...document.querySelectorAll('.line .dot')].map((dot) => dot.style.left)")
    assert left == ["25%", "75%"]


def test_a_run_without_a_result_is_in_progress(page: Tab, tmp_path: Path) -> None:
    """Three of six steps have taken 3 seconds each."""
    run = write_run(tmp_path / "run", recipe="train: {steps: 6}\n")
    (run / "result.json").unlink()
    (run / "checkpoints" / "step-00003").mkdir(parents=True)
    page.open(written(run, out=tmp_path / "report.html"))
    assert text(page, ".headline h2") == "run in progress"
    assert text(page, ".headline .facts") == "progress3 of 6 steps in 9 s, 9 s left"
    assert text(page, ".headline code") == f"rlkit fit --resume {run}"


def test_a_row_opens_wherever_it_is_clicked_and_by_arrows(page: Tab, tmp_path: Path) -> None:
    page.open(written(write_run(tmp_path / "run"), out=tmp_path / "report.html"))
    click(page, "#list tbody tr:nth-child(2) .of-text")
    page.wait("document.querySelectorAll('[data-token]').length === 4")
    assert page.run("document.querySelector('tr.chosen').dataset.row") == "1"
    page.run("""document.querySelector("tr.chosen button").dispatchEvent(
        new KeyboardEvent("keydown", {key: "ArrowDown", bubbles: true}))""")
    page.wait("document.querySelector('tr.chosen').dataset.row === '2'")
    assert page.run("document.activeElement.closest('tr').dataset.row") == "2"


def test_details_unfold_below_the_row_on_a_narrow_page(page: Tab, tmp_path: Path) -> None:
    page.resize(390, 844)
    page.open(written(write_run(tmp_path / "run"), out=tmp_path / "report.html"))
    click(page, "#list tbody tr:nth-child(3) .of-text")
    page.wait("document.querySelectorAll('[data-token]').length === 4")
    assert page.run("document.querySelector('tr.chosen').nextSibling.contains(document.getElementById('details'))")
    assert page.run("document.documentElement.scrollWidth") <= 390
    edges = page.run("(({ left, right }) => [left, right])(document.getElementById('details').getBoundingClientRect())")
    assert 0 <= edges[0] < edges[1] <= 390
    click(page, "tr.chosen .of-text")
    page.wait("document.getElementById('details').hidden")
    assert page.run("document.querySelector('tr.unfolded')") is None


def test_charts_enlarge_and_count_steps_tokens_or_time(page: Tab, tmp_path: Path) -> None:
    """Steps take 3 seconds each, so that the third ends at 9 seconds."""
    page.open(written(write_run(tmp_path / "run"), out=tmp_path / "report.html"))
    click(page, '[data-metric="reward/mean"] .title')
    assert page.run("document.getElementById('large').open")
    assert page.run("document.querySelector('dialog canvas').clientHeight") > 400
    click(page, "dialog button")
    page.wait("document.querySelector('dialog .chart').children.length === 0")
    page.run("""(() => { const axis = document.getElementById("axis"); axis.value = "time";
        axis.dispatchEvent(new Event("change")); })()""")
    assert text(page, '[data-metric="reward/mean"] .readout') == "0.3 at step 3 (9 s)"
    assert page.run("[...document.getElementById('axis').options].map((option) => option.value)") == ["step", "time"]
    assert painted(page, '[data-metric="validation/accuracy"]') > 500


def test_a_filter_draws_each_metric_once_and_counts(page: Tab, tmp_path: Path) -> None:
    page.open(written(write_run(tmp_path / "run"), out=tmp_path / "report.html"))
    page.run("""(() => { const box = document.querySelector('[placeholder="name of a metric"]');
        box.value = "mean"; box.dispatchEvent(new Event("input")); })()""")
    visible = """[...document.querySelectorAll('#curves [data-metric], #curves [data-constant]')]
        .filter((element) => element.offsetParent !== null).map((element) => element.textContent)"""
    page.wait(f"{visible}.length === 1")
    assert page.run(visible)[0].startswith("reward/mean")
    assert text(page, "#metrics") == "1 of 5 metrics"


def test_a_preference_run_shows_pairs(page: Tab, tmp_path: Path) -> None:
    """Of two completions, the one with reward 1 is preferred; its log-prob is -1 and that of the other one -2.75."""
    run = write_run(tmp_path / "run", steps=1)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "policy/preference_accuracy": 0.5}) + "\n")
    rows = [trajectory("1", 0, 0.0, "bad"), trajectory("1", 0, 1.0, "good"), trajectory("1", 0, 0.0, "worse")]
    rows[1].logps = [0.0, 0.0, -0.5, -0.5]
    RunFolder(run, "").dump("step-00001", rows)
    page.open(written(run, out=tmp_path / "report.html"))
    click(page, "#list tbody tr .of-text")
    page.wait("document.querySelectorAll('.pairs tbody tr').length === 2")
    assert text(page, ".pairs tbody tr:nth-child(1)") == "reward 1 2 tokensgoodreward 0 2 tokensbad1.75"
    assert "2 pairs; the policy finds the preferred one likelier in 2" in text(page, "#details")
    click(page, ".pairs .card")
    page.wait("document.querySelectorAll('[data-token]').length === 4")


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
