"""Validation on held-out prompts.

What belongs here: completing or scoring the prompts (`evaluate.py`, `reward_model.py`), and the metrics of the outcome
with their intervals (`metrics.py`). What does not: when a run validates (`rlkit.run.session`), and the files that the
completions are written to (`rlkit.run.answers`).
"""
