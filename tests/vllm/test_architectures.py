"""Which of the tested models vLLM implements: what the page on them says."""

from __future__ import annotations

from tests.served import documented_architectures


def test_vllm_has_code_for_the_listed_models() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    assert len(documented_architectures()) >= 24
    assert documented_architectures() & set(ModelRegistry.get_supported_archs()) == documented_architectures("vLLM")
