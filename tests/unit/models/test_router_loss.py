"""The router's load-balancing loss of mixtures of experts: by hand, against transformers, and in a run."""

from __future__ import annotations

import importlib
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_authors.models import build_tokenizer
from torch import Tensor

from rlkit.cli.main import main
from rlkit.models.actor import Actor, load_balancing_loss
from rlkit.testing import random_model
from rlkit.train.objective import Counts, Objective
from rlkit.types import PolicyOutput, Reads
from tests.conftest import read_jsonl
from tests.unit.phases import ready, recipe
from tests.unit.train.test_objective import Ones

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip

TOKENS = torch.tensor([[5, 3, 4, 6, 9, 0], [5, 3, 8, 0, 0, 0], [3, 6, 5, 4, 7, 8]])
MASK = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]).bool()
"""The first two rows share a prompt; the tool's token 9 and the padding count nowhere."""


CONFIG = SimpleNamespace(num_experts_per_tok=1)
ONE_EXPERT = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: CONFIG))


def test_the_loss_by_hand() -> None:
    # probabilities (3/4, 1/4) of two tokens: loads (1, 0), so 2 * (1 * 3/4 + 0 * 1/4); the last token does not count
    logits = torch.tensor([[log(3), 0.0], [log(3), 0.0], [0.0, 9.0]])
    chosen = torch.tensor([True, True, False])
    assert load_balancing_loss([logits], chosen, ONE_EXPERT).item() == pytest.approx(1.5)
    # a token for each expert: loads (1/2, 1/2), mean probabilities (1/2, 1/2)
    even = torch.tensor([[log(3), 0.0], [0.0, log(3)]])
    assert load_balancing_loss([even], chosen[:2], ONE_EXPERT).item() == pytest.approx(1.0)
    # over both layers: loads (3/4, 1/4), mean probabilities (5/8, 3/8), so 2 * (15 + 3) / 32
    assert load_balancing_loss([logits[:2], even], chosen[:2], ONE_EXPERT).item() == pytest.approx(1.125)


def reference_loss(model: Any) -> Tensor:
    """Return what transformers' own function of the model makes of its logits, row by row without padding."""
    own = importlib.import_module(type(model).__module__).load_balancing_loss_func
    logits: list[list[Tensor]] = [[], []]
    for tokens, mask in zip(TOKENS, MASK, strict=True):
        outputs = model(input_ids=tokens[None], output_router_logits=True)
        for layer, routed in zip(logits, outputs.router_logits, strict=True):
            layer.append(routed[:-1][mask[1:]])
    loss: Tensor = own(tuple(torch.cat(layer) for layer in logits), 4, 2)
    return loss


@pytest.mark.parametrize("way", ["packed", "padded", "logits"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_passes_have_transformers_loss_and_gradient(kind: str, way: str) -> None:
    model: Any = random_model(kind, **EXPERTS[kind])
    expected = reference_loss(model)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any("gate.weight" in name for name in gradients)
    model.zero_grad()
    actor = Actor(model)
    assert actor.passes.packed
    actor.chunked = way != "logits"
    actor.passes.packed = way == "packed"
    out = actor(TOKENS, MASK, reads=Reads(router=True))
    assert out.router_loss.item() == pytest.approx(expected.item(), rel=1e-5)
    out.router_loss.backward()
    for name, p in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-3, atol=1e-6)
    assert actor(TOKENS, MASK).router_loss is None


def test_micro_batches_are_weighed_by_their_tokens() -> None:
    batch = ready()
    out = PolicyOutput((0.0 * batch.mask).requires_grad_(), None, router_loss=torch.tensor(3.0, requires_grad=True))
    tokens = int(batch.mask.sum())
    objective = Objective(Ones(), "token_mean", 1, router_aux_loss_coef=0.5)
    share = objective.share(out, batch, Counts(torch.tensor(4.0 * tokens), torch.tensor(16.0)))
    # a quarter of the mini-batch's tokens: 1/4 of the loss of 1 a token, and 0.5 * 3 / 4
    assert share.loss.item() == pytest.approx(0.25 + 0.375)
    assert share.metrics["router_aux_loss"].item() == 3.0


def test_rows_without_advantage_train_the_router() -> None:
    batch = replace(ready(), advantages=torch.zeros_like(ready().advantages))
    plain = recipe()
    routed = replace(plain, train=replace(plain.train, router_aux_loss_coef=0.1))
    assert not Objective.of(plain).rows_with_gradient(batch).any()
    assert Objective.of(routed).rows_with_gradient(batch).any()


def fit(out: Path, model: Path, *options: str) -> int:
    return main([
        "fit", "--recipe=quickstart", f"--model.path={model}", "--train.steps=4", "--train.prompts_per_step=2",
        "--rollout.sampling.max_tokens=4", "--validation=null", "--train.lr=0.02", f"--out={out}", *options,
    ])  # fmt: skip


def test_a_run_balances_its_experts(tmp_path: Path) -> None:
    model: Any = random_model("qwen2_moe", **EXPERTS["qwen2_moe"])
    with torch.no_grad():
        model.model.embed_tokens.weight += 1
        for layer in model.model.layers:
            layer.mlp.gate.weight[:2] += 1
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    options = ["--train.router_aux_loss_coef=1", "--train.checkpoint_activations=true"]
    assert fit(tmp_path / "run", folder, *options) == 0
    losses = [row["policy/router_aux_loss"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] > 3.9  # two of four experts have every token, which is 4
    assert losses[-1] < 3


def test_models_without_experts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(tmp_path / "run", Path("tiny"), "--train.router_aux_loss_coef=0.01") == 2
    message = "train.router_aux_loss_coef is 0.01, but model.path 'tiny' is of type qwen2, which has no router"
    assert message in capsys.readouterr().err


def test_divided_passes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("tensor_parallel", "sequence_parallel"):
        strategy = [f"--fabric.strategy.{key}=2", "--fabric.devices=2", "--train.router_aux_loss_coef=0.01"]
        assert main(["recipe", "check", "quickstart", "--fabric.strategy=FSDP2", *strategy]) == 2
        assert f"router_aux_loss_coef is 0.01, but fabric.strategy has {key}=2" in capsys.readouterr().err
