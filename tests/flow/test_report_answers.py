"""The head of `rlkit report` in a browser: what training changed in answers and rewards, and two runs' difference."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlkit.records.folder import json_lines
from rlkit.records.rows import as_row
from rlkit.types import Score, Trajectory
from tests.flow.browser import Tab
from tests.flow.test_report_page import click, page, tab, text, written  # noqa: F401 (fixtures)
from tests.run_folders import HOSTILE, trajectory, write_run

pytestmark = pytest.mark.slow


def validated(run: Path, when: str, rewards: Sequence[float], *, accuracy: bool = True, said: str = "") -> None:
    """Write the greedy answers of a validation, one for each prompt."""
    rows: list[Trajectory] = [trajectory(f"{i} + 1", i, x, f"{said}{when} {i}") for i, x in enumerate(rewards)]
    for row, reward in zip(rows, rewards, strict=True):
        row.score = Score(reward, {"accuracy": reward} if accuracy else {})
    lines = json_lines({"kind": "greedy", **as_row(row)} for row in rows)
    (run / "rollouts" / f"validation-{when}.jsonl.gz").write_bytes(lines)


def titles(page: Tab, where: str = "#answers") -> list[str]:
    return list(page.run(f"[...document.querySelectorAll('{where} .columns h4')].map((title) => title.textContent)"))


def cards(page: Tab, selector: str) -> list[str]:
    every = f"[...document.querySelectorAll({json.dumps(f'{selector} .card')})]"
    return list(page.run(f"{every}.map((card) => card.textContent)"))


def test_answers_that_were_fixed_broken_and_stay_wrong(page: Tab, tmp_path: Path) -> None:
    """Of eight prompts six become right, of which five are shown; the answers are text, whatever they hold."""
    run = write_run(tmp_path / "run")
    validated(run, "before", [0, 0, 0, 0, 0, 0, 1, 0], said=HOSTILE)
    validated(run, "after", [1, 1, 1, 1, 1, 1, 0, 0])
    page.open(written(run, out=tmp_path / "report.html"))
    assert titles(page) == [
        "6 of 8 fixed wrong at first, right at last",
        "1 of 8 broken right at first, wrong at last",
        "1 of 8 still wrong at the first and the last validation",
    ]
    fixed = cards(page, "[data-answers=fixed]")
    assert len(fixed) == 5
    assert fixed[0].startswith("What is 0 + 1? 0 → 1</script><script>alert(1)</script>")
    assert fixed[0].endswith("after 0")
    assert "after 6" in cards(page, "[data-answers=broken]")[0]
    assert "after 7" in cards(page, "[data-answers='still wrong']")[0]
    page.run("""(() => { const box = document.querySelector('[data-filter="reward"]');
        box.value = "1"; box.dispatchEvent(new Event("input")); })()""")
    click(page, "[data-answers=broken] .card")  # which the filter leaves out
    page.wait("document.querySelectorAll('#details [data-token]').length === 4")
    assert "after 6" in text(page, "tr.chosen")
    assert page.run("document.querySelector('[data-filter=\"reward\"]').value") == ""


def test_without_accuracy_answers_are_compared_by_reward(page: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    validated(run, "before", [0.5, 0.5, 0.5], accuracy=False)
    validated(run, "after", [0.75, 0.25, 0.5], accuracy=False)
    page.open(written(run, out=tmp_path / "report.html"))
    assert titles(page) == [
        "1 of 3 improved reward rose most", "1 of 3 worsened reward fell most",
        "lowest rewards at the last validation",
    ]  # fmt: skip
    assert cards(page, "[data-answers=improved]") == ["What is 0 + 1? 0.5 → 0.75before 0after 0"]
    assert "after 1" in cards(page, "[data-answers=lowest]")[0]


def test_rewards_of_the_first_and_the_last_steps(page: Tab, tmp_path: Path) -> None:
    """In each step half of the samples earn 0 and half 1."""
    page.open(written(write_run(tmp_path / "run", steps=20), out=tmp_path / "report.html"))
    assert text(page, "#answers figcaption") == "rewards of samples: steps 1 to 2 steps 19 to 20 "
    assert text(page, "#answers .bins") == "50% → 50%050% → 50%1"
    heights = page.run("[...document.querySelectorAll('.bins .bar')].map((bar) => bar.style.height)")
    assert heights == ["100%"] * 4


def test_a_run_without_a_signal_says_so_at_its_head(page: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    metrics = {"reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0, "rollout/samples": 64.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": i} | metrics) + "\n" for i in (1, 2)))
    (run / "checkpoints" / "step-00002").mkdir(parents=True)
    page.resize(390, 844)
    page.open(written(run, out=tmp_path / "report.html"))
    assert text(page, ".diagnosis p").startswith(
        "reward 0 in all 128 samples of 2 steps, so there is nothing to learn: "
    )
    assert len(cards(page, ".diagnosis")) == 2
    assert cards(page, ".diagnosis")[0].startswith("What is 0 + 2? 0#### 7")
    assert page.run("document.querySelector('.headline code')") is None
    assert text(page, '[data-metric="reward/mean"] .readout') == "0 at step 2"  # although it never changes
    assert page.run("document.documentElement.scrollWidth") <= 390


def test_two_runs_are_shown_with_their_difference(page: Tab, tmp_path: Path) -> None:
    """Of four prompts the second run answers two right that the first does not, and one the other way round."""
    recipe = "train:\n  lr: {}\n  steps: 3\nloss:\n  class_path: ClipLoss\n  init_args:\n    high: 0.2\n"
    one, two = (write_run(tmp_path / name, recipe=recipe.format(rate)) for name, rate in (("one", 1), ("two", 2)))
    validated(one, "after", [0, 0, 1, 1])
    validated(two, "after", [1, 1, 0, 1])
    page.open(written(one, two, out=tmp_path / "report.html"))
    assert "validation/accuracy0.750.750" in text(page, "#difference table")
    compared = text(page, "#difference > p")
    assert compared == "accuracy of the same 4 validation prompts: two minus one +0.25 (95% interval -0.6883 to +1.188)"
    assert titles(page, "#difference") == ["1 better in one", "2 better in two"]
    options = "[...document.querySelectorAll('#difference .scroll:last-child tbody tr')].map((row) => row.textContent)"
    assert page.run(options) == ["train.lr12"]
    page.resize(390, 844)
    assert page.run("document.documentElement.scrollWidth") <= 390
