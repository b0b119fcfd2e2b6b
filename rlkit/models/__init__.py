"""Policies, critics and reward models.

What belongs here: loading and checking model folders, forward passes, adapters, packing, sizes and FLOPs, and the
files of checkpoints. What does not: sharding and collectives (`rlkit.distributed`), and what a run adds to a
checkpoint (`rlkit.run.checkpoint`).
"""

from pathlib import Path

SHIPPED = {
    "tiny": Path(__file__).parent / "tiny",
    "tiny-tools": Path(__file__).parent / "tiny_tools",
    "tiny-vision": Path(__file__).parent / "tiny_vision",
}
"""Models that ship with rlkit: for additions, for conversations with tools and games, for questions about pictures."""
