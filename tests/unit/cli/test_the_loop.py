"""The loop in one file, which `rlkit docs the-loop` shows: of the same completions it learns what rlkit learns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlkit.cli.main import main
from rlkit.models import SHIPPED
from tests.conftest import read_jsonl
from tests.pages import blocks

GROUP = 4
RUN = (
    "--train.steps=1",
    "--train.prompts_per_step=6",
    f"--rollout.group_size={GROUP}",
    "--validation=null",
    "--out=out",
    "--train.optimizer=TorchOptimizer",
    "--train.optimizer.name=SGD",
    "--train.lr=1",
)
"""SGD's step is a multiple of the gradient; Adam's first one makes the smallest gradients as large as all others."""


@pytest.fixture(scope="module")
def loop() -> Any:
    [source] = [block.text for block in blocks("the-loop") if block.file == "loop.py"]
    names = {"__name__": "loop"}
    exec(compile(source, "loop.py", "exec"), names)
    names["GROUP"] = GROUP
    return SimpleNamespace(**names)


def test_a_step_is_that_of_rlkit(loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--recipe=quickstart", *RUN]) == 0
    rows = read_jsonl(Path("out/rollouts/step-00001.jsonl.gz"))
    longest = max(len(row["tokens"]) for row in rows)

    def padded(name: str) -> torch.Tensor:
        return torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in rows])

    attention = torch.tensor([[i < len(row["tokens"]) for i in range(longest)] for row in rows])
    tokens, mask = padded("tokens"), padded("mask").bool()
    model, _ = loop.load(SHIPPED["tiny"])
    logps = loop.log_probs(model, tokens, attention, mask)
    torch.testing.assert_close(logps.detach(), padded("logps"), atol=2e-5, rtol=0)

    advantages = loop.advantages_of(torch.tensor([row["reward"] for row in rows]))
    assert advantages.any()
    torch.testing.assert_close(advantages[:, None] * mask, padded("advantages"))

    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters())
    loop.learn(model, optimizer, tokens, attention, mask, advantages, loop.rate_of(1, 1) / loop.LR)
    learned = load_file("out/final/model.safetensors")
    for name, weight in learned.items():
        moved, expected = model.state_dict()[name] - before[name], weight - before[name]
        rounding = 4 * torch.finfo(torch.float32).eps * float(weight.abs().max())
        torch.testing.assert_close(
            moved, expected, rtol=0, atol=1e-4 * float(expected.abs().max()) + rounding, msg=name
        )


def test_its_samples_have_the_log_probs_of_the_policy(loop: Any) -> None:
    torch.manual_seed(0)
    model, tokenizer = loop.load(SHIPPED["tiny"])
    tokens, attention, mask = loop.sample(model, tokenizer, ["1 + 2 = ?", "35 + 17 = ?"])
    texts = [tokenizer.decode(row[sampled]) for row, sampled in zip(tokens, mask, strict=True)]
    assert all(text.startswith("####") and text.endswith("<|im_end|>") for text in texts)
    assert len(texts) == 2 * GROUP
    assert not (mask & ~attention).any()
    alone = loop.log_probs(model, tokens[:1, attention[0]], attention[:1, attention[0]], mask[:1, attention[0]])
    batched = loop.log_probs(model, tokens, attention, mask)[:1, attention[0]]
    torch.testing.assert_close(alone, batched, atol=2e-5, rtol=0)


def test_rewards_are_those_of_the_last_number(loop: Any) -> None:
    texts = ["#### 52", "52 #### 53", "it is 52", "#### 52 or 53", "", "#### -52"]
    assert loop.rewards_of(texts, ["52"] * 6).tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
