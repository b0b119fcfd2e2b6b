"""Runs with pictures: what is learned from them, and that nothing is without them; tools, answers, ranks, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from rlkit import commands, hookimpl
from rlkit.cli.main import main
from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser
from rlkit.interfaces.tool import State, Tool, ToolReply
from rlkit.models.source import SHIPPED
from rlkit.registry import load_plugins
from rlkit.tasks import Pictures
from tests.conftest import read_jsonl, rlkit

pytestmark = pytest.mark.slow

SHORT = (
    "--recipe=quick_image", "--train.steps=2", "--train.prompts_per_step=6", "--rollout.group_size=4",
    "--validation=null", "--save.every=1", "--train.schedule=Constant", "--train.warmup_steps=0",
)  # fmt: skip


def accuracy(out: Path, kind: str) -> tuple[float, float]:
    validation = json.loads((out / "result.json").read_text())["validation"]
    return validation["before"][kind], validation["after"][kind]


@pytest.mark.parametrize("seed", [0, 1])
def test_quick_image_learns(tmp_path: Path, seed: int) -> None:
    """Within two thirds of its 60 steps."""
    words = ("fit", "--recipe=quick_image", "--train.steps=40", f"--train.seed={seed}", "--out=run")
    assert rlkit(*words, cwd=tmp_path).returncode == 0
    before, after = accuracy(tmp_path / "run", "sampled_accuracy")
    assert before < 0.5
    assert after > before + 0.25
    assert accuracy(tmp_path / "run", "accuracy")[1] > 0.7
    assert all(row["mismatch/max"] < 1e-4 for row in read_jsonl(tmp_path / "run/metrics.jsonl"))


def test_nothing_is_learned_from_the_pictures_of_other_questions(tmp_path: Path) -> None:
    words = ("fit", "--recipe=quick_image", "--train.steps=40", "--task.shuffled=true", "--out=run")
    done = rlkit(*words, cwd=tmp_path)
    assert done.returncode == 0
    assert accuracy(tmp_path / "run", "sampled_accuracy")[1] < 0.4


class Camera(Tool):
    """Returns a picture, the same for each call."""

    description = "Takes a picture."
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}}

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: object) -> ToolReply:
        picture = Image.new("RGB", (56, 56), "red")
        return ToolReply([{"type": "text", "text": "Here: "}, {"type": "image", "image": picture}])


class Broken(Camera):
    """Returns a file that is no picture."""

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: object) -> ToolReply:
        return ToolReply([{"type": "image", "image": b"no picture"}])


class Always(ToolParser):
    """Reads a call out of any text."""

    @classmethod
    def detects(cls, template: str) -> bool:
        return False

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(text, [ToolCall("camera", {})])


@pytest.fixture
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    def rlkit_register(register: Any) -> None:
        for part in (Camera, Broken, Always):
            register(part)

    made = SimpleNamespace(__name__="tests", rlkit_register=hookimpl(rlkit_register))
    monkeypatch.setattr(commands, "load_plugins", lambda: load_plugins([("camera", made)], entry_points=False))


@pytest.mark.usefixtures("_plugin")
@pytest.mark.parametrize("tool", ["Camera", "Broken"])
def test_a_tool_answers_with_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    """The policy reads two pictures; a broken one is the text of an error to it."""
    monkeypatch.chdir(tmp_path)
    options = (*SHORT, f"--tools.camera={tool}", "--parser=Always", "--conversation.turns=2", "--out=run")
    assert main(["fit", *options]) == 0
    metrics = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert all(row["mismatch/max"] < 1e-4 for row in metrics)
    rows = read_jsonl(tmp_path / "run/rollouts/step-00001.jsonl.gz")
    marker = 265  # <|image_pad|>
    turns = [row["tokens"][start:end] for row in rows for role, start, end in row["turns"] if role == "tool"]
    assert {turn.count(marker) for turn in turns} == {4 if tool == "Camera" else 0}
    if tool == "Broken":
        replies = [message for row in rows for message in row["conversation"] if message["role"] == "tool"]
        assert replies
        assert all("error: " in message["content"] for message in replies)


def test_resumed_runs_equal_complete_ones(tmp_path: Path) -> None:
    assert rlkit("fit", *SHORT, "--out=complete", cwd=tmp_path).returncode == 0
    assert rlkit("fit", *SHORT, "--train.steps=1", "--out=run", cwd=tmp_path).returncode == 0
    assert rlkit("fit", "--resume=run", "--train.steps=2", cwd=tmp_path).returncode == 0
    complete, resumed = (read_jsonl(tmp_path / name / "metrics.jsonl")[1] for name in ("complete", "run"))
    same = [name for name in complete if not name.startswith(("time/", "memory/", "throughput/"))]
    assert {name: resumed[name] for name in ("reward/mean", "grad_norm", "policy/loss")} == {
        name: complete[name] for name in ("reward/mean", "grad_norm", "policy/loss")
    }
    assert same


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("trained", ["text", "all"])
def test_two_ranks_learn_the_same(tmp_path: Path, strategy: str, trained: str) -> None:
    options = (*SHORT, f"--model.vision.train={'true' if trained == 'all' else 'false'}", "--kl_loss={coef: 0.01}")
    assert rlkit("fit", *options, "--out=one", cwd=tmp_path).returncode == 0
    two = ("--fabric.devices=2", f"--fabric.strategy={strategy}", "--train.max_tokens_per_micro_batch=128")
    done = rlkit("fit", *options, *two, "--out=two", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (read_jsonl(tmp_path / name / "metrics.jsonl")[0] for name in ("one", "two"))
    for name in ("reward/mean", "grad_norm", "policy/loss", "policy/kl_ref"):
        assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5), name


def write_rows(folder: Path, count: int, **columns: str) -> list[dict[str, Any]]:
    """Write rows with a picture, each with the right answer or a wrong one; return those of the task."""
    rows = Pictures().rows("train")[:count]
    lines = []
    for number, row in enumerate(rows):
        (folder / f"{number}.png").write_bytes(row["image"])
        row["wrong"] = "red" if row["answer"] == "blue" else "blue"
        answers = {column: row[name] for column, name in columns.items()}
        lines.append({"prompt": f"<image>{row['question']}", "images": [f"{number}.png"], **answers})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return rows


RECORDED = (
    "--recipe=quick_image", "--task=TRL", "--task.path=rows.jsonl", "--rollout.engine=Recorded", "--reward=null",
    "--advantage=null", "--validation=null", "--train.schedule=Constant", "--train.warmup_steps=0",
)  # fmt: skip


class AnswerLoss:
    """Transformers' own loss of an answer to a row of `Pictures`, by the `labels` of its model.

    Args:
        location: Of the model.
    """

    def __init__(self, location: str | Path) -> None:
        from transformers import AutoModelForImageTextToText

        from rlkit.data.data import picture_reader
        from rlkit.models.load import load_tokenizer, stop_ids
        from rlkit.recipe import Model
        from rlkit.rollout.template import ChatTemplate

        model = Model("tiny-vision")
        tokenizer = load_tokenizer(model)
        self.policy = AutoModelForImageTextToText.from_pretrained(location)
        self.template = ChatTemplate(tokenizer, stop_ids(model, tokenizer), reader=picture_reader(model))

    @torch.no_grad()
    def __call__(self, row: dict[str, Any], answer: str) -> tuple[float, int]:
        """Return the sum over the answer's tokens, and their number."""
        from rlkit.models.vision import media_inputs

        start = self.template.render_start(Pictures().prompt(row, 0).messages)
        turn = self.template.codec.encode(answer) + self.template.turn_end
        ids = torch.tensor([[*start.tokens, *turn]])
        labels = torch.tensor([[*[-100] * len(start.tokens), *turn]])
        assert start.media is not None
        inputs = media_inputs(self.policy.model, ids, [start.media])
        return float(self.policy(input_ids=ids, labels=labels, **inputs).loss) * len(turn), len(turn)


def test_supervised_rows_have_the_loss_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over the tokens of the answers."""
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path, 6, completion="answer")
    options = ("--loss=CrossEntropy", "--rollout.group_size=1", "--train.steps=1", "--train.prompts_per_step=6")
    assert main(["fit", *RECORDED, *options, "--out=run"]) == 0
    loss_of = AnswerLoss(SHIPPED["tiny-vision"])
    losses = [loss_of(row, row["answer"]) for row in rows]
    mean = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
    assert read_jsonl(tmp_path / "run/metrics.jsonl")[0]["policy/loss"] == pytest.approx(mean, abs=1e-5)


def test_preferred_answers_to_pictures_have_the_loss_of_dpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step's, by the policy that the first has left and the reference from before (2305.18290, eq. 7)."""
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path, 12, chosen="answer", rejected="wrong")
    options = ("--loss=DPO", "--loss.beta=0.5", "--rollout.group_size=2", "--train.prompts_per_step=12")
    for steps in (1, 2):
        assert main(["fit", *RECORDED, *options, f"--train.steps={steps}", f"--out={steps}"]) == 0
    policy, reference = AnswerLoss(tmp_path / "1/final"), AnswerLoss(SHIPPED["tiny-vision"])
    margins = [
        (reference(row, row["answer"])[0] - policy(row, row["answer"])[0])
        - (reference(row, row["wrong"])[0] - policy(row, row["wrong"])[0])
        for row in rows
    ]
    expected = -torch.nn.functional.logsigmoid(0.5 * torch.tensor(margins)).mean()
    first, second = read_jsonl(tmp_path / "2/metrics.jsonl")
    assert first["policy/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert second["policy/loss"] == pytest.approx(float(expected), abs=1e-4)
    assert second["policy/loss"] < 0.69
