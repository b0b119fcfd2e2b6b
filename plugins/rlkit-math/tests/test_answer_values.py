"""Values and boxes of answers, by hand."""

from __future__ import annotations

import pytest
from rlkit_math.answers import equal, final_answer


@pytest.mark.parametrize(
    ("root", "value", "other"),
    [
        (r"\sqrt{-4}", "2i", "-2i"),
        (r"\sqrt[4]{-4}", "1+i", "1-i"),
        (r"\sqrt[3]{-8}", "-2", "2"),
        (r"\sqrt{9/4}", "3/2", "2/3"),
    ],
)
def test_a_root_is_the_principal_or_the_real_one(root: str, value: str, other: str) -> None:
    assert equal(root, value)
    assert not equal(root, other)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}\boxed{2}", "1, 2"),
        (r"\boxed{1} \boxed{2} \boxed{3}", "1, 2, 3"),
        (r"\boxed{1}\boxed{1}", "1"),
        (r"\boxed{1} so \boxed{2}", "2"),
    ],
)
def test_boxes_side_by_side_are_a_list(text: str, answer: str) -> None:
    assert final_answer(text).text == answer
