"""Rollouts that run ahead of the trainer.

What belongs here: the stream of prompt groups (`stream`), the ledger of what was started, trained on and dropped, the
replay buffer, and engines beside the trainer or sharing its device. What does not: the step itself (`rlkit.train.rl`).
"""
