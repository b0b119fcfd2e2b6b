"""Steps of training: sample, score, estimate, update, sync.

Begin with `rl` (reinforcement learning on samples) or `supervised` (recorded completions). What belongs here: the
phases that they share, the loss, the optimizer step (`update`), and a step's metrics. What does not: the life of a run
(`rlkit.run`), formulas (`rlkit.losses`, `rlkit.advantages`), and collectives (`rlkit.distributed`).
"""
