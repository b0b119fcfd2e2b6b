"""`rlkit data prepare`: what it writes is read as the same prompts."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from statistics import fmean

import pytest
from rlkit_inspect.data import write
from rlkit_tasks.rows import Rows

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.tasks import Jsonl, Mix, Verl
from rlkit.types import Prompt
from tests.conftest import read_jsonl
from tests.unit.tasks.test_peers_rows import ROWS


def prompts(task: Jsonl | Verl | Mix) -> list[Prompt]:
    rows = task.rows("train")
    return [task.prompt(rows[index], index) for index in range(len(rows))]


def test_prepared_rows_of_verl_have_their_tools_and_meta(tmp_path: Path) -> None:
    path, out = tmp_path / "verl.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert write(Verl(str(path)), "train", out) == len(ROWS)
    before, after = prompts(Verl(str(path))), prompts(Jsonl(str(out)))
    assert [p.tools for p in after] == [["calculator"], [], [], ["other"]]
    assert after == before
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_a_row_that_json_cannot_hold_is_written_without_it(tmp_path: Path) -> None:
    task = Mix({"a": Rows([{"prompt": "x", "answer": "y", "n": float("nan"), "deep": [{"n": float("inf")}]}])})
    assert write(task, "train", tmp_path / "out.jsonl") == 1
    [prompt] = prompts(Jsonl(str(tmp_path / "out.jsonl")))
    assert (prompt.id, prompt.meta) == ("a/0", {"n": None, "deep": [{"n": None}], "data_source": "a"})


def test_a_failure_leaves_what_was_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text("as before")
    broken = Rows([{"prompt": "x", "answer": "y"}, {"prompt": None, "answer": "y"}])
    with pytest.raises(RecipeError, match="'prompt' is None"):
        write(broken, "train", tmp_path / "train.jsonl")
    assert os.listdir(tmp_path) == ["train.jsonl"]
    assert (tmp_path / "train.jsonl").read_text() == "as before"
    assert main(["data", "prepare", "--recipe=quickstart", f"--out={tmp_path / 'train.jsonl'}"]) == 2
    assert "which cannot be written" in capsys.readouterr().err


def test_a_file_that_exists_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the user's own data in `--out`, the second split would be read from the new first one."""
    monkeypatch.chdir(tmp_path)
    Path("prep").mkdir()
    rows = "".join(json.dumps({"prompt": f"{n} + 1 = ?", "answer": str(n + 1)}) + "\n" for n in range(4))
    Path("prep", "train.jsonl").write_text(rows)
    task = ["--task=Jsonl", "--task.path=prep/train.jsonl", "--task.validation_split=0.5"]
    words = ["data", "prepare", "--recipe=quickstart", *task]
    monkeypatch.setattr("rlkit_inspect.data.sample_rewards", lambda *_: pytest.fail("refused before any sampling"))
    for more in ([], ["--samples=1"]):
        assert main([*words, "--out=prep", *more]) == 2
        message = "error: --out is 'prep', where train.jsonl exists already; choose a new folder\n"
        assert capsys.readouterr().err == message
    assert os.listdir("prep") == ["train.jsonl"]
    assert Path("prep", "train.jsonl").read_text() == rows
    Path("other").mkdir()
    Path("other", "validation.jsonl").touch()
    assert main([*words, "--out=other"]) == 2
    assert os.listdir("other") == ["validation.jsonl"]
    assert main([*words, "--validation=null", "--out=other"]) == 0  # the validation split is not written
    assert len(read_jsonl(Path("other", "train.jsonl"))) == 2


def test_rewards_of_the_references_samples_reach_the_advantages(tmp_path: Path) -> None:
    """A*-PO from the command line: A = R - beta log mean exp(R_ref / beta); the reference's loss is the mean of A^2."""
    task = "--task.max_operand=4"
    assert main(["data", "prepare", "--recipe=quick_remax", task, "--samples=3", f"--out={tmp_path}"]) == 0
    rows = {row["id"]: row["reference_rewards"] for row in read_jsonl(tmp_path / "train.jsonl")}
    assert len(rows) == 23
    assert all(len(rewards) == 3 and set(rewards) <= {0.0, 1.0} for rewards in rows.values())
    assert len(set(map(sum, rows.values()))) > 1
    assert "reference_rewards" not in read_jsonl(tmp_path / "validation.jsonl")[0]
    algorithm = ["--advantage=OptimalAdvantage", "--loss=AdvantageRegression", "--validation=null"]
    data = ["--task=Jsonl", f"--task.path={tmp_path / 'train.jsonl'}", "--train.prompts_per_step=23", "--train.steps=1"]
    assert main(["fit", "--recipe=quick_remax", *data, *algorithm, f"--out={tmp_path / 'run'}"]) == 0
    [metrics] = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    advantages = []
    for row in read_jsonl(tmp_path / "run" / "rollouts" / "step-00001.jsonl.gz"):
        mean = fmean(math.exp(reward / 0.5) for reward in rows[row["prompt"]])
        advantages.append(row["reward"] - 0.5 * math.log(mean))
        assert row["advantages"][-1] == pytest.approx(advantages[-1], abs=1e-5)
    assert metrics["policy/loss"] == pytest.approx(fmean(a**2 for a in advantages), rel=1e-4)
    assert metrics["policy/log_ratio"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data", "prepare", "--recipe=quick_remax", "--samples=0", "--out=rows"],
            "--samples is '0', expected a number",
        ),
        (
            ["fit", "--recipe=quick_remax", "--advantage=OptimalAdvantage"],
            "has reference_rewards None, expected a list of finite numbers",
        ),
        (
            ["fit", "--recipe=quick_remax", "--advantage=OptimalAdvantage", "--kl_reward.coef=0.1"],
            "advantage OptimalAdvantage reads rewards of the reference, which `kl_reward:` leaves as they are",
        ),
    ],
)
def test_what_is_missing_for_the_optimal_advantage_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
