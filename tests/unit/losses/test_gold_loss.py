"""Divergences from a teacher with another tokenizer: numbers by hand, TRL's, and gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_authors.models import build_tokenizer
from torch import Tensor

from rlkit.data.retokenize import Vocabularies
from rlkit.data.teacher import TeacherPrompts
from rlkit.losses import Distillation
from rlkit.models.load import load_policy
from rlkit.ops.kl import jensen_shannon, sorted_distance, with_rest
from rlkit.ops.logps import OutputLayer, TokenStatistics, logits_logps, token_logps
from rlkit.recipe import Model
from rlkit.rollout.collate import collate
from rlkit.rollout.template import ChatTemplate
from rlkit.train.teacher import retokenized_rows
from rlkit.types import PolicyOutput, Reads, Rendered
from tests.bench.gold import SHARED, TEACHER_SHARED, logits
from tests.conftest import read_jsonl, rlkit_in_process
from tests.other_tokenizer import other_tokenizer
from tests.served import DISTILL, save_teacher
from tests.unit.phases import ready
from tests.unit.train.test_teacher_context import trajectory

TRL = {
    0.0: (0.45060518, [-0.00433411, 0.00943492, -0.00487691, -0.00060982, 0.00038592, -0.14913872, 0.01281793,
        -0.01821418, 0.10342842, 0.05110656, -0.00457122, 0.00085618, -0.00248025, -0.03967983, 0.04587512]),
    0.5: (0.10212835, [0.001371, -0.02216644, 0.01769509, 0.00400703, -0.00090668, -0.00571651, -0.00106999,
        -0.01003429, 0.02108696, -0.00426617, 0.0008681, -0.0001094, 0.00159187, 0.00351136, -0.00586193]),
    1.0: (0.63094276, [0.01089115, -0.24149439, 0.19429746, 0.04618363, -0.0098779, -0.01421872, -0.01748604,
        -0.03677548, 0.13819911, -0.06971887, 0.01163689, -0.00174885, 0.01600399, 0.06781292, -0.09370494]),
}  # fmt: skip
"""For each beta the divergence over shared tokens and its gradient, of TRL 1.16: `python -m tests.bench.gold`."""
TRL_ULD = (0.28799179, [0.00940399, -0.07669607, 0.0579586, 0.0124706, -0.00313711, -0.00071741, 0.01086927,
    -0.01816883, -0.03532005, 0.04333703, -0.00741251, -0.00732286, -0.00752375, -0.05098568, 0.07324481])  # fmt: skip


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def both(policy: Tensor, chunked: bool) -> tuple[TokenStatistics, TokenStatistics]:
    """Return the teacher's statistics of `tests.bench.gold`, and the policy's of the same tokens."""
    _, teacher = logits()
    vocabularies = Vocabularies(ids(*SHARED), ids(1, 4), ids(*TEACHER_SHARED), ids(0, 3, 4))
    targets = torch.zeros(3, dtype=torch.long)
    theirs = logits_logps(teacher, targets, reads=Reads(entropy=False, top=9, split=vocabularies[2:]))
    assert theirs.ids is not None
    reads, requested = Reads(entropy=False, top=9, split=vocabularies[:2]), vocabularies.own(theirs.ids[:, :3])
    if chunked:  # a chunk of one token
        layer = OutputLayer(torch.eye(5))
        return theirs, token_logps(policy, layer, targets, reads=reads, ids=requested, memory=20)
    return theirs, logits_logps(policy, targets, reads=reads, ids=requested)


@pytest.mark.parametrize("beta", TRL)
@pytest.mark.parametrize("chunked", [True, False])
def test_parts_are_trls(beta: float, chunked: bool) -> None:
    policy = logits()[0].requires_grad_()
    theirs, mine = both(policy, chunked)
    assert theirs.top is not None
    assert mine.top is not None
    divergence = jensen_shannon(theirs.top[:, :3], mine.top[:, :3], beta).mean()
    distance = sorted_distance(theirs.top[:, 3:-1], mine.top[:, 3:-1]).mean()
    for part, (value, gradient) in ((divergence, TRL[beta]), (distance, TRL_ULD)):
        assert part.item() == pytest.approx(value, rel=1e-5)
        [computed] = torch.autograd.grad(part, policy, retain_graph=True)
        torch.testing.assert_close(computed.flatten(), torch.tensor(gradient), rtol=1e-4, atol=1e-6)


def test_the_most_likely_tokens_of_each_part() -> None:
    """Of probabilities 0.1, 0.2, 0.3 and 0.4 the last is shared with the first: one of each part, and 0.3 remains."""
    reads = Reads(entropy=False, top=1, split=(ids(0, 3), ids(2, 1)))
    statistics = logits_logps(torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log(), ids(0), reads=reads)
    assert statistics.ids is not None
    assert statistics.top is not None
    assert statistics.ids.tolist() == [[3, 2]]
    assert statistics.top.exp().tolist() == [pytest.approx([0.4, 0.3, 0.3])]


def test_distances_and_rests_by_hand() -> None:
    """|0.5 - 0.3| + |0.2 - 0.1| + |0.1 - 0|; the rest of a certain outcome is finite and has no gradient."""
    distance = sorted_distance(torch.tensor([0.5, 0.2, 0.1]).log(), torch.tensor([0.3, 0.1]).log())
    assert distance.item() == pytest.approx(0.4)
    assert sorted_distance(torch.zeros(2, 0), torch.zeros(2, 0)).tolist() == [0, 0]
    certain = torch.tensor([[0.0], [math.log(0.25)]]).requires_grad_()
    rest = with_rest(certain)[:, 1]
    assert rest[1].exp().item() == pytest.approx(0.75)
    rest.sum().backward()
    assert certain.grad is not None
    assert certain.grad.flatten().tolist() == [0, pytest.approx(-1 / 3)]


def test_spans_by_hand() -> None:
    """Forward KL: a text of 0.6 that has 0.5 * 0.8 in the policy, a shared token, and a token that is not read."""
    batch, nan = ready(), math.nan
    batch.mask = torch.tensor([[True] * 4] * len(batch))
    batch.teacher_spans = torch.tensor([[0, 0, 2, 3]] * len(batch))
    batch.teacher_logps = torch.tensor([[0.6, 0.6, 0.7, nan]] * len(batch)).log()
    batch.teacher_top_ids = torch.zeros(*batch.mask.shape, 1, dtype=torch.long)
    top = torch.tensor([[nan] * 4, [nan] * 4, [0.7, 0.2, 0.05, 0.05], [nan] * 4]).log()
    batch.teacher_top_logps = top.expand(len(batch), 4, 4).clone()
    logps = torch.tensor([[0.5, 0.8, 0.5, 0.1]] * len(batch)).log().requires_grad_()
    policy = torch.tensor([0.5, 0.3, 0.2]).log().expand(len(batch), 4, 3)
    output = Distillation(beta=0, unmatched=2)(PolicyOutput(logps, None, top_logps=policy), batch)
    text = 0.6 * math.log(0.6 / 0.4) + 0.4 * math.log(0.4 / 0.6)
    token = 0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5)
    distance = abs(0.2 - 0.3) + 0.05
    expected = [text / 2, text / 2, token + 2 * distance, 0]
    assert output.per_token.tolist() == [pytest.approx(expected, rel=1e-5)] * len(batch)
    metrics = {name: float(value) for name, value in output.metrics.items()}
    mean = (text + token) / 3
    assert metrics == {
        "divergence": pytest.approx(mean),
        "teacher_mass": pytest.approx(0.7),
        "uld": pytest.approx(0.15),
    }
    output.per_token.sum().backward()
    assert logps.grad is not None  # d/ds of -0.6 s - 0.4 log(1 - e^s), at 0.4
    assert logps.grad[0].tolist() == pytest.approx([-0.6 + 0.4 * 0.4 / 0.6] * 2 + [0, 0], rel=1e-5)


def templates() -> tuple[ChatTemplate, ChatTemplate]:
    policy, teacher = build_tokenizer(), other_tokenizer("1 2")
    return ChatTemplate(policy, {policy.eos_token_id}), ChatTemplate(teacher, {teacher.eos_token_id})


def test_vocabularies_share_names_and_the_end_of_a_turn() -> None:
    policy, teacher = templates()
    own, other = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    vocabularies = Vocabularies.of(policy, teacher, len(own) + 1, len(other))
    pairs = dict(zip(vocabularies.shared.tolist(), vocabularies.teacher_shared.tolist(), strict=True))
    assert len(pairs) == 257  # 256 bytes, and the end
    assert pairs[own["#"]] == other["#"]
    assert pairs[policy.tokenizer.eos_token_id] == teacher.tokenizer.eos_token_id
    assert len(own) in vocabularies.others.tolist()  # a column without a token
    assert sorted(vocabularies.teacher_others.tolist()) == sorted(other[name] for name in ("12", "<|turn|>", "<|pad|>"))
    assert vocabularies.own(ids(other["b"], other["a"])).tolist() == [own["b"], own["a"]]


def test_distributions_are_those_of_spans_of_single_tokens() -> None:
    """By hand: `12` is one token of the teacher, `a` one of both; a second turn is not read."""
    policy, teacher = templates()
    encode = policy.codec.encode
    rows = [trajectory([1, *encode("12a"), 5, *encode("a")], [0, 1, 1, 1, 0, 1])]
    read = retokenized_rows(
        collate(rows), rows, [Rendered([9])], policy.codec, TeacherPrompts(9, None, template=teacher)
    )
    restored = read.restore_single(torch.tensor([[[0.0], [-1.0], [-2.0]]]))[0, :, 0]
    assert restored[[0, 3, 4]].tolist() == [0, -2, 0]
    assert restored[[1, 2, 5]].isnan().all()
    assert read.restore(torch.tensor([[0.0, -1, -2]]))[0, :5].tolist() == [0, -1, -1, -2, 0]
    assert read.restore(torch.zeros(1, 3))[0, 5].isnan()


def test_the_same_tokenizer_teaches_as_without_another(tmp_path: Path) -> None:
    """A teacher whose every token is shared: the divergence, and the step, are those of the plain loss."""
    teacher = load_policy(Model("tiny"))
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(0.5)
    save_teacher(teacher, tmp_path)
    runs: list[dict[str, Any]] = []
    for name in ("true", "false"):
        words = (
            "--loss=Distillation",
            "--loss.unmatched=0",
            f"--teacher.retokenize={name}",
            "--rollout.sampling.temperature=0.7",
        )
        done = rlkit_in_process("fit", *DISTILL, *words, f"--out={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        runs.append(read_jsonl(tmp_path / name / "metrics.jsonl")[-1])
    assert runs[1]["policy/divergence"] > 1e-3
    for metric in ("policy/divergence", "policy/loss", "policy/teacher_mass", "teacher/unread", "grad_norm"):
        assert runs[0][metric] == pytest.approx(runs[1][metric], rel=1e-3), metric
