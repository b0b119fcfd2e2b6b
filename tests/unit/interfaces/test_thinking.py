"""What a turn answers after its thinking, in the families' tags and harmony's channels."""

from __future__ import annotations

import pytest

from rlkit.interfaces.parser import after_thinking

HARMONY = "<|channel|>analysis<|message|>7?<|end|><|start|>assistant<|channel|>final<|message|>8"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("8", "8"),
        ("<think>7</think>8", "8"),
        ("<think>7", ""),
        ("7</think>8", "8"),
        ("8</think>", ""),
        ("<think>6</think>7</think>8", "8"),
        ("<think>6<think>7</think>8", "8"),
        ("<think>6</think>8<think>9", "8\n"),
        ("<think>6</think>8<think>7</think>", "8\n"),
        ("4<think></think>2", "4\n2"),
        ("<THINK type='deep'>7</Think >8", "8"),
        ("<thinking>7</think>8", ""),
        ("<thinking>7</thinking>8", "8"),
        ("<think/>8", "<think/>8"),
        ("<reasoning>7</reasoning>\n<answer>8</answer>", "<answer>8</answer>"),
        ("[THINK]7[/THINK]8", "8"),
        ("[THINK]7", ""),
        ("<|channel>thought\n7<channel|>8", "8"),
        ("<|channel>thought\n7", ""),
        (HARMONY, "8"),
        (HARMONY.partition("<|start|>")[0], ""),
        ("analysis<|message|>7<|channel|>final<|message|>8", "8"),
        ("<|channel|>analysis<|message|>7<|channel|>analysis<|message|>8", ""),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}"),
        ("x <thinkers> and [think about it]", "x <thinkers> and [think about it]"),
    ],
)
def test_thinking_is_left_out(text: str, answer: str) -> None:
    assert after_thinking(text) == answer


@pytest.mark.parametrize("piece", ["<think ", "<think>", "</think ", "<|channel|>", "<|channel|> ", " "])
def test_hostile_texts_take_linear_time(piece: str) -> None:
    """In quadratic time this would take minutes."""
    assert after_thinking("<think>" + "<think" + piece * 200_000) == ""
    assert after_thinking("8 " + piece * 200_000).startswith("8 ")
