"""Tests of plugins leave the environment as they found it, and have the shared fixtures, too."""

from tests.conftest import gsm8k_like, same_environment, workers

__all__ = ["gsm8k_like", "same_environment", "workers"]
