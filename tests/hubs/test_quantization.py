"""Adapters over a base in 4 bits, with bitsandbytes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import transformers.integrations.sdpa_attention as attention
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig, get_peft_model
from rlkit_engine_torch import layers
from rlkit_engine_vllm import transport
from rlkit_inspect import estimate, footprint
from rlkit_inspect.gpus import gpu_named
from safetensors.torch import load_file
from torch import nn

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.commands import parse
from rlkit.models.flops import LearningWork
from rlkit.models.load import load_policy
from rlkit.models.lora import adapters_off, base_model, merge_adapters
from rlkit.models.source import OVERRIDES, locate, source_of
from rlkit.models.weights import PolicyWeights
from rlkit.ops import logps
from rlkit.ops.quantization import BITS, PARTS, QuantizedLinear, replace_layers
from rlkit.recipe import Lora, Model
from rlkit.testing import save_random_model
from tests import forks
from tests.conftest import read_jsonl, rlkit
from tests.flow.counted_memory import learning_peak
from tests.flow.test_architectures import KINDS, MISMATCH

TOKENS = torch.arange(2, 26).view(2, 12)
LORA = Lora(32, 32.0)


def reference_layer(layer: nn.Linear) -> Linear4bit:
    """Return bitsandbytes' own layer, with double quantization, of a weight that bfloat16 holds."""
    quantized = Linear4bit(layer.in_features, layer.out_features, bias=layer.bias is not None, quant_type="nf4")
    rounded = layer.weight.detach().bfloat16().float()
    quantized.weight = Params4bit(rounded, requires_grad=False, quant_type="nf4", compress_statistics=True)
    quantized.bias = layer.bias
    return quantized.to("cpu").train()  # in training mode it computes in float32 on every CPU


def trained(policy: Any) -> Any:
    torch.manual_seed(1)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, 0, 0.1)
    return policy


def logits(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        return policy(TOKENS).logits  # type: ignore[no-any-return]


def test_outputs_and_gradients_are_those_of_bitsandbytes() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1024, 512)
    own, reference = QuantizedLinear(layer), reference_layer(layer)
    x = torch.randn(2, 3, 1024, requires_grad=True)
    outputs = own(x), reference(x)
    assert torch.equal(*outputs)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in outputs))
    assert 0.05 < (own.weight - layer.weight).norm() / layer.weight.norm() < 0.12
    tables = 4 * (256 + 1)  # 256 values of scales and their offset, whatever the layer's size
    held = sum(getattr(own, part).nbytes for part in PARTS)
    assert held == 1024 * 512 * BITS / 8 + tables
    assert layer.weight.nbytes / held > 7.7
    assert [name for name, weight in own.named_parameters() if weight.requires_grad] == ["bias"]


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 7), (100, 33), (64, 256), (1024, 513)])
def test_a_rank_without_weights_has_tensors_of_the_same_sizes(inputs: int, outputs: int) -> None:
    layer = QuantizedLinear(nn.Linear(inputs, outputs, dtype=torch.bfloat16))
    empty = QuantizedLinear(nn.Linear(inputs, outputs, dtype=torch.bfloat16, device="meta"))
    for part in PARTS:
        real, meta = getattr(layer, part), getattr(empty, part)
        assert (real.shape, real.dtype, meta.device.type) == (meta.shape, meta.dtype, "meta")
    assert (empty.weight.shape, empty.weight.dtype) == (layer.weight.shape, layer.weight.dtype)


def test_a_cast_or_a_move_changes_no_bits() -> None:
    layer = QuantizedLinear(nn.Linear(64, 32))
    weight = layer.weight
    layer.to(torch.bfloat16)
    assert torch.equal(layer.weight, weight.bfloat16())
    layer.to(torch.float32)
    assert torch.equal(layer.weight, weight)
    for part in PARTS:
        setattr(layer, part, nn.Parameter(getattr(layer, part).bfloat16(), requires_grad=False))  # by older FSDP2
    assert torch.equal(layer.weight, weight)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.ones(1, 64, requires_grad=True)
        out = layer(x)
        out.float().sum().backward()
    assert (out.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(x.grad[0], weight.sum(0), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("use_dora", [False, True])
def test_the_adapted_and_merged_policy_is_pefts(use_dora: bool) -> None:
    """peft merges into 4 bits again, so that its merged weights are compared after the same second quantization."""
    own = trained(load_policy(Model("tiny", Lora(4, use_dora=use_dora), quantization="nf4")))
    plain: Any = load_policy(Model("tiny"))
    replace_layers(plain.model, nn.Linear, reference_layer)
    plain.is_loaded_in_4bit = True  # so that peft takes its own layers for 4 bits
    config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=use_dora)
    theirs = trained(get_peft_model(plain, config))
    with torch.no_grad():
        values = dict(own.named_parameters())
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.copy_(values[name])
    expected = logits(theirs)
    torch.testing.assert_close(logits(own), expected, atol=2e-5, rtol=1e-5)
    merged = merge_adapters(own)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    assert not any(isinstance(layer, QuantizedLinear) for layer in merged.modules())
    theirs_merged = theirs.merge_and_unload().model.layers[0].mlp.up_proj.weight
    weight = merged.model.layers[0].mlp.up_proj.weight
    again = dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))
    difference = again - dequantize_4bit(theirs_merged.data, theirs_merged.quant_state)
    assert (difference.abs() > 1e-5).float().mean() < 0.001  # noise at the border of two values of NF4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_servers_get_the_weights_with_which_the_trainer_computes(dtype: Literal["float32", "bfloat16"]) -> None:
    policy = trained(load_policy(Model("tiny", Lora(4), dtype=dtype, quantization="nf4")))
    weights = PolicyWeights(policy, bucket_bytes=2**16)
    server: Any = load_policy(Model("tiny", dtype=dtype), frozen=True)
    names = {name for name, _ in server.named_parameters()}
    for merged in (False, True):
        buckets = list(weights.buckets(merged))
        assert max(sum(x.nbytes for _, x in bucket[:-1]) for bucket in buckets) < 2**16
        sent = {name: weight for bucket in buckets for name, weight in bucket}
        assert sent.keys() == names
        assert {name: (tuple(x.shape), x.dtype) for name, x in sent.items()} == weights.specs
        server.load_state_dict(sent, strict=False)
        served = logits(server)
        if merged:
            expected = logits(merge_adapters(policy))
        else:
            with adapters_off(policy):
                expected = logits(policy)
        assert torch.equal(served, expected)
    plain: Any = load_policy(Model("tiny", dtype=dtype), frozen=True)
    assert (served - logits(plain)).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "falcon_h1", "mamba2", "nemotron_h"])
def test_a_model_with_convolutions_and_without_experts_is_quantized(kind: str, tmp_path: Path) -> None:
    without_experts = {"hybrid_override_pattern": "M*-"} if kind == "nemotron_h" else {}
    base = save_random_model(tmp_path / kind, kind, **KINDS[kind] | without_experts)
    policy = trained(load_policy(Model(str(base), Lora(4), quantization="nf4")))
    plain: Any = load_policy(Model(str(base)))
    head = plain.get_output_embeddings()
    linear = [layer for layer in plain.modules() if type(layer) is nn.Linear and layer is not head]
    for layer in linear:
        layer.weight.data = QuantizedLinear(layer).weight
    with adapters_off(policy):
        torch.testing.assert_close(logits(policy), logits(plain), atol=2e-5, rtol=1e-5)
    assert sum(isinstance(layer, QuantizedLinear) for layer in policy.modules()) == len(linear) > 2
    options = ("--train.steps=2", "--validation=null", "--rollout.sampling.max_tokens=4", f"--out={tmp_path / 'run'}")
    assert main(["fit", "--recipe=quick_lora", f"--model.path={base}", "--model.quantization=nf4", *options]) == 0
    assert all(row["mismatch/max"] < MISMATCH.get(kind, 1e-4) for row in read_jsonl(tmp_path / "run" / "metrics.jsonl"))


def test_the_text_model_alone_of_one_that_reads_pictures_is_quantized(tmp_path: Path) -> None:
    """Trainer and engine agree, servers get all weights, and a run goes on from its checkpoint."""
    policy: Any = trained(load_policy(Model("tiny-vision", Lora(4), quantization="nf4")))
    linear = {name: x for name, x in policy.named_modules() if isinstance(x, nn.Linear) and ".lora_" not in name}
    quantized = {name for name, x in linear.items() if isinstance(x, QuantizedLinear)}
    assert quantized == {name for name in linear if ".language_model." in name}
    assert any(".visual." in name for name in linear)
    sent = {name: x for bucket in PolicyWeights(policy).buckets() for name, x in bucket}
    plain = {name: x for bucket in PolicyWeights(load_policy(Model("tiny-vision"))).buckets() for name, x in bucket}
    assert {name: x.shape for name, x in sent.items()} == {name: x.shape for name, x in plain.items()}
    vision = [name for name in sent if "visual" in name]
    assert all(torch.equal(sent[name], plain[name]) for name in vision)
    assert len(vision) > 10
    words = ("--recipe=quick_image", "--model.lora.rank=4", "--model.quantization=nf4", "--train.prompts_per_step=4")
    more = ("--train.lr=0.005", "--validation=null", "--save.every=1", "--train.warmup_steps=0")
    more += ("--train.schedule=Constant",)
    for name, steps in (("whole", 2), ("parts", 1), ("parts", 2)):
        options = (f"--train.steps={steps}", "--resume=auto", f"--out={tmp_path / name}")
        assert main(["fit", *words, *more, *options]) == 0
    assert all(row["mismatch/max"] < 1e-4 for row in read_jsonl(tmp_path / "whole" / "metrics.jsonl"))
    one, other = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


FIT = (
    "fit", "--recipe=quick_lora", "--model.quantization=nf4", "--kl_loss.coef=0.001", "--validation=null",
    "--train.schedule=Constant", "--save.every=1", "--train.prompts_per_step=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "run"
    assert main([*FIT, f"--out={out}", "--train.steps=25"]) == 0
    return out


def test_it_learns_and_engine_and_trainer_agree(run: Path) -> None:
    rows = read_jsonl(run / "metrics.jsonl")
    assert max(row["mismatch/mean"] for row in rows) < 1e-5
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert rows[0]["policy/kl_ref"] == 0  # the reference is the quantized base
    assert rows[-1]["policy/kl_ref"] > 0.01
    first, last = (sum(row["reward/mean"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.15


def test_a_resumed_run_ends_with_the_same_bits(run: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*FIT, f"--out={whole}", "--train.steps=2"]) == 0
    for steps in (1, 2):
        assert main([*FIT, f"--out={parts}", "--resume=auto", f"--train.steps={steps}"]) == 0
    one, other = (load_file(out / "final" / "adapter_model.safetensors") for out in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("use_dora", ["false", "true"])
def test_a_sharded_base_learns_as_a_whole_one(precision: str, use_dora: str, tmp_path: Path) -> None:
    """Of two ranks, each holds half of the 4-bit tensors; gradients equal those of one process."""
    script = str(Path(__file__).with_name("quantized_ranks.py"))
    done = forks.run((script, precision, use_dora), tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 2


def test_a_sharded_run_goes_on_with_one_rank(tmp_path: Path) -> None:
    ranks = ("--fabric.devices=2", "--fabric.strategy=FSDP2")
    for name, steps, *words in (("whole", 3), ("sharded", 2, *ranks), ("resumed", 3, "--resume=sharded")):
        process = rlkit(*FIT, f"--train.steps={steps}", *words, f"--out={name}", cwd=tmp_path)
        assert process.returncode == 0, process.stderr
    runs = {name: read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "sharded", "resumed")}
    for expected, row in zip(runs["whole"], (*runs["sharded"], *runs["resumed"]), strict=True):
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4), row["step"]
        assert row["mismatch/max"] < 1e-4
    one, other = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("whole", "resumed"))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, atol=1e-4, rtol=1e-3, msg=name)


def test_kernels_serve_layers_in_four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bytes are parameters, which no kernel reads."""
    policy, used = load_policy(Model("tiny", Lora(4), quantization="nf4")), []
    layers.FusedLayers().fuse(policy)
    monkeypatch.setattr("rlkit_engine_torch.layers.on_gpu", lambda _: True)
    apply = layers.SwiGLUFunction.apply
    monkeypatch.setattr(layers.SwiGLUFunction, "apply", lambda *x: (used.append(x), apply(*x))[1])
    logits(policy)
    assert len(used) == policy.config.num_hidden_layers


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_shared_memory_takes_the_weights_as_they_are_sent(quantization: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, since the folder keeps a tensor until its successor is written."""
    policy = load_policy(Model("tiny", Lora(4), quantization=quantization))
    size = 2 * sum(weight.numel() for weight in load_policy(Model("tiny")).parameters())
    monkeypatch.setattr(transport.os.path, "isdir", lambda _: True)
    for free, fits in ((2 * size, False), (2 * size + 1, True)):
        monkeypatch.setattr(transport.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert (transport.shared_memory(policy, torch.bfloat16) is not None) == fits


def test_operations_count_the_weights_in_four_bits() -> None:
    models: list[Any] = [load_policy(Model("tiny", Lora(4), quantization=name)) for name in (None, "nf4")]
    plain, quantized = (LearningWork.of(base_model(model)) for model in models)
    assert plain == quantized is not None


def test_seven_billion_parameters_learn_in_16_gb_as_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "use_gqa_in_sdpa", lambda *_: True)  # as on a GPU
    monkeypatch.setattr(logps, "BLOCK_BYTES", logps.CHUNK_BYTES)
    words = ("--model.quantization=nf4", "--train.max_tokens_per_micro_batch=1152")
    recipe = parse("fit", ["--recipe=grpo_gsm8k_lora_7b", *words]).recipe
    setting = replace(estimate.setting(recipe, 128, 128), gpu=gpu_named("16000"))
    phases = footprint.memory(setting)
    estimated = (phases[footprint.STATES] + phases[footprint.LEARNING]) * 2**20
    assert estimated == pytest.approx(learning_peak(setting, 1152), rel=0.1)
    assert footprint.misfit(setting) is None


def test_an_export_is_over_the_quantized_base(run: Path, tmp_path: Path) -> None:
    """Merged weights are the dequantized base and the adapter, from the checkpoint and from `final/` alike."""
    policy = load_policy(Model(str(run), LORA, quantization="nf4"))
    expected = logits(policy)
    checkpoint = max((run / "checkpoints").iterdir())
    for source, name in ((run / "final", "final"), (checkpoint, "checkpoint")):
        assert locate(str(source)).quantization == "nf4"
        merged = tmp_path / name
        assert main(["export", f"--checkpoint={source}", "--merge-lora", f"--out={merged}"]) == 0
        torch.testing.assert_close(logits(load_policy(Model(str(merged)))), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(RecipeError, match=r"trained with model.quantization: nf4, but it is None now; set it to nf4"):
        source_of(Model(str(run), LORA))
    damaged = shutil.copytree(run / "final", tmp_path / "damaged")
    (damaged / OVERRIDES).write_text('{"quantization_config": {"load_in_8bit": true}}')
    with pytest.raises(RecipeError, match=r"has quantization_config \{'load_in_8bit': True\}, expected none or"):
        locate(str(damaged))
    base = trained(load_policy(Model("tiny", LORA, quantization="nf4")))
    with adapters_off(policy), adapters_off(base):
        assert torch.equal(logits(policy), logits(base))
