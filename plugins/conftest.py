"""Tests of plugins leave the environment as they found it, too."""

from tests.conftest import same_environment

__all__ = ["same_environment"]
