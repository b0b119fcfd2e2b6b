"""Checks and estimates before the first step.

What belongs here: batch sizes, lengths and a trial of the reward (`plan`), estimates of time and memory (`estimate`), a
step that changes nothing (`dryrun`), the comparison of engine and trainer (`weight_check`), and the checks with which a
run starts (`start`). What does not: the checks of a recipe (`rlkit.recipe`) and of its data (`rlkit.data`).
"""
