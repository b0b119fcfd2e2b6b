"""Checks before the first step.

What belongs here: batch sizes, lengths and a trial of the reward (`plan`), a step that changes nothing (`dryrun`), the
comparison of engine and trainer (`weight_check`), and the checks with which a run starts (`start`). What does not: the
checks of a recipe (`rlkit.recipe`) and of its data (`rlkit.data`), and estimates (`rlkit_inspect`).
"""
