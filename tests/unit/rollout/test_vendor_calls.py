"""Calls in the vendors' forms, with their special tokens, through `rlkit fit`; those in thinking are none."""

from __future__ import annotations

from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from rlkit_authors.models import build_tokenizer, random_model
from transformers import GenerationConfig

from rlkit import commands, hookimpl
from rlkit.cli.main import main
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.runtime import Runtime, WeightStream
from rlkit.parsers import HermesParser
from rlkit.registry import load_plugins
from rlkit.rollout.template import ChatTemplate
from rlkit.rollout.template_check import misreading, missing_parser
from rlkit.types import Completion, Request, StopReason
from tests.conftest import read_jsonl
from tests.vendors import template_text


class Family(NamedTuple):
    """A vendor's special tokens, those of them that end a turn, and what a policy writes: a call, then the answer."""

    special: tuple[str, ...]
    ends: tuple[str, ...]
    turns: tuple[str, str]


Q = '<|"|>'
FAMILIES = {
    "gemma4": Family(
        ("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
         "<tool_response|>", "<|channel>", "<channel|>", Q),
        ("<turn|>", "<|tool_response>"),
        (f"<|channel>thought\n<|tool_call>call:calculator{{expression:{Q}9{Q}}}<tool_call|><channel|>"
         f"<|tool_call>call:calculator{{expression:{Q}2 + 3{Q}}}<tool_call|><|tool_response>", "#### 5<turn|>"),
    ),
    "glm4moe": Family(
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|user|>", "<|observation|>"),
        ("\n<think><tool_call>calculator\n</tool_call></think>\n<tool_call>calculator\n<arg_key>expression</arg_key>\n"
         "<arg_value>2 + 3</arg_value>\n</tool_call><|observation|>", "\n<think></think>\n#### 5<|user|>"),
    ),
    "gptoss": Family(
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"),
        ('<|channel|>analysis<|message|>{"expression": "9"}<|end|><|start|>assistant to=functions.calculator<|channel|>'
         'commentary json<|message|>{"expression": "2 + 3"}<|call|>', "<|channel|>final<|message|>#### 5<|return|>"),
    ),
    "lfm2_v2": Family(
        ("<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>",
         "<|tool_response_start|>", "<|tool_response_end|>"),
        ("<|im_end|>",),
        ("<think><|tool_call_start|>[calculator()]<|tool_call_end|></think>"
         "<|tool_call_start|>[calculator(expression='2 + 3')]<|tool_call_end|><|im_end|>", "#### 5<|im_end|>"),
    ),
}  # fmt: skip


class Vendor(RolloutEngine):
    """Writes the turns of a family, whatever the model is.

    Args:
        family: Its name.
    """

    def __init__(self, family: str) -> None:
        self.turns = FAMILIES[family].turns
        self.asked: dict[str, int] = {}

    def bind(self, runtime: Runtime) -> None:
        self.tokenizer = runtime.tokenizer

    async def generate(self, request: Request) -> Completion:
        turn = self.asked.get(request.session, 0)
        ids = self.tokenizer.encode(self.turns[min(turn, 1)], add_special_tokens=False)[: request.sampling.max_tokens]
        if len(ids) == request.sampling.max_tokens:  # a trial request asks for one token
            return Completion(ids, [-log(len(self.tokenizer))] * len(ids), [0] * len(ids), StopReason.LENGTH)
        self.asked[request.session] = turn + 1
        return Completion(ids, [-log(len(self.tokenizer))] * len(ids), [0] * len(ids), StopReason.STOP)

    async def sync(self, stream: WeightStream, version: int) -> None: ...


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(__name__="tests", rlkit_register=hookimpl(lambda register: register(Vendor)))
    monkeypatch.setattr(commands, "load_plugins", lambda: load_plugins([("vendor", made)], entry_points=False))


def save_model(folder: Path, name: str) -> str:
    family, tokenizer = FAMILIES[name], build_tokenizer()
    tokenizer.add_tokens(list(family.special), special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = "<|endoftext|>", family.ends[0]
    tokenizer.chat_template = template_text(name)
    model: Any = random_model(
        "qwen2", vocab_size=len(tokenizer), max_position_embeddings=4096, tie_word_embeddings=False
    )
    torch.nn.init.zeros_(model.lm_head.weight)  # all tokens are equally likely, as the engine says
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(list(family.ends)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_calls_the_tool(name: str, tmp_path: Path) -> None:
    options = (
        "--recipe=quick_tool", f"--model.path={save_model(tmp_path / 'model', name)}", "--parser=null",
        "--rollout.engine=Vendor", f"--rollout.engine.family={name}", "--validation=null", "--train.steps=1",
        "--train.prompts_per_step=1", "--rollout.group_size=2", "--rollout.sampling.max_tokens=300",
        "--conversation.max_reply_tokens=100", "--advantage=ReinforcePP", "--train.schedule=Constant",
        "--train.warmup_steps=0",
    )  # fmt: skip
    assert main(["fit", *options, f"--out={tmp_path / 'out'}"]) == 0
    rollouts = read_jsonl(tmp_path / "out" / "rollouts" / "step-00001.jsonl.gz")
    assert len(rollouts) == 2
    for rollout in rollouts:
        called, reply, answer = rollout["conversation"]
        assert called["content"] in FAMILIES[name].turns[0]
        assert (reply["role"], reply["content"]) == ("tool", "5")
        assert "#### 5" in answer["content"]
        counts = {what: number for what, number in rollout["counts"].items() if what != "template_differs"}
        assert counts == {"tool_calls": 1}


def test_a_detected_parser_that_misreads_the_template_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LFM2's template, which writes calls in parentheses; no parser reads these."""
    path = Path(save_model(tmp_path / "model", "lfm2_v2"))
    source = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").write_text(source.replace('"<|tool_call_start|>["', '"<|tool_call_start|>("'))
    options = ("--recipe=quick_tool", f"--model.path={path}", "--parser=null", "--rollout.engine=Vendor",
               "--rollout.engine.family=lfm2_v2", "--train.steps=1")  # fmt: skip
    assert main(["fit", *options, f"--out={tmp_path / 'out'}"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert 'writes the call calculator {"what": "pears and plums", "most": 7} as' in error
    assert "of which LfmParser reads a malformed call: cannot read the call" in error
    assert "no installed parser reads it: write one (rlkit docs plugins/parser)" in error


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("chatml", None),
        ("lfm2_v2", "of which HermesParser reads no call; set parser: LfmParser, which reads it"),
        ("lfm2", None),
    ],
)
def test_a_parser_of_the_recipe_is_warned_of(template: str, message: str | None) -> None:
    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = template_text(template)
    problem = misreading(HermesParser(), ChatTemplate(tokenizer, {tokenizer.eos_token_id}), "m")
    assert problem is None if message is None else message in (problem or "")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ messages[0].content }}",
            "the chat template of 'm' does not show how the model writes tool calls; set parser:",
        ),
        (
            "{{ messages[0].content }}{% for c in messages[-1].tool_calls %}<call>{{ c.function.arguments.what }}"
            "{% endfor %}",
            "from which no parser is detected; no installed parser reads it: write one",
        ),
        (
            "{{ messages[0].content }}{% for c in messages[-1].tool_calls %}```json\n{{ c.function | tojson }}\n```"
            "{% endfor %}",
            "from which no parser is detected; set parser: JsonBlockParser, which reads it",
        ),
    ],
)
def test_a_missing_parser_is_named(source: str, message: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = source
    assert message in missing_parser(ChatTemplate(tokenizer, {tokenizer.eos_token_id}), "m")
