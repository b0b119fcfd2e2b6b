"""A run with adapters from beginning to end: trained, validated, trained further, merged, and answering elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.cli.main import main
from rlkit.models.checkpoints import read_tensors, tensor_shapes
from rlkit.models.source import ADAPTER, ADAPTER_WEIGHTS, SHIPPED
from rlkit.models.store import Store
from tests.conftest import read_jsonl, rlkit

pytestmark = pytest.mark.slow

FEW = ("--train.steps=3", "--train.prompts_per_step=4", "--train.schedule=Constant", "--validation.limit=8")
CHECKPOINT = "checkpoints/step-000003"
DORA = ("use_dora=true", "use_rslora=true")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lora") / "run"
    assert main(["fit", "--recipe=quick_lora", *FEW, "--out", str(out)]) == 0
    return out


def result(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())  # type: ignore[no-any-return]


def validated(run: Path, when: str) -> Any:
    """The metrics of the answers themselves: without the comparisons with what the run validated earlier."""
    metrics = result(run)["validation"][when]
    return pytest.approx({name: value for name, value in metrics.items() if not name.endswith(("_p_start", "_p_last"))})


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / ADAPTER_WEIGHTS)


@pytest.mark.parametrize("place", ["", "final", CHECKPOINT])
def test_validate_answers_as_the_run_did(run: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--checkpoint", str(run / place), "--json"]) == 0  # with the run's recipe
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == validated(run, "after")
    assert main(["validate", f"--checkpoint={run / place}", "--recipe=quick_grpo", *FEW, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == validated(run, "after")


@pytest.mark.parametrize("place", ["final", CHECKPOINT])
def test_fit_goes_on_from_the_adapter(
    run: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, recipe = tmp_path / "on", f"--recipe={run / 'recipe.yaml'}"
    assert main(["fit", recipe, f"--model.path={run / place}", "--train.steps=1", "--out", str(out)]) == 0
    assert result(out)["validation"]["before"] == validated(run, "after")
    before, after = adapter(run / "final"), adapter(out / "final")
    assert before.keys() == after.keys()
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert 0 < moved.abs().max() < 0.01  # a step of AdamW is about the learning rate, 3e-3
    assert json.loads((out / "final" / ADAPTER).read_text())["base_model_name_or_path"] == str(out / "final" / "base")
    for trained in ("", "checkpoints/step-000001"):  # the adapter that it went on from counts once
        assert main(["validate", "--checkpoint", str(out / trained), "--json"]) == 0
        metrics = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert metrics == validated(out, "after")


def test_fit_continues_with_all_weights_without_lora(run: Path, tmp_path: Path) -> None:
    options = ["--recipe=quick_grpo", *FEW, "--train.steps=1", "--train.lr=1e-4", f"--model.path={run}"]
    assert main(["fit", *options, "--out", str(tmp_path / "whole")]) == 0
    assert result(tmp_path / "whole")["validation"]["before"] == validated(run, "after")
    assert not (tmp_path / "whole" / "final" / ADAPTER).exists()
    # adapters on a checkpoint of all weights
    options = [
        "--recipe=quick_lora",
        *FEW,
        "--train.steps=1",
        f"--model.path={tmp_path / 'whole/checkpoints/step-000001'}",
    ]
    assert main(["fit", *options, "--out", str(tmp_path / "third")]) == 0
    assert result(tmp_path / "third")["validation"]["before"] == validated(tmp_path / "whole", "after")
    assert main(["export", "--merge-lora", "--checkpoint", str(tmp_path / "third"), "--out", str(tmp_path / "m")]) == 0


def test_completions_equal_those_of_transformers_and_peft(run: Path, tmp_path: Path) -> None:
    """The engine's greedy answers stand in the run's folder."""
    folders = []
    for place in ("", "final", CHECKPOINT):
        folders.append(tmp_path / f"merged-{Path(place).name}")
        options = ["--checkpoint", str(run / place), "--out", str(folders[-1]), "--merge-lora"]
        assert main(["export", *options]) == 0
    first, *others = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(other[name], tensor) for other in others for name, tensor in first.items())
    merged: Any = AutoModelForCausalLM.from_pretrained(folders[0])
    with_adapter: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(SHIPPED["tiny"]), str(run / "final")
    )
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    greedy = read_jsonl(run / "rollouts" / "validation-after.jsonl.gz")[:8]
    for row in greedy:
        asked = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        for model in (merged, with_adapter):
            answer = model.generate(**asked, max_new_tokens=12, do_sample=False)[0].tolist()
            assert answer == row["tokens"]


def test_export_rounds_merged_weights_only(run: Path, tmp_path: Path) -> None:
    exact, half, alone = (tmp_path / name for name in ("exact", "half", "alone"))
    assert main(["export", "--checkpoint", str(run), "--out", str(exact), "--merge-lora"]) == 0
    assert main(["export", "--checkpoint", str(run), "--out", str(half), "--merge-lora", "--dtype=bfloat16"]) == 0
    assert main(["export", "--checkpoint", str(run / CHECKPOINT), "--out", str(alone)]) == 0
    tensors, rounded = load_file(exact / "model.safetensors"), load_file(half / "model.safetensors")
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in tensors.items())
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    saved = adapter(run / "final")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in adapter(alone).items())


def test_a_base_in_bfloat16_learns_and_resumes(tmp_path: Path) -> None:
    """Bit for bit as without the pause; checkpoints hold adapters alone, in float32."""
    options = ["--recipe=quick_lora", *FEW, "--model.dtype=bfloat16", "--save.every=1", "--save.keep_last=3"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert main(["fit", *options, "--out", str(whole)]) == 0
    rows = read_jsonl(whole / "metrics.jsonl")
    assert all(row["mismatch/mean"] < 0.05 and row["grad_norm"] > 0 for row in rows)
    store = Store(str(whole / "checkpoints"))
    names = tensor_shapes(store, "step-000003")
    assert all("lora_" in name for name in names)
    resume = ["--resume", str(whole / "checkpoints/step-000001"), "--out", str(parted)]
    assert main(["fit", *options, *resume]) == 0
    once, twice = adapter(whole / "final"), adapter(parted / "final")
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, twice[name]) for name, tensor in once.items())


def test_a_critic_with_adapters_learns_and_resumes(tmp_path: Path) -> None:
    adapters = ["--model.lora.rank=4", "--critic.lora.rank=4", "--model.dtype=bfloat16", "--train.lr=3e-3"]
    options = [
        "--recipe=quick_ppo",
        *FEW,
        *adapters,
        "--critic.policy_delay_steps=0",
        "--save.every=1",
        "--save.keep_last=3",
    ]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert main(["fit", *options, "--out", str(whole)]) == 0
    names = tensor_shapes(Store(str(whole / "checkpoints")), "step-000003")
    critic = [name for name in names if name.startswith("critic.")]
    assert "critic.head.weight" in critic
    assert all("lora_" in name or ".head." in name for name in critic)
    assert any("lora_" in name for name in critic)
    resume = ["--resume", str(whole / "checkpoints/step-000001"), "--out", str(parted)]
    assert main(["fit", *options, *resume]) == 0
    once, twice = (read_jsonl(folder / "metrics.jsonl")[-1] for folder in (whole, parted))
    assert once["critic/loss"] == twice["critic/loss"] > 0
    assert once["policy/loss"] == twice["policy/loss"]
    assert main(["fit", *options, *resume, "--critic.lora.rank=8", "--force"]) == 2


def test_dora_with_rslora_learns_resumes_and_is_peft(tmp_path: Path) -> None:
    """Bit for bit as without the pause, the critic too; peft computes what the merged export does."""
    variants = [f"--{key}.lora.{option}" for key in ("model", "critic") for option in ("rank=4", *DORA)]
    options = ["--recipe=quick_ppo", *FEW, *variants, "--critic.policy_delay_steps=0", "--train.lr=3e-3",
               "--train.prompts_per_step=8", "--validation=null", "--save.every=1", "--save.keep_last=3"]  # fmt: skip
    complete, resumed, merged = (tmp_path / name for name in ("complete", "resumed", "merged"))
    assert main(["fit", *options, "--out", str(complete)]) == 0
    from_first = ["--resume", str(complete / "checkpoints/step-000001"), "--out", str(resumed)]
    assert main(["fit", *options, *from_first]) == 0
    stores = [Store(str(folder / "checkpoints")) for folder in (complete, resumed)]
    names = [*tensor_shapes(stores[0], "step-000003")]
    assert all("lora_" in name or ".head." in name for name in names)
    states = [read_tensors(store, "step-000003", names) for store in stores]
    magnitudes = [name for name in states[0] if "lora_magnitude" in name]
    owners = {"policy", "critic", "policy/optimizer", "critic/optimizer"}
    assert {name.partition(".")[0] for name in magnitudes} == owners
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())

    config = json.loads((complete / "final" / ADAPTER).read_text())
    assert (config["r"], config["use_dora"], config["use_rslora"]) == (4, True, True)
    base = AutoModelForCausalLM.from_pretrained(SHIPPED["tiny"])
    start = {name: tensor.norm(dim=1) for name, tensor in base.named_parameters() if tensor.dim() == 2}
    moved = [
        (tensor - start[f"{name.removeprefix('base_model.model.').partition('.lora_')[0]}.weight"]).abs().max()
        for name, tensor in adapter(complete / "final").items()
        if "lora_magnitude" in name
    ]
    assert min(moved) > 1e-4  # each magnitude is trained
    assert main(["export", "--checkpoint", str(complete), "--out", str(merged), "--merge-lora"]) == 0
    by_peft: Any = PeftModel.from_pretrained(base, str(complete / "final"))
    tokens = torch.arange(1, 11)[None]
    expected = AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    torch.testing.assert_close(by_peft(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    with by_peft.disable_adapter():
        assert (by_peft(tokens).logits - expected).abs().max() > 0.01


def test_two_ranks_go_on_from_one_adapter(run: Path, tmp_path: Path) -> None:
    """Only the first rank reads the adapter and its base, in bfloat16."""
    ranks = ("--fabric.devices=2", "--fabric.strategy=fsdp2", "--model.dtype=bfloat16")
    recipe = ("--recipe", str(run / "recipe.yaml"), "--train.steps=1")
    for place in ("final", CHECKPOINT):
        out = str(tmp_path / Path(place).name)
        done = rlkit("fit", *recipe, *ranks, "--model.path", str(run / place), "--out", out, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        before, after = adapter(run / "final"), adapter(Path(out) / "final")
        moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
        assert 0 < moved.abs().max() < 0.01
