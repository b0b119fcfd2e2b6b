"""Divergences over a teacher's most likely tokens: numbers by hand, TRL's, gradients, and runs that distil by them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlkit_inspect.explain import explain
from safetensors.torch import load_file
from torch import Tensor

from rlkit.losses import Distillation
from rlkit.models.actor import Actor
from rlkit.models.load import load_policy
from rlkit.models.reference import FrozenPolicy
from rlkit.ops.kl import jensen_shannon
from rlkit.ops.logps import MIN_PROB, OutputLayer, TokenStatistics, logits_logps, token_logps
from rlkit.recipe import Model, Teacher
from rlkit.testing import example_trajectory, random_model
from rlkit.train.teacher import compute_teacher_logps
from rlkit.types import PolicyOutput, Reads, TrainBatch
from tests.bench.gkd import logits
from tests.conftest import FAST, ROOT, read_jsonl, rlkit_in_process
from tests.unit.phases import context, ready, recipe, scored

TINY = ROOT / "rlkit" / "models" / "tiny"
P, Q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
LOGPS_ALONE = Reads(entropy=False)


def test_divergences_by_hand() -> None:
    """Of (1/2, 1/4, 1/4) and (1/4, 1/4, 1/2): both ways log(2) / 4; with beta 1/2 the mixture is (3/8, 1/4, 3/8)."""
    half = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    quarter = 0.25 * (0.5 * math.log(8 / 5) + 0.25 * math.log(4 / 7)) + 0.75 * (
        0.25 * math.log(4 / 5) + 0.5 * math.log(8 / 7)
    )
    for beta, expected in ((0.0, math.log(2) / 4), (1.0, math.log(2) / 4), (0.5, half), (0.25, quarter)):
        assert jensen_shannon(P.log(), Q.log(), beta).item() == pytest.approx(expected, rel=1e-5)
        assert jensen_shannon(P.log(), P.log(), beta).item() == pytest.approx(0, abs=1e-7)
    near = jensen_shannon(P.double().log(), Q.double().log(), 1e-6) / 1e-6
    assert near.item() == pytest.approx(math.log(2) / 4, rel=1e-4)


def test_all_tokens_but_the_most_likely_ones_are_one_outcome() -> None:
    """The teacher's first token has 0.6, the others 0.4 together; the policy has 0.2 and 0.8."""
    teacher = torch.tensor([[0.1, 0.6, 0.1, 0.2]]).log()
    policy = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    first = logits_logps(teacher, torch.tensor([0]), reads=Reads(top=1))
    assert first.ids is not None
    assert first.top is not None
    assert first.ids.tolist() == [[1]]
    assert first.top.exp().tolist() == [pytest.approx([0.6, 0.4])]
    found = logits_logps(policy, torch.tensor([0]), reads=LOGPS_ALONE, ids=first.ids).top
    assert found is not None
    expected = 0.6 * math.log(0.6 / 0.2) + 0.4 * math.log(0.4 / 0.8)
    assert jensen_shannon(first.top, found, 0.0).item() == pytest.approx(expected, rel=1e-5)


TRL = {
    0.0: (2.21461058, [-0.18804976, 0.15435044, 0.19603315, -0.01505752, -0.14727634, -0.00638814, 0.00392035,
        -0.15954828, 0.10858819, 0.05342785, -0.00673583, -0.3206526, -0.02158256, 0.07528666, 0.27368432]),
    0.1: (0.14903940, [-0.01271758, 0.00857497, 0.01146961, -0.00236322, -0.00496378, -0.00050096, 0.00032229,
        -0.01376159, 0.0091035, 0.00483676, -0.00099828, -0.00561438, -0.00212335, 0.00245342, 0.00628259]),
    0.5: (0.34037217, [-0.02213719, 0.01432428, 0.02329418, -0.00985465, -0.00562662, -0.00101444, 0.00062144,
        -0.03456045, 0.01958673, 0.01536672, -0.00313381, -0.00534019, -0.00507327, 0.00615238, 0.00739489]),
    0.9: (0.13999365, [-0.00782208, 0.00296023, 0.01229956, -0.00578082, -0.00165689, -0.00032477, 8.915e-05,
        -0.01264113, 0.0043013, 0.00857545, -0.00143976, -0.001406, -0.00195792, 0.00486412, -6.044e-05]),
    1.0: (1.90693808, [-0.11192279, -0.09599327, 0.33363014, -0.10403768, -0.02167629, -0.00368052, -3.685e-05,
        -0.14904481, 0.02502304, 0.12773919, -0.01901296, -0.01565679, -0.0244787, 0.11455309, -0.05540453]),
}  # fmt: skip
"""For each beta the loss and its gradient by the policy's logits, of TRL 1.16: `python -m tests.bench.gkd`."""


@pytest.mark.parametrize("beta", TRL)
@pytest.mark.parametrize("chunked", [True, False])
def test_over_the_whole_vocabulary_it_is_trls_loss(beta: float, chunked: bool) -> None:
    policy, teacher = logits()
    policy.requires_grad_()
    targets, eye = torch.zeros(3, dtype=torch.long), torch.eye(5)
    theirs = logits_logps(teacher, targets, 0.8, reads=Reads(top=5))
    if chunked:  # a chunk of one token
        mine = token_logps(policy, OutputLayer(eye, None, 0.8), targets, reads=LOGPS_ALONE, ids=theirs.ids, memory=20)
    else:
        mine = logits_logps(policy, targets, 0.8, reads=LOGPS_ALONE, ids=theirs.ids)
    assert mine.top is not None
    assert theirs.top is not None
    loss = jensen_shannon(theirs.top, mine.top, beta).mean()
    [gradient] = torch.autograd.grad(loss, policy)
    value, expected = TRL[beta]
    assert loss.item() == pytest.approx(value, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient.flatten(), torch.tensor(expected), rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 20), st.integers(2, 30), st.integers(1, 40), st.booleans(), st.sampled_from([200, 1 << 20]))
def test_log_probs_equal_log_softmax_with_gradients(n: int, vocabulary: int, k: int, frozen: bool, memory: int) -> None:
    generator = torch.Generator().manual_seed(n * 100 + vocabulary)
    hidden = torch.randn(n, 8, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=generator).requires_grad_(not frozen)
    targets = torch.randint(vocabulary, (n,), generator=generator)
    ids = torch.rand(n, vocabulary, generator=generator).topk(min(k, vocabulary)).indices
    leaves = [hidden] if frozen else [hidden, weight]
    columns, pull = min(k, vocabulary) + (k < vocabulary), torch.randn(n, vocabulary + 3, generator=generator)

    def gradients(found: TokenStatistics) -> list[Tensor]:
        assert found.top is not None
        assert found.entropy is not None
        assert found.mean is not None
        top = (found.top[:, :columns] * pull[:, :columns]).sum()  # not the rest where it is nothing
        others = (torch.stack((found.logps, found.entropy, found.mean), -1) * pull[:, -3:]).sum()
        return [found.top, *torch.autograd.grad(top + others, leaves)]

    ours = gradients(token_logps(hidden, OutputLayer(weight, None, 0.7), targets, ids=ids, memory=memory))
    plain = gradients(logits_logps(hidden @ weight.T, targets, 0.7, ids=ids))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_it_compares_with_the_teacher_alone() -> None:
    """Neither a reward nor the policy that sampled is part of the objective, so no pass is spent on the latter."""
    made = recipe(loss=Distillation(), teacher=Teacher("tiny"), advantage=None)
    assert not made.needs_old_logps
    assert not {"reward", "old policy"} & {name for name, _ in explain(made)}


def test_a_rest_of_almost_nothing_has_a_gradient() -> None:
    """Of logits 0 and -60 the second has e^-60: the log-prob of the rest moves with it alone, by 1."""
    for low, slope in ((-60.0, 1.0), (-600.0, 0.0)):
        hidden = torch.tensor([[0.0, low, low - 9]]).requires_grad_()
        found = token_logps(
            hidden, OutputLayer(torch.eye(3)), torch.tensor([0]), reads=LOGPS_ALONE, ids=torch.tensor([[0]])
        )
        assert found.top is not None
        assert found.top[0, 1].item() == pytest.approx(
            max(low + math.log1p(math.exp(-9)), math.log(MIN_PROB)), rel=1e-5
        )
        (2.0 * found.top[0, 1]).backward()
        shares = [0.0, slope / (1 + math.exp(-9)), slope * math.exp(-9) / (1 + math.exp(-9))]
        assert hidden.grad is not None
        assert hidden.grad.tolist() == [
            pytest.approx([2 * (x - (slope if i == 0 else 0)) for i, x in enumerate(shares)], abs=1e-6)
        ]


def batch_of(teacher: Tensor, ids: Tensor) -> TrainBatch:
    batch = ready()
    batch.teacher_top_logps, batch.teacher_top_ids = teacher, ids
    batch.check()
    return batch


def test_the_loss_is_that_of_the_tokens_that_a_teacher_has_read() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, policy = (torch.randn(4, 4, 3, generator=generator).log_softmax(-1) for _ in range(2))
    batch = batch_of(teacher.clone(), torch.zeros(4, 4, 2, dtype=torch.long))
    policy.requires_grad_()
    out = PolicyOutput(policy[..., 0], None, top_logps=policy)
    whole = Distillation(0.3)(out, batch)
    torch.testing.assert_close(whole.per_token, jensen_shannon(teacher, policy, 0.3))
    row, place = (int(x[0]) for x in batch.mask.nonzero(as_tuple=True))
    assert batch.teacher_top_logps is not None
    batch.teacher_top_logps[row, place] = math.nan
    found = Distillation(0.3)(out, batch)
    left = batch.mask.clone()
    left[row, place] = False
    assert found.per_token[row, place].item() == 0
    assert torch.equal(found.per_token[left], whole.per_token[left])
    assert found.metrics["divergence"].item() == pytest.approx(whole.per_token[left].mean().item(), rel=1e-6)
    assert found.metrics["teacher_mass"].item() == pytest.approx(1 - teacher[left][:, -1].exp().mean().item(), rel=1e-6)
    [gradient] = torch.autograd.grad(found.per_token[batch.mask].sum(), policy)
    assert gradient.isfinite().all()
    assert not gradient[row, place].any()


def test_probabilities_of_zero_are_finite() -> None:
    """Columns that one model masks and the other does not."""
    teacher = torch.tensor([0.0, -math.inf, -math.inf]).expand(4, 4, 3)
    policy = torch.tensor([-math.inf, 0.0, -math.inf]).expand(4, 4, 3).clone().requires_grad_()
    batch = batch_of(teacher, torch.zeros(4, 4, 2, dtype=torch.long))
    for beta in (0.0, 0.3, 1.0):
        loss = Distillation(beta)(PolicyOutput(policy[..., 0], None, top_logps=policy), batch).per_token
        assert loss.isfinite().all()
        assert (loss > 0.5).all()
        assert torch.autograd.grad(loss.sum(), policy)[0].isfinite().all()


@pytest.mark.parametrize(("theirs", "mine"), [(300, 260), (260, 300)])
def test_models_of_one_tokenizer_may_differ_in_columns(theirs: int, mine: int) -> None:
    """The teacher's tokens are among the policy's columns, its mass in others is among the rest; 500 are asked for."""
    policy = Actor(random_model("qwen2", vocab_size=mine))
    made = context(recipe(loss=Distillation(top_k=500), teacher=Teacher("teacher")))
    made.models.teachers = {"teacher": FrozenPolicy.__new__(FrozenPolicy)}
    made.models.teachers["teacher"].actor = Actor(random_model("llama", vocab_size=theirs)).requires_grad_(False)
    made.models.actor, made.data.teacher_prompts, made.data.vocabularies = policy, None, None
    batch = scored()
    compute_teacher_logps(made.data, made.models, made.service, batch, [example_trajectory("4")] * 4)
    ids, logps = batch.required("teacher_top_ids"), batch.required("teacher_top_logps")
    assert batch.teacher_logps is None
    assert (ids.shape, logps.shape) == ((4, 4, 260), (4, 4, 261))
    assert int(ids.max()) < mine
    torch.testing.assert_close(logps[batch.mask].exp().sum(-1), torch.ones(int(batch.mask.sum())))
    assert bool((logps[batch.mask][:, -1].exp() > 0.01).all()) == (theirs > mine)
    assert not ids[~batch.mask].any()
    out = policy(batch.tokens, batch.mask, reads=Reads(ids=ids))
    assert out.top_logps is not None
    torch.testing.assert_close(out.top_logps[batch.mask].exp().sum(-1), torch.ones(int(batch.mask.sum())))


def test_the_trainers_log_probs_need_no_pass_of_their_own() -> None:
    made = recipe(loss=Distillation(), advantage=None, reward=None)
    assert not replace(made, teacher=SimpleNamespace(path="tiny")).needs_old_logps  # type: ignore[arg-type]
    assert replace(made, loss=recipe().loss, teacher=SimpleNamespace(path="tiny")).needs_old_logps  # type: ignore[arg-type]


RUN = ("--recipe=quick_distill", *FAST, "--validation=null", "--out=run", "--teacher.path=tiny", "--loss=Distillation")
RECORDED = ("--rollout={engine: Recorded}", "--reward=null")


def fit(folder: Path, *words: str) -> list[dict[str, Any]]:
    done = rlkit_in_process("fit", *RUN, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return read_jsonl(folder / "run" / "metrics.jsonl")


@pytest.mark.parametrize("words", [(), RECORDED, ("--reward=null", "--loss.beta=1", "--loss.top_k=1000")])
def test_a_teacher_that_is_the_policy_teaches_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    [line] = fit(tmp_path, "--train.steps=1", "--train.weight_decay=0", *words)
    assert line["policy/divergence"] == pytest.approx(0, abs=1e-6)
    assert line["grad_norm"] < 1e-4
    assert line["teacher/unread"] == 0
    assert 0.5 < line["policy/teacher_mass"] <= 1
    assert "teacher/kl" not in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(*RECORDED, "--loss.beta=0"), ("--model.lora={}", "--loss.top_k=4", "--train.lr=3e-2")]
)
def test_a_policy_comes_nearer_to_its_teacher(tmp_path: Path, words: tuple[str, ...]) -> None:
    random_model("qwen2", seed=5, dtype=torch.float32).save_pretrained(tmp_path / "teacher")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (TINY / name).exists():
            (tmp_path / "teacher" / name).write_bytes((TINY / name).read_bytes())
    lines = fit(
        tmp_path, "--teacher.path=teacher", "--train.steps=6", "--train.lr=3e-3", "--train.warmup_steps=0", *words
    )
    assert lines[-1]["policy/divergence"] < 0.9 * lines[0]["policy/divergence"]


def test_self_distillation_reads_the_answer_in_its_context(tmp_path: Path) -> None:
    lines = fit(tmp_path, "--teacher={path: null, context: '{prompt} It is {answer}.'}")
    assert all(math.isfinite(line["policy/divergence"]) for line in lines)
    assert lines[0]["policy/divergence"] > 1e-4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--teacher=null",), "loss Distillation reads a teacher, but the recipe has no `teacher:`; add one"),
        (("--teacher.coef=0.5",), "teacher.coef is 0.5, the weight of an advantage, but loss Distillation reads none"),
        (
            ("--mix={more: {weight: 1, task: Arithmetic, loss: Distillation}}",),
            "mix.more.loss Distillation reads a teacher, but a mixture has none",
        ),
        (("--advantage=GRPO",), "loss Distillation reads no advantages, but the recipe has a section `advantage:`"),
        (("--loss.beta=1.1",), "a number from 0 to 1"),
        (("--loss.top_k=0",), "a whole number from 1 to 65536"),
    ],
)
def test_what_does_not_go_with_it(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = rlkit_in_process("fit", *RUN, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_explain_shows_the_divergence() -> None:
    over = ", over the teacher's 64 most likely tokens and all others as one"
    assert Distillation(0.0).explain() == "KL(teacher || policy)" + over
    assert Distillation(1.0).explain() == "KL(policy || teacher)" + over
    mixed = "0.3 KL(teacher || m) + 0.7 KL(policy || m), m = 0.3 teacher + 0.7 policy"
    assert Distillation(0.3).explain() == mixed + over


def test_weights_stay_if_the_teacher_has_no_numbers(tmp_path: Path) -> None:
    """A teacher whose log-probs are not finite is logged as one that has read nothing."""
    policy = load_policy(Model("tiny"))
    with torch.no_grad():
        policy.get_output_embeddings().weight.fill_(math.nan)
    policy.save_pretrained(tmp_path / "teacher")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (TINY / name).exists():
            (tmp_path / "teacher" / name).write_bytes((TINY / name).read_bytes())
    [line] = fit(tmp_path, "--teacher.path=teacher", "--train.steps=1", "--train.weight_decay=0")
    assert line["teacher/unread"] > 0
    before, after = (load_file(path / "model.safetensors") for path in (TINY, tmp_path / "run" / "final"))
    assert all(torch.equal(before[name], after[name]) for name in before)
