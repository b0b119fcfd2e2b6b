"""Checkpoints of a run.

What belongs here: the state that a checkpoint holds (`state`), writing it beside the run (`write`), checking a recipe
against it and loading it (`resume`), and exporting its policy (`export`). What does not: the store of checkpoints and
their file format (`rlkit.models.store`, `rlkit.models.tensor_files`), and what to do when a run ends
(`rlkit.run.ending`).
"""
