"""What is compared when a server proves its weights, and what travels; nothing here needs SGLang."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlkit.engines.server.transports import flatten
from rlkit.engines.server.weight_check import Expected, Gap, Tolerance, canary_gap, probe_gap


def test_probe_gap_by_hand() -> None:
    logps = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.5, 0.375]]))
    expected = Expected([[2, 1]], [logps])  # log 0.25 of token 1 after token 2, log 0.125 of token 0 after both
    answer: dict[str, Any] = {
        "output_ids": [0],
        "meta_info": {
            "input_token_logprobs": [[None, 2, None], [math.log(0.25) + 0.1, 1, None]],
            "output_token_logprobs": [[math.log(0.125) - 0.3, 0, None]],
        },
    }
    gap = probe_gap(expected, [answer])
    assert (gap.mean, gap.most) == pytest.approx((0.2, 0.3))


def test_canary_gap_counts_tokens_that_the_trainer_finds_less_likely() -> None:
    logps = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.5, 0.375]]))
    answer: dict[str, Any] = {
        "output_ids": [0, 2],  # the second is 0.375, where 0.5 was to be had: log(0.5 / 0.375) = 0.2877
        "meta_info": {"output_token_logprobs": [[math.log(0.5), 0, None], [math.log(0.375), 2, None]]},
    }
    gap = canary_gap(logps, answer)
    assert (gap.mean, gap.most) == pytest.approx((0.2877 / 2, 0.2877), abs=1e-4)


def test_nan_is_never_within_the_tolerance() -> None:
    answer: dict[str, Any] = {
        "output_ids": [0],
        "meta_info": {"input_token_logprobs": [[None, 0, None]], "output_token_logprobs": [[math.nan, 0, None]]},
    }
    gap = probe_gap(Expected([[0]], [torch.zeros(1, 1)]), [answer])
    assert gap == Gap(math.inf, math.inf)
    assert not gap.within(Tolerance(1e9, 1e9))


def test_a_flat_bucket_holds_equal_tensors_in_one_buffer_of_each_type() -> None:
    bucket = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16)), ("c", torch.zeros(1))]
    flat = dict(flatten(bucket))
    assert list(flat) == ["a", "b", "c"]
    assert all(torch.equal(flat[name], tensor) and flat[name].dtype == tensor.dtype for name, tensor in bucket)
    assert flat["a"].untyped_storage().data_ptr() == flat["c"].untyped_storage().data_ptr()
    assert flat["a"].untyped_storage().data_ptr() != bucket[0][1].untyped_storage().data_ptr()
