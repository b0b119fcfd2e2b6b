"""Tests of SGLang's engine that hold for every product, on a vLLM server."""

from __future__ import annotations

from tests.sglang.test_faults import (
    test_a_server_that_dies_in_a_sync_is_synced_again,
    test_an_error_of_the_server_is_tried_again,
    test_nothing_is_sampled_before_the_first_sync,
)
from tests.sglang.test_generate import (
    test_256_requests_at_once,
    test_a_deadline_ends_one_request_and_no_other,
    test_a_request_that_the_server_refuses_is_data,
    test_a_teachers_log_probs_are_those_of_transformers,
    test_greedy_output_equals_generate_token_for_token,
    test_logps_equal_the_trainers,
    test_samples_of_one_prompt_differ,
    test_stop_ids_budgets_and_the_context_end_a_completion,
    test_structured_completions_are_valid,
    test_truncated_completions_have_candidates,
    test_truncated_sampling_reports_logps_of_the_full_softmax,
)
from tests.sglang.test_sync import (
    test_a_difference_that_stays_is_said_to_stay,
    test_a_step_has_a_deadline,
    test_a_tensor_that_is_corrupted_on_its_way_is_named,
    test_memory_is_released_and_weights_come_back_with_it,
    test_requests_in_flight_go_on_with_the_new_weights,
    test_stale_answers_are_never_taken_for_current_ones,
    test_weights_of_another_model_are_refused,
)

__all__ = [
    "test_256_requests_at_once",
    "test_a_deadline_ends_one_request_and_no_other",
    "test_a_difference_that_stays_is_said_to_stay",
    "test_a_request_that_the_server_refuses_is_data",
    "test_a_server_that_dies_in_a_sync_is_synced_again",
    "test_a_step_has_a_deadline",
    "test_a_teachers_log_probs_are_those_of_transformers",
    "test_a_tensor_that_is_corrupted_on_its_way_is_named",
    "test_an_error_of_the_server_is_tried_again",
    "test_greedy_output_equals_generate_token_for_token",
    "test_logps_equal_the_trainers",
    "test_memory_is_released_and_weights_come_back_with_it",
    "test_nothing_is_sampled_before_the_first_sync",
    "test_requests_in_flight_go_on_with_the_new_weights",
    "test_samples_of_one_prompt_differ",
    "test_stale_answers_are_never_taken_for_current_ones",
    "test_stop_ids_budgets_and_the_context_end_a_completion",
    "test_structured_completions_are_valid",
    "test_truncated_completions_have_candidates",
    "test_truncated_sampling_reports_logps_of_the_full_softmax",
    "test_weights_of_another_model_are_refused",
]
