"""A teacher with another tokenizer: what it reads, and the spans at which both models' tokens end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rlkit_authors.models import build_tokenizer

from rlkit.data.retokenize import Span, align, retokenize
from rlkit.data.teacher import TeacherPrompts
from rlkit.models.load import load_tokenizer, stop_ids
from rlkit.recipe import Model
from rlkit.rollout.collate import collate
from rlkit.rollout.rendering import TokenCodec
from rlkit.rollout.template import ChatTemplate
from rlkit.train.credit import distill
from rlkit.train.teacher import retokenized_rows
from rlkit.types import Rendered
from tests.conftest import FAST, read_jsonl, rlkit_in_process
from tests.other_tokenizer import other_tokenizer, save_other_model
from tests.sentencepiece import TEMPLATES, sentencepiece_tokenizer
from tests.unit.phases import scored
from tests.unit.train.test_teacher_context import by_transformers, taught, trajectory

RUN = ("--recipe=quick_distill", *FAST, "--validation=null", "--out=run")
MERGES = ("# #", "## ##", "1 2")


def codec() -> TokenCodec:
    tokenizer = build_tokenizer()
    return TokenCodec(tokenizer, {tokenizer.eos_token_id})


def template(*merges: str) -> ChatTemplate:
    tokenizer = other_tokenizer(*merges)
    return ChatTemplate(tokenizer, {tokenizer.eos_token_id})


@pytest.mark.parametrize(
    ("pieces", "teacher_pieces", "spans"),
    [
        (["a", "b"], ["ab"], [(0, 2, 0, 1)]),
        (["ab"], ["a", "b"], [(0, 1, 0, 2)]),
        (["ab", "c", "d"], ["a", "bc", "d"], [(0, 2, 0, 2), (2, 3, 2, 3)]),
        (["a", "", "é", "b"], ["aé", "b"], [(0, 3, 0, 1), (3, 4, 1, 2)]),
        (["a", "", "", "€"], ["a", "", "€"], [(0, 1, 0, 1), (1, 4, 1, 3)]),
        (["a", "b", "c"], ["a", "B", "c"], [(0, 1, 0, 1)]),
        (["a", "b"], ["a", "b", "c"], [(0, 1, 0, 1), (1, 2, 1, 2)]),
        (["a", "", "\ufffd", "b"], ["a", "\ufffd", "b"], [(0, 1, 0, 1), (3, 4, 2, 3)]),
        ([], [], []),
        (["a"], [], []),
    ],
)
def test_spans_by_hand(pieces: list[str], teacher_pieces: list[str], spans: list[Any]) -> None:
    """An empty piece is continued in the next; after a difference, and of bytes that are no text, there are none."""
    assert align(pieces, teacher_pieces) == spans
    mirrored = [(s.teacher_start, s.teacher_end, s.start, s.end) for s in align(teacher_pieces, pieces)]
    assert mirrored == spans


def test_pieces_are_what_each_id_completes() -> None:
    """A character of three bytes, a special token, a byte that is none, and one whose character is cut off."""
    own = codec()
    ids = own.encode("a€<|im_end|>b")
    assert own.pieces(ids) == ["a", "", "", "€", "<|im_end|>", "b"]
    first_byte = ids[1]
    assert own.pieces([first_byte, *own.encode("a")]) == ["", "\ufffda"]
    assert own.pieces([*own.encode("a"), first_byte, ids[2]]) == ["a", "", "\ufffd"]
    assert own.pieces([]) == []


def test_pieces_of_a_fallback_to_bytes() -> None:
    """As in tokenizers of SentencePiece: `▁` is a space but at the start, and one bad byte spoils all beside it."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", "▁a", "b"])}
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    core = Core(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    own = TokenCodec(tokenizer, {1})
    a, b, euro = 2, 3, [4 + byte for byte in "€".encode()]
    assert own.pieces([a, a, *euro, b]) == ["a", " a", "", "", "€", "b"]
    pieces = own.pieces([a, euro[0], b, b])
    assert pieces[0] == "a"
    assert "\ufffd" in "".join(pieces[1:])
    assert len(pieces) == 4


def test_the_teacher_reads_the_text_and_its_own_end() -> None:
    """By hand: `####` is one token of the teacher and `12` another; the policy has one for each byte."""
    own, other = codec(), template(*MERGES)
    vocabulary = other.tokenizer.get_vocab()
    ids, spans = retokenize([*own.encode("####1212"), own.tokenizer.eos_token_id], own, other)
    assert ids == [vocabulary[token] for token in ("####", "12", "12", "<|eot|>")]
    assert spans == [(0, 4, 0, 1), (4, 6, 1, 2), (6, 8, 2, 3), (8, 9, 3, 4)]
    cut = [*own.encode("€")[:2], own.tokenizer.eos_token_id]
    ids, spans = retokenize(cut, own, other)
    assert other.codec.decode(ids) == "\ufffd<|eot|>"
    assert spans == [Span(2, 3, len(ids) - 1, len(ids))]
    assert retokenize(own.encode("12"), own, other) == ([vocabulary["12"]], [(0, 2, 0, 1)])


@pytest.mark.parametrize("spaces", ["segments", "first"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_teacher_of_sentencepiece_reads_a_space_at_the_start(spaces: Any, name: str) -> None:
    """Its decoder leaves out the first space of a text, which a completion has after a colon."""
    tokenizer = sentencepiece_tokenizer(spaces, TEMPLATES[name])
    teacher, own = ChatTemplate(tokenizer, {tokenizer.eos_token_id}), codec()
    for text in (" Hi", "  Hi", "Hi", "\nHi"):
        ids, spans = retokenize(own.encode(text), own, teacher)
        assert (spans[0].start, spans[-1].end) == (0, len(text)), text
        assert (spans[0].teacher_start, spans[-1].teacher_end) == (0, len(ids)), text


def test_log_probs_of_a_span_are_at_all_of_its_tokens() -> None:
    """By hand: `####1` is two tokens, of which the second does not fit the teacher's context in the second row."""
    own, other = codec(), template(*MERGES)
    rows = [trajectory([1, 2, *own.encode("####1")], [0, 0, 1, 1, 1, 1, 1]), trajectory(own.encode("a12"), [0, 1, 1])]
    starts = [Rendered([9, 9]), Rendered([8, 8, 8])]
    read = retokenized_rows(collate(rows), rows, starts, own, TeacherPrompts(4, None, template=other))
    vocabulary = other.tokenizer.get_vocab()
    assert read.batch.tokens.tolist() == [[9, 9, vocabulary["####"], vocabulary["1"]], [8, 8, 8, vocabulary["12"]]]
    assert read.batch.mask.int().tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]
    assert read.restore(torch.tensor([[5.0, 5, -2, -3], [5, 5, 5, -4]])).tolist() == [
        [0, 0, -2, -2, -2, -2, -3],
        [0, -4, -4, 0, 0, 0, 0],
    ]
    assert read.starts.tolist() == [[0, 1, 2, 2, 2, 2, 6], [0, 1, 1, 3, 4, 5, 6]]
    shorter = retokenized_rows(collate(rows), rows, [None, starts[1]], own, TeacherPrompts(3, None, template=other))
    restored = shorter.restore(torch.zeros(shorter.batch.tokens.shape))
    assert restored.isnan().tolist() == collate(rows).mask.tolist()
    empty = retokenized_rows(collate([]), [], [], own, TeacherPrompts(3, None, template=other))
    assert empty.restore(torch.zeros(0, 0)).shape == (0, 0)


def test_a_span_is_one_action_of_the_policy() -> None:
    """By hand: log-probs of -1 and -2 where the teacher has -1.5 of both, and -1 where it has -0.75."""
    batch = scored()
    batch.mask = torch.tensor([[False, True, True, True]] * len(batch))
    batch.trainer_logps = torch.tensor([[0.0, -1, -2, -1]] * len(batch))
    batch.teacher_logps = torch.tensor([[0.0, -1.5, -1.5, -0.75]] * len(batch))
    batch.teacher_spans = torch.tensor([[0, 1, 1, 3]] * len(batch))
    batch.advantages = torch.zeros(batch.mask.shape)
    metrics = distill(batch, 2.0, lambda x: x)
    assert batch.advantages.tolist() == [[0, 3, 3, 0.5]] * len(batch)
    assert metrics == {"teacher/kl": pytest.approx((-1.5 - 0.25) / 3), "teacher/unread": 0}


def test_the_gradient_is_that_of_the_divergence_of_texts() -> None:
    """Over all four texts of two letters, which are single tokens of the teacher: the mean of A grad log pi."""
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)  # of the first letter, and of the second after each
    first = torch.stack((logits[0], -logits[0])).log_softmax(0)
    second = torch.stack((logits[1:], -logits[1:]), -1).log_softmax(-1)
    logps = torch.stack([torch.stack((first[i], second[i, j])) for i in (0, 1) for j in (0, 1)])
    teacher = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    divergence = (logps.sum(-1).exp() * (logps.sum(-1) - teacher)).sum()
    [expected] = torch.autograd.grad(divergence, logits, retain_graph=True)

    batch = scored()
    batch.mask = torch.tensor([[True, True, False, False]] * 4)
    batch.trainer_logps = torch.nn.functional.pad(logps.detach(), (0, 2))
    batch.teacher_logps = torch.nn.functional.pad(teacher[:, None].expand(4, 2), (0, 2))
    batch.teacher_spans = torch.tensor([[0, 0, 2, 3]] * 4)
    batch.advantages = torch.zeros(4, 4)
    distill(batch, 1.0, lambda x: x)
    weighed = logps.detach().sum(-1, keepdim=True).exp() * batch.advantages[:, :2] * logps
    [found] = torch.autograd.grad(-weighed.sum(), logits)
    torch.testing.assert_close(found, expected)


def test_log_probs_are_those_of_transformers(tmp_path: Path) -> None:
    """Sums over a completion are those of one plain pass over the teacher's own rendering of the conversation."""
    folder = str(save_other_model(tmp_path / "teacher", *MERGES))
    seen = taught(tmp_path, teacher={"path": folder, "retokenize": True})
    [batch], [line] = seen.batches, read_jsonl(tmp_path / "run" / "metrics.jsonl")
    tokenizer, gaps = load_tokenizer(Model(folder)), []
    stops = stop_ids(Model("tiny"), load_tokenizer(Model("tiny")))
    for i, row in enumerate(seen.trajectories):
        completion = row.tokens[row.mask.index(True) :]
        text = load_tokenizer(Model("tiny")).decode([token for token in completion if token not in stops])
        ids = tokenizer.encode(text + "<|eot|>" * (completion[-1] in stops), add_special_tokens=False)
        start = f"<|turn|>user: {row.prompt.messages[0]['content']}<|eot|><|turn|>assistant: "
        expected = by_transformers(folder, start, ids).sum()
        firsts = batch.mask[i] & (batch.teacher_spans[i] == torch.arange(batch.mask.shape[1]))
        torch.testing.assert_close(batch.teacher_logps[i][firsts].sum(), expected, rtol=1e-4, atol=1e-4)
        assert int(firsts.sum()) <= len(ids) <= len(completion)
        gaps.append(batch.trainer_logps[i].sum() - expected)
    spans = batch.mask & (batch.teacher_spans != torch.arange(batch.mask.shape[1]))
    assert spans.any()  # some token of the teacher's has several of the policy's
    assert line["teacher/unread"] == 0
    assert line["teacher/kl"] == pytest.approx(float(sum(gaps)) / int(batch.mask.sum()), rel=1e-4)


def test_the_same_tokenizer_reads_the_same(tmp_path: Path) -> None:
    words = ("--teacher.path=tiny", "--teacher.retokenize=true", "--reward=null", "--train.steps=1")
    done = rlkit_in_process("fit", *RUN, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [line] = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert (line["teacher/kl"], line["teacher/unread"], line["advantage/max"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--teacher.path=null", "--teacher.context={prompt}!"), "only the model at teacher.path can have another"),
        (("--teacher.path=tiny", "--teacher.sources={a: tiny}"), "set it, and remove teacher.sources"),
        (
            ("--teacher.path=tiny", "--loss=Distillation", '--teacher.urls=["http://127.0.0.1:9"]'),
            "loss Distillation needs one that is loaded here; remove teacher.urls",
        ),
        (
            ("--teacher.path=tiny", "--tools={calculator: Calculator}"),
            "the teacher reads one turn of the policy; remove the section `tools:`",
        ),
        (("--teacher.path=tiny", "--model.path=tiny-vision"), "teacher.retokenize reads texts alone, but model.path"),
    ],
)
def test_what_is_refused_before_the_run(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = rlkit_in_process("fit", *RUN, *words, "--teacher.retokenize=true", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
