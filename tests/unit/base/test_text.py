"""Texts that others wrote: free of credentials, harmless on a terminal."""

from __future__ import annotations

import pytest

from rlkit.base.text import redact, redact_arguments, safe, visible


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
        ("POST https://me:hunter2@host:80/score?x=1 failed", "POST https://***@host:80/score?*** failed"),
        ("https://me:p@ss@host/x and a@b", "https://***@host/x and a@b"),
        ("https://ghp_123@github.com/a", "https://***@github.com/a"),
        ("see https://host/a@b and me@host", "see https://host/a@b and me@host"),
        ("https://h/?api_key=123&n=2", "https://h/?***"),
        ("https://h/?access_token=123#top", "https://h/?***"),
        ("--reward.init_args.api-key=1 --x=2", "--reward.init_args.api-key=*** --x=2"),
        ("{'Authorization': 'Bearer abc.def', 'n': 1}", "{'Authorization': '***', 'n': 1}"),
        ("Authorization: Basic bWU6cHc=", "Authorization: ***"),
        ("sent Bearer abcdefghi", "sent Bearer ***"),
        ('{"password": "hunter2"}', '{"password": "***"}'),
        (r"{\"password\": \"hunter2\"}", r"{\"password\": \"***\"}"),
        ("DB_PASS=hunter2 --password hunter2 x", "DB_PASS=*** --password *** x"),
        ("--agent.environment.MODE=hunter2", "--agent.environment.MODE=***"),
        ("http://${RLKIT_LOGIN}@h/?key=${RLKIT_KEY}", "http://${RLKIT_LOGIN}@h/?key=${RLKIT_KEY}"),
        ("rollout.sampling.max_tokens=12, 5 tokens", "rollout.sampling.max_tokens=12, 5 tokens"),
    ],
)
def test_credentials_are_left_out(text: str, shown: str) -> None:
    assert redact(text) == safe(text) == shown


def test_command_lines_are_shown_without_credentials() -> None:
    given = [
        "rlkit", "fit", "--reward.token", "abc", "--reward.url=http://a:b@h", "--train.lr", "1",
        "--agent.environment.MODE", "x", "--agent.environment", "{MODE: x}", "--agent.environment={MODE: x}",
        "--agent={init_args: {environment: {MODE: x}}}", "--out=run",
    ]  # fmt: skip
    assert redact_arguments(given) == [
        "rlkit", "fit", "--reward.token", "***", "--reward.url=http://***@h", "--train.lr", "1",
        "--agent.environment.MODE", "***", "--agent.environment", "***", "--agent.environment=***",
        "--agent=***", "--out=run",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "piece", ["//", "//:", "?a=b//", "env.", "a_", "A_", '"password', "--", "--a ", "sk-", "bearer "]
)
def test_hostile_texts_are_searched_in_little_time(piece: str) -> None:
    """Quadratic patterns took seconds for such texts, which end a test by its time limit once they are long."""
    assert len(redact(piece * 20_000)) > 0
