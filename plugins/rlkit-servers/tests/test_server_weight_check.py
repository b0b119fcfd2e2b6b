"""What the check of a server's weights compares, and what is sent; SGLang is not needed."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from rlkit_servers.api import ServerOutput
from rlkit_servers.sglang.api import SGLangApi
from rlkit_servers.transports import flatten
from rlkit_servers.weight_check import LogpGap, Tolerance, gap_between


def test_log_probs_are_compared_by_hand() -> None:
    logps = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.375, 0.5]]))
    # log 0.25 of token 1, off by 0.1; log 0.5 of token 2, which is the likeliest, off by 0.3
    answer = ServerOutput([1, 2], [math.log(0.25) + 0.1, math.log(0.5) - 0.3])
    gap = gap_between([logps], [answer], 1)
    assert (gap.mean, gap.max) == pytest.approx((0.2, 0.3))


def test_greedy_tokens_that_the_trainer_finds_less_likely_count() -> None:
    logps = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.5, 0.375]]))
    # the second is 0.375, where 0.5 was to be had: log(0.5 / 0.375) = 0.2877
    answer = ServerOutput([0, 2], [math.log(0.5), math.log(0.375)])
    gap = gap_between([logps], [answer], 2)
    assert (gap.mean, gap.max) == pytest.approx((0.2877 / 2, 0.2877), abs=1e-4)


def test_nan_is_never_within_the_tolerance() -> None:
    gap = gap_between([torch.zeros(1, 1)], [ServerOutput([0], [math.nan])], 1)
    assert gap == LogpGap(math.inf, math.inf)
    assert not gap.within(Tolerance(1e9, 1e9))


def test_sglangs_scores_are_read() -> None:
    """A row's first token has no log-prob; if that of a later token is missing, it is NaN."""
    answer: dict[str, Any] = {
        "output_ids": [0],
        "meta_info": {
            "input_token_logprobs": [[None, 2, None], [-0.5, 1, None], [None, 7, None]],
            "output_token_logprobs": [[-0.25, 0, None]],
        },
    }

    class Server:
        async def post(self, path: str, body: Any, deadline: float) -> Any:
            assert (path, body["input_ids"], body["logprob_start_len"]) == ("/generate", [[2, 1, 7]], 0)
            return [answer]

    [output] = asyncio.run(SGLangApi(Server()).probe([[2, 1, 7]], 1, 1.0))  # type: ignore[arg-type]
    assert output.tokens == [1, 7, 0]
    assert output.logps == pytest.approx([-0.5, math.nan, -0.25], nan_ok=True)


def test_a_flat_bucket_has_a_buffer_per_type() -> None:
    bucket = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16)), ("c", torch.zeros(1))]
    flat = dict(flatten(bucket))
    assert list(flat) == ["a", "b", "c"]
    assert all(torch.equal(flat[name], tensor) and flat[name].dtype == tensor.dtype for name, tensor in bucket)
    assert flat["a"].untyped_storage().data_ptr() == flat["c"].untyped_storage().data_ptr()
    assert flat["a"].untyped_storage().data_ptr() != bucket[0][1].untyped_storage().data_ptr()
