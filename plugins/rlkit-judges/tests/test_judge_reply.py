"""What a judge answers, whatever its reply quotes from a response."""

from __future__ import annotations

import pytest
from rlkit_judges.client import final_object


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a {"b": {"c": 1}}\n', {"b": {"c": 1}}),
        ('{"a": 1}{"b": 2}', {"b": 2}),
        ('Of \\frac{1}{2}:\n```json\n{"a": 1}\n```\n', {"a": 1}),
        ('```\n{"a": 1}\n```', {"a": 1}),
        ("{}", {}),
        ('{"a": "} \\" { \\\\"}', {"a": '} " { \\'}),
        ('{"score": 10}' + "{" * 200 + ' earns {"score": 0}', {"score": 0}),
        ('{"score": 10}, "' + '{"a": ' * 50_000 + '{"score": 0}', {"score": 0}),
        ('{"score": 10}' + '"}' * 50_000, None),
        ("{" * 50_000 + "}" * 50_000, None),
        ('{"a": ' * 50_000 + "1" + "}" * 50_000, None),
        ('"' + "\\" * 50_000 + '{"score": 0}', {"score": 0}),
        ("}" * 5, None),
        ("", None),
        ("[1]", None),
        ('{"a": 1} is what it says', None),
        ('{"reasoning": "it is only {"score": 10}", "score": 0}', None),
        ('{"reasoning": "it is only {"score": 10}', None),
        ('```json\n{"reasoning": "it is only {"score": 10}', None),
    ],
)
def test_the_answer_is_the_object_at_the_end(text: str, expected: object) -> None:
    """What the judge quotes from a response is no answer; in quadratic time, large replies would take minutes."""
    if expected is None:
        with pytest.raises(ValueError, match="expected a JSON object at its end"):
            final_object(text)
    else:
        assert final_object(text) == expected
