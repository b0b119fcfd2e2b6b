"""Text as ids, in threads: agents' requests are rendered in threads that share the policy's tokenizer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlkit_authors.models import build_tokenizer

from rlkit.rollout.rendering import TokenCodec

TEXTS = [f"{i} + {i} = {2 * i}, said {'abc' * i} " * (i + 1) for i in range(40)]


class Changes:
    """A tokenizer in Rust that counts its changes, each of which waits for all threads."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.changes = 0

    def __getattr__(self, name: str) -> Any:
        self.changes += name.startswith("no_")
        return getattr(self.tokenizer, name)


def test_threads_share_a_tokenizer() -> None:
    tokenizer = build_tokenizer()
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    tokenizer.backend_tokenizer.enable_truncation(4)  # as its file may ask
    codec = TokenCodec(tokenizer, {tokenizer.eos_token_id})
    backend = codec._backend = Changes(tokenizer.backend_tokenizer)
    assert codec.encode(TEXTS[9]) == expected[9]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(codec.encode, TEXTS)) == expected
        assert list(threads.map(codec.lengths, [TEXTS] * 4)) == [list(map(len, expected))] * 4
    assert backend.changes == 2  # of truncation and padding, once
