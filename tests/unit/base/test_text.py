"""Texts that others wrote: free of credentials, harmless on a terminal."""

from __future__ import annotations

import pytest

from rlkit.base.text import redact, redact_arguments, redact_tree, safe, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jred\x07", r"\x1b[2Jred\x07"),
        ("a\r\nb\tc\n", "a\nb\tc\n"),
        ("100%\rdone", r"100%\rdone"),
        ("\x9b31m", r"\x9b31m"),
        ("abc\u202ecba", r"abc\u202ecba"),
        ("\ud800", r"\ud800"),
        ("tag\U000e0041", r"tag\U000e0041"),
        ("Grüße, 猫 👩‍👧 [/bold]", "Grüße, 猫 👩‍👧 [/bold]"),
    ],
)
def test_control_codes_are_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("POST https://me:hunter2@host:80/score?x=1 failed", "POST https://***@host:80/score?x=1 failed"),
        ("https://me:p@ss@host/x and a@b", "https://***@host/x and a@b"),
        ("https://ghp_123@github.com/a", "https://***@github.com/a"),
        ("see https://host/a@b and me@host", "see https://host/a@b and me@host"),
        ("https://h/?api_key=123&n=2", "https://h/?api_key=***&n=2"),
        ("https://h/?access_token=123#top", "https://h/?access_token=***#top"),
        ("--reward.init_args.api-key=1 --x=2", "--reward.init_args.api-key=*** --x=2"),
        ("{'Authorization': 'Bearer abc.def', 'n': 1}", "{'Authorization': '***', 'n': 1}"),
        ("Authorization: Basic bWU6cHc=", "Authorization: ***"),
        ("sent Bearer abcdefghi", "sent Bearer ***"),
        ('{"password": "hunter2"}', '{"password": "***"}'),
        ("rollout.sampling.max_tokens=12, 5 tokens", "rollout.sampling.max_tokens=12, 5 tokens"),
    ],
)
def test_credentials_are_left_out(text: str, shown: str) -> None:
    assert redact(text) == safe(text) == shown


def test_nested_credentials_are_left_out() -> None:
    tree = {"reward": {"api_key": "k", "max_tokens": 3, "urls": ["http://a:b@h"], "headers": {"Authorization": "x"}}}
    assert redact_tree(tree) == {
        "reward": {"api_key": "***", "max_tokens": 3, "urls": ["http://***@h"], "headers": {"Authorization": "***"}}
    }
    given = ["rlkit", "fit", "--reward.token", "abc", "--reward.url=http://a:b@h", "--train.lr", "1"]
    assert redact_arguments(given) == [
        "rlkit", "fit", "--reward.token", "***", "--reward.url=http://***@h", "--train.lr", "1",
    ]  # fmt: skip
