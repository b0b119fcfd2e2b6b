"""Loading, log-probs of the actor, the reference, and weights as a stream."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from rlkit_servers.push import Push
from rlkit_servers.transports import DiskTransport
from rlkit_servers.weight_check import Tolerance
from safetensors.torch import load_file
from tokenizers import processors

from rlkit.base.errors import RecipeError
from rlkit.models.actor import Actor, ValueModel
from rlkit.models.load import load_policy, load_tokenizer
from rlkit.models.reference import Reference
from rlkit.models.save import save_policy
from rlkit.models.source import SHIPPED
from rlkit.models.weights import PolicyWeights, full_state_dict
from rlkit.recipe import Lora, Model
from rlkit.rollout.recorded import recorded_group
from rlkit.rollout.template import ChatTemplate
from rlkit.testing import random_model, save_random_model
from rlkit.types import Prompt, RecordedAnswer
from tests.flow.test_architectures import KINDS

FOR_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 0, 0]])
MASK = torch.tensor([[False, False, True, False, True, True], [False, True, True, True, False, False]])


@pytest.mark.parametrize(
    ("kind", "chunked"),
    [("qwen2", True), ("llama", True), ("gemma2", True), ("cohere", True), ("hyperclovax", False), ("zaya", True)],
)
def test_the_actor_equals_a_plain_log_softmax(kind: str, chunked: bool) -> None:
    policy = random_model(kind, **{"gemma2": {"head_dim": 8}, "hyperclovax": {"logits_scaling": 2.0}}.get(kind, {}))
    actor = Actor(policy)
    assert actor.chunked is chunked
    out = actor(TOKENS, MASK, temperature=0.8)
    logps = torch.log_softmax(policy(input_ids=TOKENS).logits[:, :-1] / 0.8, -1)
    expected = logps.gather(-1, TOKENS[:, 1:, None]).squeeze(-1) * MASK[:, 1:]
    torch.testing.assert_close(out.logps[:, 1:], expected, rtol=1e-4, atol=1e-5)
    entropy = -(logps.exp() * logps).sum(-1) * MASK[:, 1:]
    torch.testing.assert_close(out.entropy[:, 1:], entropy, rtol=1e-4, atol=1e-5)
    assert not out.logps[~MASK].any()


def test_a_value_is_of_the_state_before_its_token() -> None:
    critic = ValueModel(random_model("qwen2").model)
    assert not critic(TOKENS, MASK).any()  # the head starts at 0
    torch.nn.init.normal_(critic.head.weight)
    values = critic(TOKENS, MASK)
    states = critic.backbone(input_ids=TOKENS).last_hidden_state[:, :-1]
    torch.testing.assert_close(values[:, 1:], states @ critic.head.weight[0] * MASK[:, 1:], rtol=1e-4, atol=1e-5)
    assert not values[~MASK].any()


def lora_policy(folder: Path) -> Any:
    policy = load_policy(Model(str(folder), lora=Lora(rank=4, alpha=8)))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:  # zero at the start: give the adapters something to say
            parameter.data.normal_(0, 0.1, generator=generator)
    return policy


def test_with_lora_the_reference_is_the_actor_without_adapter(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "m")
    actor = Actor(lora_policy(folder))
    reference = Reference(actor, Model(str(folder), lora=Lora()), torch.device("cpu"))
    assert reference.actor is actor
    plain = Actor(load_policy(Model(str(folder))))
    expected = plain(TOKENS, MASK).logps
    with reference.applied():
        torch.testing.assert_close(reference.logps(TOKENS, MASK, 1.0), expected)
    assert (actor(TOKENS, MASK).logps - expected).abs().max() > 0.01


def test_without_lora_the_reference_is_a_frozen_copy() -> None:
    actor = Actor(load_policy(Model("tiny")))
    reference = Reference(actor, Model("tiny"), lambda module: None)
    before = reference.logps(TOKENS, MASK, 1.0)
    for parameter in actor.parameters():
        parameter.data += 0.01
    torch.testing.assert_close(reference.logps(TOKENS, MASK, 1.0), before)
    assert not any(p.requires_grad for p in reference.actor.parameters())


@pytest.mark.parametrize("lora", [False, True])
def test_streamed_weights_make_an_equal_model(tmp_path: Path, lora: bool) -> None:
    folder = save_random_model(tmp_path / "m", tie_word_embeddings=True)
    policy = lora_policy(folder) if lora else load_policy(Model(str(folder)))
    stream = PolicyWeights(policy, bucket_bytes=10_000)
    buckets = list(stream.buckets())
    assert len(buckets) > 3
    tensors = dict(item for bucket in buckets for item in bucket)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == stream.specs
    assert not any(tensor.requires_grad for tensor in tensors.values())
    fresh = random_model("qwen2", seed=9, tie_word_embeddings=True)
    assert set(tensors) == {name for name, _ in fresh.named_parameters()}
    fresh.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(
            fresh(input_ids=TOKENS).logits, policy(input_ids=TOKENS).logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("kind", ["glm4_moe", "gemma4_text", "mixtral", "nemotron_h", "granitemoehybrid"])
def test_servers_get_the_tensors_that_saved_models_have(kind: str, tmp_path: Path) -> None:
    """They start with dummy weights. Biases of 5 and more, as GLM-4.5 has, would move by up to 0.016 in bfloat16."""
    policy = random_model(kind, **KINDS[kind])
    for name, tensor in policy.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):
            tensor.copy_(torch.linspace(5.01, 5.9, len(tensor)))
    policy.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    stream = PolicyWeights(policy)
    push = Push(DiskTransport(policy), torch.bfloat16, Tolerance(0.0, 0.0))
    sent = dict(pair for bucket in push._buckets(stream) for pair in bucket)
    assert sent.keys() == stream.specs.keys() == saved.keys()
    assert len(stream.buffer_names) == {"gemma4_text": 2, "glm4_moe": 1, "nemotron_h": 1}.get(kind, 0)
    for name, tensor in sent.items():
        assert torch.equal(tensor, saved[name] if name in stream.buffer_names else saved[name].bfloat16())


def test_adapters_start_from_the_seed(tmp_path: Path) -> None:
    model = Model(str(save_random_model(tmp_path / "m")), lora=Lora(rank=4))

    def first(seed: int) -> torch.Tensor:
        before = torch.get_rng_state()
        parameters = dict(load_policy(model, seed).named_parameters())
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([p.flatten() for name, p in parameters.items() if "lora_A" in name])

    assert not any(module.training for module in load_policy(model).modules())
    assert torch.equal(first(3), first(3))
    assert not torch.equal(first(3), first(4))


def test_adapters_are_streamed_under_pefts_names(tmp_path: Path) -> None:
    from peft import get_peft_model_state_dict

    policy = lora_policy(save_random_model(tmp_path / "m"))
    parcel = PolicyWeights(policy).adapter()
    assert parcel is not None
    config, tensors = parcel
    expected = get_peft_model_state_dict(policy)
    assert {name for name, _ in tensors} == set(expected)
    assert len(tensors) == len(expected)
    assert all(torch.equal(x, expected[name]) and not x.requires_grad for name, x in tensors)
    assert (config["r"], config["lora_alpha"]) == (4, 8)


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_state_has_tied_weights_once(tied: bool) -> None:
    model = random_model("qwen2", tie_word_embeddings=tied)
    state = full_state_dict(model, keep=True)
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in state) is not tied
    assert full_state_dict(model, keep=False) == {}


def test_a_bucket_ends_with_the_tensor_that_fills_it() -> None:
    model = random_model("qwen2")
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    buckets = [[name for name, _ in bucket] for bucket in PolicyWeights(model, bucket_bytes=10_000).buckets()]
    assert [name for bucket in buckets for name in bucket] == list(sizes)
    for bucket in buckets[:-1]:
        assert sum(sizes[name] for name in bucket) >= 10_000 > sum(sizes[name] for name in bucket[:-1])
    exact = sizes["model.embed_tokens.weight"]
    assert next(PolicyWeights(model, bucket_bytes=exact).buckets())[-1][0] == "model.embed_tokens.weight"


def test_a_saved_policy_loads_and_generates_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = Model("tiny")
    policy, tokenizer = load_policy(model), load_tokenizer(model)
    save_policy(policy, tokenizer, tmp_path / "final")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    ids = AutoTokenizer.from_pretrained(tmp_path / "final").apply_chat_template(
        [{"role": "user", "content": "12 + 30 = ?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options = {"max_new_tokens": 10, "do_sample": False}
    assert again.generate(**ids, **options).tolist() == policy.generate(**ids, **options).tolist()
    assert [p.name for p in tmp_path.iterdir()] == ["final"]


def test_the_tiny_model_is_tiny() -> None:
    policy = load_policy(Model("tiny"))
    assert sum(p.numel() for p in policy.parameters()) < 1_000_000
    assert all((path / "model.safetensors").stat().st_size <= 2_000_000 for path in SHIPPED.values())
    assert policy.config.model_type == "qwen2"
    assert policy.config.max_position_embeddings >= 2048


def test_a_model_that_is_not_there_or_has_no_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model.path is .*which cannot be loaded: .*[^.]\. Use a folder"):
        load_policy(Model(str(tmp_path)))
    folder = save_random_model(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RecipeError, match="without a chat template"):
        load_tokenizer(Model(str(folder)))


@pytest.mark.parametrize(
    ("path", "near"),
    [("tyni", "tiny"), ("tiny-tool", "tiny-tools"), ("mymodle", "mymodel"), ("Qwen/m-0.5", "Qwen/m-0.5B")],
)
def test_a_misspelt_model_is_answered_with_the_nearest(
    path: str, near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is no folder could be one of the hub; a file is no model."""
    for name in ("mymodel", "Qwen/m-0.5B"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mymodle.txt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=rf"^model.path is '{path}' \(did you mean '{near}'\?\), which cannot"):
        load_policy(Model(path))


@pytest.mark.parametrize("file", [False, True])
def test_a_recipe_gives_a_base_model_its_template(tmp_path: Path, file: bool) -> None:
    folder = save_random_model(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    plain = load_tokenizer(Model(str(folder), chat_template="plain"))
    assert plain.apply_chat_template(messages, tokenize=False) == f"1+1=\n2{plain.eos_token}"
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    if file:
        (tmp_path / "own.jinja").write_text(template)
        template = str(tmp_path / "own.jinja")
    own = load_tokenizer(Model(str(folder), chat_template=template))
    assert own.apply_chat_template(messages, tokenize=False) == "<1+1=><2>"


def test_plain_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    """Gemma's and Llama's put <bos> before every text; without it such base models write garbage."""
    tokenizer: Any = load_tokenizer(Model("tiny"))
    tokenizer.add_tokens(["<bos>"], special_tokens=True)
    bos = tokenizer.convert_tokens_to_ids("<bos>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    save_random_model(tmp_path / "m", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "m")
    plain: Any = load_tokenizer(Model(str(tmp_path / "m"), chat_template="plain"))
    template = ChatTemplate(plain, {plain.eos_token_id})
    question = {"role": "user", "content": "1+1="}
    assert template.start([question]) == plain.encode("1+1=\n")
    assert template.start([question])[0] == bos
    answer = RecordedAnswer([{"role": "assistant", "content": "2"}])
    [found] = recorded_group(template, Prompt("p", [question], recorded=[answer]), 0, 4096)
    assert found.tokens == [*plain.encode("1+1=\n2"), plain.eos_token_id]
    assert plain.decode(template.delta([question])) == "1+1=\n"


@pytest.mark.parametrize("template", ["no-such.jinja", "/dev/zero", ".", "plane"])
def test_a_template_that_is_no_file_is_refused(template: str) -> None:
    with pytest.raises(RecipeError, match=r"model.chat_template is .*expected `plain`, .*there is no such file"):
        load_tokenizer(Model("tiny", chat_template=template))


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "gguf"}, {"quant_method": "spqr"}, {"quant_method": ["x"]}, 5]
)
def test_a_quantization_that_cannot_be_loaded_is_explained(tmp_path: Path, quantization: object) -> None:
    folder = save_random_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(RecipeError, match="model.path is .*which cannot be (loaded|saved)"):
        load_policy(Model(str(folder)))


def test_unknown_lora_targets_are_named_with_the_known() -> None:
    with pytest.raises(RecipeError, match=r"model.lora.targets is \['query'\].*q_proj"):
        load_policy(Model("tiny", lora=Lora(targets=["query"])))


def test_decoding_keeps_spaces_before_punctuation(tmp_path: Path) -> None:
    """Llama 3's files ask to lose them; transformers 5.5 obeys, and newer ones for other tokenizers than BPE."""
    copytree(SHIPPED["tiny"], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    asked = dict.fromkeys(("clean_up_tokenization_spaces", FOR_BPE), True)
    path.write_text(json.dumps(json.loads(path.read_text()) | asked))
    tokenizer = load_tokenizer(Model(str(tmp_path)))
    text = "git add . && echo it 's"
    assert tokenizer.decode(tokenizer.encode(text)) == text
