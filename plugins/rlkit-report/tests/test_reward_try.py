"""`rlkit reward try`: saved rollouts, scored again by the real path, and what another reward changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_authors.models import build_tokenizer
from rlkit_report.reward_comparison import RescoredGroup, RewardComparison

from rlkit.cli.main import main
from rlkit.records.folder import json_lines
from rlkit.records.rows import SavedRow, as_row
from rlkit.types import JsonObject, Prompt, Score, StopReason, Trajectory, Turn
from tests.conftest import read_jsonl
from tests.judge_stand_in import responses, serving
from tests.unit.rewards.test_rewards import classifier

ASKED = [{"role": "user", "content": "2 + 5 = ?"}]


def trajectory(text: str, reward: float | None, group: int = 0, error: str | None = None) -> Trajectory:
    prompt = Prompt(f"p{group}", ASKED, "7", {"level": group})
    score = None if error else Score(reward, {} if reward is None else {"accuracy": reward}, error=None)
    turns = [Turn("user", 0, 1), Turn("assistant", 1, 3)]
    return Trajectory(
        prompt, group, [1, 2, 3], [False, True, True], [0.0, -0.5, -0.5], [-1, 0, 0], StopReason.STOP, turns, text,
        score=score, error=error, turn_rewards=[0.25],
    )  # fmt: skip


def run_folder(tmp_path: Path, *steps: list[Trajectory]) -> Path:
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    for number, rows in enumerate(steps, 1):
        (folder / "rollouts" / f"step-{number:05d}.jsonl.gz").write_bytes(json_lines(map(as_row, rows)))
    (folder / "rollouts" / "validation-before.jsonl.gz").write_bytes(b"is not read")
    return folder


def metrics(capsys: pytest.CaptureFixture[str], *words: str) -> JsonObject:
    status = main(["reward", "try", *words, "--json"])
    found: JsonObject = json.loads(capsys.readouterr().out)
    assert status == (0 if found["scored"] else 1)
    return found


def test_rescoring_with_the_same_reward_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards of turns are part of both; a failed conversation is left out."""
    run = run_folder(
        tmp_path,
        [trajectory("#### 7", 1.0), trajectory("#### 8", 0.0), trajectory("", None, error="late")],
        [trajectory("#### 7", 1.0, group=1), trajectory("#### 7", 1.0, group=1)],
    )
    found = metrics(capsys, "--recipe=quickstart", f"--rollouts={run}")
    assert (found["rows"], found["compared"], found["failed_conversations"]) == (5, 4, 1)
    assert found["saved"] == found["new"] == 1.0  # 3 right of 4, and 0.25 each
    assert found["components"]["accuracy"] == {"saved": 0.75, "new": 0.75}
    assert (found["changed"], found["groups"], found["reordered"], found["agreement"]) == (0, 2, 0, 1.0)
    assert found["rank_correlation"] == pytest.approx(1)
    assert found["failures"] == {}


REWARD = """
import os, time

def level(text, meta, messages):
    if text == "boom":
        raise ValueError("no such answer")
    if text == "hang":
        time.sleep(60)
    if text == "die":
        os._exit(3)
    return {"reward": len(text) + meta["level"], "asked": float(messages[0]["content"] == "2 + 5 = ?")}
"""


@pytest.mark.slow
def test_what_another_reward_changes_is_counted_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a worker with its deadline: what raises, hangs or dies costs its own row.

    Group 0 had rewards 1, 0 and has 1, 2: another order, and both samples change sides. Group 1 had 1, 0, 0 and has
    5, 4, 3: sample 0 alone stays above the mean, 1/3 of it; sample 2 stays below; sample 1 was below and is at it.
    """
    run = run_folder(
        tmp_path,
        [trajectory("a", 1.0), trajectory("aa", 0.0)],
        [trajectory("aaaa", 1.0, 1), trajectory("aaa", 0.0, 1), trajectory("aa", 0.0, 1)],
        [trajectory("boom", 1.0, 2), trajectory("hang", 1.0, 3), trajectory("die", 1.0, 4)],
    )
    (tmp_path / "mine.py").write_text(REWARD)
    out = tmp_path / "rows.jsonl"
    options = (
        f"--reward.function={tmp_path / 'mine.py'}:level", "--reward.allow_code=true", "--reward.timeout=1",
    )  # fmt: skip
    found = metrics(
        capsys, "--recipe=quickstart", "--reward=PythonReward", *options, f"--rollouts={run}", f"--out={out}"
    )
    assert (found["rows"], found["scored"], found["compared"], found["changed"]) == (8, 5, 5, 4)
    assert found["saved"] == pytest.approx(0.4 + 0.25)
    assert found["new"] == pytest.approx((1 + 2 + 5 + 4 + 3) / 5 + 0.25)
    assert found["components"] == {"accuracy": {"saved": 0.4, "new": None}, "asked": {"saved": None, "new": 1.0}}
    assert (found["groups"], found["reordered"]) == (2, 2)
    assert found["agreement"] == pytest.approx(2 / 5)
    assert found["differences"][0]["text"] == "aaaa"
    assert (found["differences"][0]["saved"], found["differences"][0]["new"]) == (1.25, 5.25)
    causes = " ".join(found["failures"])
    assert "ValueError: no such answer" in causes
    assert "did not finish within 1 s" in causes
    assert len(found["failures"]) == 3
    rows = read_jsonl(out)
    assert [row["text"] for row in rows] == ["a", "aa", "aaaa", "aaa", "aa", "boom", "hang", "die"]
    assert rows[2]["new"] == {"reward": 5.25, "components": {"asked": 1.0}}
    assert rows[5]["new"]["reward"] is None
    assert "no such answer" in rows[5]["error"]


def test_any_file_of_answers_is_scored_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its texts are shown without what a terminal would obey."""
    path = tmp_path / "answers.jsonl"
    lines = [
        {"messages": ASKED, "text": "Now \x1b[2J #### 7", "answer": "7", "reward": 0.0},
        {"messages": ASKED, "text": "#### 8", "answer": "7"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["reward", "try", "--recipe=quickstart", "--reward=MathReward", f"--rollouts={path}"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 rows of 1 file have both rewards" in shown
    assert f"{path}, line 1: 0 -> 1" in shown
    assert "Now \\x1b[2J #### 7" in shown
    assert "\x1b[2J" not in shown


def test_completions_written_by_hand_are_shown_with_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"
    lines = [{"messages": ASKED, "text": text, "answer": "7"} for text in ("#### 7", "#### 8", "#### 9", "#### 7")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["reward", "try", "--recipe=quickstart", f"--rollouts={path}"]) == 0
    shown = capsys.readouterr().out
    rewards = [line.split()[0] for line in shown.splitlines() if "####" in line]
    assert rewards == ["1.0000", "0.0000", "0.0000", "1.0000"]
    assert "4 rows without a saved reward earn 0.5000 on average" in shown
    assert "saved  " not in shown


def test_right_and_wrong_answers_are_counted_by_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By that of the reference and that of the answer; a reference in no form fails."""
    path = tmp_path / "answers.jsonl"
    pairs = [
        ("7", "#### 7"), ("7", "#### 7 or 8"), ("8", "#### half of 8"), ("50\\%", "\\boxed{\\frac12}"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\boxed{2}"), ("about 7", "#### 7"),
    ]  # fmt: skip
    path.write_text("".join(json.dumps({"messages": ASKED, "answer": a, "text": t}) + "\n" for a, t in pairs))
    counts = metrics(capsys, "--recipe=quickstart", "--reward=MathReward", f"--rollouts={path}")
    assert counts["reference_forms"] == {
        "integer": {"right": 1, "wrong": 2, "failed": 0},
        "percentage": {"right": 1, "wrong": 0, "failed": 0},
        "matrix": {"right": 0, "wrong": 1, "failed": 0},
        "in no form": {"right": 0, "wrong": 0, "failed": 1},
    }
    assert counts["answer_forms"]["list"] == {"right": 0, "wrong": 1, "failed": 0}
    assert counts["answer_forms"]["in no form"] == {"right": 0, "wrong": 1, "failed": 0}
    assert counts["answer_forms"]["integer"] == {"right": 1, "wrong": 1, "failed": 1}
    assert main(["reward", "try", "--recipe=quickstart", "--reward=ExactReward", f"--rollouts={path}"]) == 0
    assert "form of the reference" in capsys.readouterr().out


def test_a_sum_of_a_reward_model_and_plain_code_needs_no_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is bound to the device, or calls other rewards, works as in a run."""
    path, model = classifier(tmp_path / "rm", None)
    run = run_folder(tmp_path, [trajectory("#### 7", 1.0), trajectory("#### 8", 0.0)])
    rewards = {"model": {"class_path": "ModelReward", "init_args": {"path": path}}, "right": "ExactReward"}
    found = metrics(
        capsys, "--recipe=quickstart", "--reward=Composite", f"--reward.rewards={json.dumps(rewards)}",
        f"--rollouts={run}",
    )  # fmt: skip
    ids = [build_tokenizer().encode(f"2 + 5 = ?\n\n{text}") for text in ("#### 7", "#### 8")]
    values = [model(input_ids=torch.tensor([row])).logits.item() for row in ids]
    assert found["components"]["model"]["new"] == pytest.approx(sum(values) / 2, abs=1e-4)
    assert found["new"] == pytest.approx(sum(values) / 2 + found["components"]["right"]["new"] + 0.25, abs=1e-4)


def test_a_reward_that_needs_the_policy_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlkit.rewards import MathReward

    monkeypatch.setattr(MathReward, "bind", lambda self, runtime: runtime.logits(None), raising=False)
    run = run_folder(tmp_path, [trajectory("#### 7", 1.0)])
    assert main(["reward", "try", "--recipe=quickstart", f"--rollouts={run}"]) == 2
    assert "MathReward asks for `runtime.logits`, the policy of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["score"], "rlkit reward has no verb 'score', expected try"),
        (["try", "--recipe=quickstart"], "rlkit reward try needs --rollouts PATH"),
        (["try", "--recipe=quickstart", "--rollouts=nowhere"], "--rollouts is 'nowhere', neither a file nor a folder"),
        (["try", "--recipe=quickstart", "--rollouts=empty"], "--rollouts is 'empty', a folder without rollouts"),
        (["try", "--rollouts=emty"], "--rollouts is 'emty', neither a file nor a folder; did you mean 'empty'?"),
        (["try", "--rollouts=bad.jsonl"], "rlkit reward try needs a recipe"),
        (["try", "--recipe=quickstart", "--rollouts=bad.jsonl"], "bad.jsonl, line 1 is not JSON"),
        (["try", "--recipe=quickstart", "--rollouts=bad.jsonl", "--out=./bad.jsonl"], "which is a file to read"),
        (["try", "--recipe=quickstart", "--rollouts=half.jsonl"], "half.jsonl, line 1 cannot be tokenised: TypeError"),
        (["try", "--recipe=quickstart", "--rollouts=bad.jsonl", "--out=empty"], "which cannot be written"),
        (
            ["try", "--recipe=quickstart", "--rollouts=good.jsonl", "--out=/dev/full"],
            "--out is '/dev/full', which cannot",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("bad.jsonl").write_text("{\n")
    Path("half.jsonl").write_text(json.dumps({"messages": ASKED, "text": "\ud800"}) + "\n")
    Path("good.jsonl").write_text(json.dumps({"messages": ASKED, "text": "#### 7"}) + "\n")
    assert main(["reward", *words]) == 2
    assert problem in capsys.readouterr().err


def group(*rewards: tuple[float | None, float | None]) -> RescoredGroup:
    rows: list[Any] = []
    for saved, new in rewards:
        one = trajectory("x", new)
        one.turn_rewards = []
        rows.append(SavedRow("f, line 1", one, ("p",), saved, {}, failed=False, left_out=[]))
    return RescoredGroup(rows)


def test_rewards_that_differ_by_rounding_are_the_same() -> None:
    found = RewardComparison()
    found.add(group((1.0, 1.0 + 1e-7), (0.0, 0.0)))
    assert (found.metrics()["changed"], found.metrics()["reordered"], found.metrics()["agreement"]) == (0, 0, 1.0)


def test_groups_of_one_and_unrewarded_rows_are_no_comparison() -> None:
    found = RewardComparison()
    found.add(group((1.0, 0.0)))
    found.add(group((None, 0.5), (None, None)))
    assert (found.rows, found.scored, found.groups) == (3, 2, 0)
    assert (found.metrics()["compared"], found.metrics()["agreement"]) == (1, None)
    assert found.metrics()["rank_correlation"] is None


LABELLED = [
    ("#### 7", 1, 0), ("#### 8", 0, 0), ("#### 9", True, 0), ("#### 7", 0.0, 1), ("#### 7", 1, 1), ("#### 7", None, 1),
]  # fmt: skip
"""Texts, labels and groups; right are those with 7."""


def labelled(path: Path) -> str:
    rows = [
        {"messages": ASKED, "id": str(group), "answer": "7", "text": text, "label": label, "meta": {"score": i}}
        for i, (text, label, group) in enumerate(LABELLED)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--rollouts={path}"


def test_agreement_with_labels_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards 1 0 0 1 1 against labels 1 0 1 0 1: 3 of 5 agree.

    Means are 0.6 and 0.6, so the covariance is 2 / 5 - 0.36 = 0.04, each variance is 0.24, and the correlation 1 / 6.
    Pairs with different labels: in group 0 (1, 2) alike and (2, 3) equal; in group 1 (4, 5) equal: 2 of 3.
    """
    words = ("--recipe=quickstart", labelled(tmp_path / "rows.jsonl"))
    agreement = metrics(capsys, *words, "--label=label")["agreement_with_labels"]
    assert agreement == {
        "label": "label", "rows": 5, "accuracy": 0.6, "correlation": pytest.approx(1 / 6),
        "rank_correlation": pytest.approx(1 / 6), "pairs": 3, "pairs_ordered_alike": pytest.approx(2 / 3),
    }  # fmt: skip
    assert metrics(capsys, *words, "--label=score")["agreement_with_labels"]["accuracy"] is None
    assert main(["reward", "try", *words, "--label=label"]) == 0
    shown = capsys.readouterr().out
    assert "accuracy 60.0% (a reward of at least 0.5 means 1)" in shown
    assert "66.7% of 3 pairs" in shown
    assert main(["reward", "try", *words, "--label=label", "--reward=EpisodeReward"]) == 0
    assert "no correlation: all rewards are equal" in capsys.readouterr().out
    assert main(["reward", "try", *words, "--label=labels"]) == 2
    assert "--label is 'labels', but no row has a reward and a number" in capsys.readouterr().err


def test_a_judge_is_tried_on_labelled_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that finds right what has a 7, or an 8: 3 of 5 labels again. Of 6 rows 3 texts and prompts differ."""
    with serving(lambda body: json.dumps({"score": 10 * ("9" not in responses(body)[0])})) as stand_in:
        server = (f"--reward.server.url={stand_in.url}", "--reward.server.model=m")
        words = ("--recipe=quickstart", "--reward=JudgeReward", *server, labelled(tmp_path / "rows.jsonl"))
        found = metrics(capsys, *words, "--label=label")
        assert main(["reward", "try", *words]) == 0
    assert found["agreement_with_labels"]["accuracy"] == 0.4
    assert found["counts"]["judge_calls"] == 3
    assert "judge_calls 3" in capsys.readouterr().out
