"""Reward models: scores as transformers computes them, how they are loaded and saved, and what starts from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_policy.folder import export
from torch import Tensor

from rlkit.base.errors import RecipeError
from rlkit.commands import parse
from rlkit.models.actor import ScoreModel, ValueModel
from rlkit.models.load import load_backbone, load_policy, load_tokenizer, stop_ids
from rlkit.models.lora import has_lora, merge_adapters, score_head
from rlkit.models.save import save_policy
from rlkit.models.weights import full_state_dict
from rlkit.recipe import Lora, Model
from rlkit.recipe.method import RewardModelling
from rlkit.records.validation_metrics import order_metrics
from rlkit.rewards import ModelReward
from rlkit.rollout.template import ChatTemplate
from rlkit.run.evaluate import compare_order
from rlkit.testing import example_trajectory, random_model, save_random_model
from rlkit.types import Score, Trajectory
from tests.stubs import classifier_runtime
from tests.unit.models.test_packing import ARCHITECTURES, rows_of

LORA = Lora(rank=4, alpha=8)


def score_model(model: Model, seed: int = 0) -> ScoreModel:
    """Return a reward model whose trained weights are random."""
    policy = load_policy(model)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and ("score" in name or "lora_" in name):
            torch.nn.init.normal_(parameter, 0, 0.2, generator=generator)
    return ScoreModel(policy)


def closed(model: ScoreModel, section: Model) -> ScoreModel:
    """Return the model with the ends of turns as its chat template renders them."""
    tokenizer = load_tokenizer(section)
    ends = stop_ids(section, tokenizer)
    model.close_with(ChatTemplate(tokenizer, ends).closing(), ends)
    return model


def conversations(section: Model, answers: list[str]) -> tuple[list[Trajectory], Tensor, Tensor]:
    """Return what a policy answered, and its tokens and mask; the last answer was cut off before its end token."""
    tokenizer = load_tokenizer(section)
    template = ChatTemplate(tokenizer, stop_ids(section, tokenizer))
    found = [example_trajectory(text) for text in answers]
    starts = [template.start(t.prompt.messages) for t in found]
    texts = [[*tokenizer.encode(t.text, add_special_tokens=False), tokenizer.eos_token_id] for t in found]
    texts[-1].pop()
    width = max(len(a) + len(b) for a, b in zip(starts, texts, strict=True))
    tokens, mask = torch.zeros(len(found), width, dtype=torch.long), torch.zeros(len(found), width, dtype=torch.bool)
    for i, (start, text) in enumerate(zip(starts, texts, strict=True)):
        tokens[i, : len(start) + len(text)] = torch.tensor(start + text)
        mask[i, len(start) : len(start) + len(text)] = True
    return found, tokens, mask


def last_scores(model: ScoreModel, tokens: Tensor, mask: Tensor) -> list[float]:
    scores = model(tokens, mask).scores.detach()
    return [float(row[chosen][-1]) for row, chosen in zip(scores, mask, strict=True)]


def rewards(path: Path, trajectories: list[Trajectory]) -> list[float | None]:
    reward = ModelReward(str(path), batch_size=2)
    reward.bind(classifier_runtime())
    found = reward._score(trajectories)
    reward.close()
    return [score.reward for score in found]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_score_equals_that_of_transformers(tmp_path: Path, kind: str) -> None:
    """For each token under the mask of padded rows that share prompts, computed in packed passes and in plain ones."""
    section = Model(str(save_random_model(tmp_path / "m", kind, **ARCHITECTURES[kind])), head="score")
    model = score_model(section)
    tokens, mask = rows_of([3, 1], [[6, 2, 9], [4]], seed=3)
    mask[0, 0] = True  # a row without a prompt
    classifier: Any = model.policy
    classifier.config.pad_token_id = 263
    with torch.no_grad():
        prefixes = [classifier(input_ids=tokens[:, : i + 1]).logits[:, 0] for i in range(tokens.shape[1])]
    expected = torch.stack(prefixes, 1) * mask
    assert expected.abs().max() > 0.1
    assert model.passes.packed
    for packed in (True, False):
        model.passes.packed = packed
        out = model(tokens, mask)
        torch.testing.assert_close(out.scores, expected, rtol=1e-5, atol=1e-5)
        assert not out.logps.any()
        assert out.entropy is None


def test_packing_changes_no_gradient(tmp_path: Path) -> None:
    model = score_model(Model(str(save_random_model(tmp_path / "m")), head="score"))
    model.close_with([258, 10], [258])
    tokens, mask = rows_of([3, 1], [[6, 2, 9], [4]], seed=3)
    found = []
    for packed in (True, False):
        model.passes.packed = packed
        model.zero_grad()
        (model(tokens, mask).scores * torch.linspace(-1, 1, tokens.numel()).view_as(tokens)).sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max() + 1e-6


def test_rows_are_closed_by_the_template_in_the_last_score(tmp_path: Path) -> None:
    model = score_model(Model(str(save_random_model(tmp_path / "m")), head="score"))
    tokens = torch.tensor([[5, 6, 7, 258, 9], [5, 6, 8, 0, 0], [5, 6, 8, 257, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0]]).bool()
    plain = model(tokens, mask).scores
    model.close_with([258, 10, 11], [257, 258])
    scores = model(tokens, mask).scores
    torch.testing.assert_close(scores[0, 2], plain[0, 2])
    ended = torch.tensor([[5, 6, 7, 258, 10, 11], [5, 6, 8, 258, 10, 11], [5, 6, 8, 258, 10, 11]])
    expected = model.policy(input_ids=ended).logits[:, 0]
    torch.testing.assert_close(torch.stack((scores[0, 3], scores[1, 2], scores[2, 3])), expected)


def test_the_score_is_before_an_end_that_opens_the_next_tur(tmp_path: Path) -> None:
    """GLM's turns end with the next role's marker, which a rendering that ends with the turn has not got."""
    model = score_model(Model(str(save_random_model(tmp_path / "m")), head="score"))
    tokens, mask = torch.tensor([[5, 6, 7, 258]]), torch.tensor([[0, 0, 1, 1]]).bool()
    model.close_with([], [258])
    expected = model.policy(input_ids=tokens[:, :3]).logits[0, 0]
    torch.testing.assert_close(model(tokens, mask).scores[0, 3], expected)


@pytest.mark.parametrize("lora", [None, LORA])
def test_what_was_saved_scores_conversations_as_training_did(tmp_path: Path, lora: Lora | None) -> None:
    """By ModelReward and by plain transformers: the template adds a line break after the policy's end token."""
    section = Model(str(save_random_model(tmp_path / "m")), lora, head="score")
    model = closed(score_model(section), section)
    trajectories, tokens, mask = conversations(section, ["4", "it is four", "fo"])
    expected = last_scores(model, tokens, mask)
    save_policy(model.policy, load_tokenizer(section), tmp_path / "run" / "final", full_state_dict(model.policy, True))
    if lora is not None:
        with pytest.raises(RecipeError, match=r"of rank 4 on .*m, expected a full model; .*--merge-lora"):
            rewards(tmp_path / "run", trajectories)
    export(str(tmp_path / "run"), tmp_path / "out", merge=lora is not None)
    for path in [tmp_path / "out"] + [tmp_path / "run"] * (lora is None):
        assert rewards(path, trajectories) == pytest.approx(expected, abs=1e-4)

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [tokenizer.apply_chat_template(t.messages, tokenize=False) for t in trajectories]
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(classifier).__name__ == "Qwen2ForSequenceClassification"
    assert classifier.config.pad_token_id == tokenizer.pad_token_id
    logits = classifier(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
    assert logits.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_reward_model_is_trained_further_from_its_folder(tmp_path: Path, lora: Lora | None) -> None:
    section = Model(str(save_random_model(tmp_path / "m")), lora, head="score")
    model = score_model(section)
    tokens, mask = rows_of([3], [[6, 2]], seed=1)
    save_policy(model.policy, load_tokenizer(section), tmp_path / "rm")
    again = load_policy(Model(str(tmp_path / "rm"), lora, head="score"))
    assert has_lora(again) is (lora is not None)
    torch.testing.assert_close(ScoreModel(again)(tokens, mask).scores, model(tokens, mask).scores)
    whole = load_policy(Model(str(tmp_path / "rm"), head="score"))  # an adapter is merged, its head kept
    torch.testing.assert_close(ScoreModel(whole)(tokens, mask).scores, model(tokens, mask).scores)
    assert all(p.requires_grad for p in whole.parameters())
    empty = load_policy(Model(str(tmp_path / "rm"), lora, head="score"), empty=True)
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in again.named_parameters()}


def test_a_head_that_is_new_is_zero_and_the_rest_is_the_policy() -> None:
    policy, scorer = load_policy(Model("tiny")), load_policy(Model("tiny", head="score"))
    head = score_head(scorer)
    assert head is not None
    assert not head.weight.any()
    assert torch.equal(scorer.get_decoder().norm.weight, policy.get_decoder().norm.weight)  # type: ignore[attr-defined]
    assert all(x.is_meta for x in load_policy(Model("tiny", head="score"), empty=True).parameters())


def test_under_lora_the_head_is_trained_whole_in_float32() -> None:
    policy = load_policy(Model("tiny", LORA, head="score", dtype="bfloat16"))
    trained = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    assert all("lora_" in name or name.endswith("score.modules_to_save.default.weight") for name in trained)
    assert len([name for name in trained if "score" in name]) == 1
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert policy.get_decoder().norm.weight.dtype == torch.bfloat16  # type: ignore[attr-defined,union-attr]
    torch.nn.init.ones_(next(p for n, p in trained.items() if "score" in n))
    head = score_head(merge_adapters(policy))
    assert head is not None
    assert bool((head.weight == 1).all())


def test_an_adapter_of_a_policy_is_merged_into_a_reward_model(tmp_path: Path) -> None:
    section = Model(str(save_random_model(tmp_path / "m")), LORA)
    policy = load_policy(section)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    save_policy(policy, load_tokenizer(section), tmp_path / "adapter")
    scorer = load_policy(Model(str(tmp_path / "adapter"), Lora(rank=2, alpha=2), head="score"))  # of another rank
    tokens = torch.tensor([[5, 6, 7]])
    expected = policy.get_base_model().get_decoder()(input_ids=tokens).last_hidden_state
    found = scorer.get_base_model().get_decoder()(input_ids=tokens).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_critic_starts_as_a_reward_model(tmp_path: Path, lora: Lora | None) -> None:
    """The value before a token is the score of what is before it, as in DeepSpeed-Chat."""
    section = Model(str(save_random_model(tmp_path / "m")), lora, head="score")
    model = score_model(section)
    save_policy(model.policy, load_tokenizer(section), tmp_path / "rm")
    critic = ValueModel(*load_backbone(Model(str(tmp_path / "rm"), lora)))
    tokens, mask = rows_of([3], [[6, 2]], seed=1)
    values = critic(tokens, mask)
    before = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    scores = model(tokens, before).scores
    torch.testing.assert_close(values[:, 1:], scores[:, :-1], rtol=1e-4, atol=1e-5)
    assert critic.head.weight.requires_grad
    values.sum().backward()
    assert critic.head.weight.grad is not None


def test_padding_is_no_end_of_a_turn(tmp_path: Path) -> None:
    """A classifier of transformers reads the last token that is no padding: it must be the conversation's last."""
    folder = save_random_model(tmp_path / "m", pad_token_id=None)
    policy = load_tokenizer(Model(str(folder)))
    policy.pad_token = policy.eos_token
    policy.chat_template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    policy.save_pretrained(folder)
    assert load_tokenizer(Model(str(folder))).pad_token == "<|im_end|>"
    section = Model(str(folder), head="score")
    assert load_tokenizer(section).pad_token == "<|endoftext|>"
    model = closed(score_model(section), section)
    trajectories, tokens, mask = conversations(section, ["4", "it is four"])
    save_policy(model.policy, load_tokenizer(section), tmp_path / "rm")
    assert rewards(tmp_path / "rm", trajectories) == pytest.approx(last_scores(model, tokens, mask), abs=1e-4)


def test_models_without_such_a_head_are_refused_with_a_remedy(tmp_path: Path) -> None:
    section = Model(str(save_random_model(tmp_path / "m")), head="score")
    save_policy(load_policy(section), load_tokenizer(section), tmp_path / "rm")
    with pytest.raises(RecipeError, match=r"rm', a reward model, which predicts no tokens; .* model.head: score"):
        load_policy(Model(str(tmp_path / "rm")))
    save_random_model(tmp_path / "cohere", "cohere")
    with pytest.raises(RecipeError, match="no sequence classifier of type cohere; choose another"):
        load_policy(Model(str(tmp_path / "cohere"), head="score"))
    policy = random_model("qwen2")
    from transformers import Qwen2ForSequenceClassification

    policy.config.num_labels = 2
    Qwen2ForSequenceClassification(policy.config).save_pretrained(tmp_path / "two")
    load_tokenizer(section).save_pretrained(tmp_path / "two")
    with pytest.raises(RecipeError, match=r"two', a classifier with 2 labels; a reward model has 1"):
        load_policy(Model(str(tmp_path / "two"), head="score"))


def graded(group: int, reward: float) -> Trajectory:
    found = example_trajectory("4")
    found.group, found.score = group, Score(reward)
    return found


def test_validation_counts_ordered_pairs_of_each_prompt() -> None:
    """Of the rewards 2, 1, 1 two pairs, of scores with the margins 1 and 0; a wrong pair; and a prompt without one."""
    trajectories = [graded(*of) for of in ((3, 2.0), (3, 1.0), (3, 1.0), (5, 0.0), (5, 1.0), (8, 1.0), (8, 1.0))]
    answers = compare_order(trajectories, torch.tensor([1.0, 0.0, 1.0, 0.5, -0.5, 7.0, 8.0]))
    assert [(a.prompt, a.accuracy, a.components) for a in answers] == [
        (3, 0.75, {"margin": 0.5}),
        (5, 0.0, {"margin": -1.0}),
    ]
    assert [t.reward for t in trajectories] == [1.0, 0.0, 1.0, 0.5, -0.5, 1.0, 1.0]
    assert trajectories[0].score == Score(1.0, {"accuracy": 0.75, "recorded": 2.0})
    metrics = dict(order_metrics(answers))
    assert (metrics["accuracy"], metrics["margin"]) == (0.375, -0.25)
    assert 0 <= metrics["accuracy_low"] <= 0.375 <= metrics["accuracy_high"] <= 0.75


RECORDED = ("--rollout.engine=Recorded", "--advantage=null", "--loss=BradleyTerry")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model.head=score",), "rollout.engine TorchEngine samples them; set rollout.engine: Recorded"),
        (("--model.head=score", "--rollout.engine=Recorded"), "loss ClipLoss reads their log-probs; choose loss: Br"),
        (RECORDED, "loss BradleyTerry trains a reward model, but model.head is 'lm'; set model.head: score"),
        ((*RECORDED, "--model.head=score", "--kl_loss.coef=0.1"), "but the recipe has `kl_loss`; remove it"),
        ((*RECORDED, "--model.head=score", "--train.entropy_coef=0.1"), "but the recipe has `train.entropy_coef`"),
        ((*RECORDED, "--model.head=score", "--validation.sampling.top_p=0.9"), "`validation.sampling`; remove it"),
        ((*RECORDED, "--model.head=score", "--train.aggregation=token_mean"), "is per sequence"),
        (
            (*RECORDED, "--model.head=score", "--save.keep_best=validation/reward", "--validation.every=1"),
            "expected one of validation/accuracy, validation/accuracy_low, validation/accuracy_high, validation/margin",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_a_reward_model_is_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse("fit", ["--recipe=quickstart", *options])
    assert message in str(error.value)


def test_a_reward_models_validation_needs_no_reward() -> None:
    options = ("--model.head=score", "--reward=null", "--save.keep_best=validation/margin", "--validation.every=1")
    recipe = parse("fit", ["--recipe=quickstart", *RECORDED, *options]).recipe
    assert isinstance(recipe.method, RewardModelling)
