"""The kit for plugins' tests, under the path that plugins import."""

from rlkit_authors.testing import *  # noqa: F403
from rlkit_authors.testing import __all__

__all__ = list(__all__)
