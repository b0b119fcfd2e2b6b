"""Policies, critics and reward models.

What belongs here: loading and checking model folders, forward passes, adapters, packing, sizes and FLOPs, and the
files of checkpoints. What does not: sharding and collectives (`rlkit.distributed`), and what a run adds to a
checkpoint (`rlkit.run.checkpoint`).
"""
