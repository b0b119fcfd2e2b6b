"""`rlkit convert`: prints the rlkit recipe that is equivalent to a configuration of verl or TRL."""

from __future__ import annotations

from rlkit_convert.command import PEERS, convert, run

__all__ = ["PEERS", "convert", "run"]
