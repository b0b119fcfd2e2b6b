"""Tokens of SGLang against TorchEngine's and the exact distribution, on the same weights."""

from __future__ import annotations

from tests.agreement import (
    large,
    test_200_greedy_answers_of_a_tiny_model_agree,
    test_200_greedy_answers_of_ten_million_parameters_agree,
    test_a_stop_text_ends_a_turn_as_with_torch_engine,
    test_sampled_frequencies_are_those_of_the_softmax,
)

__all__ = [
    "large",
    "test_200_greedy_answers_of_a_tiny_model_agree",
    "test_200_greedy_answers_of_ten_million_parameters_agree",
    "test_a_stop_text_ends_a_turn_as_with_torch_engine",
    "test_sampled_frequencies_are_those_of_the_softmax",
]
