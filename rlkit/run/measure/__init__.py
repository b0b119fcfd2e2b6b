"""Measurements of a run in progress, and warnings about them.

What belongs here: memory and its limit (`memory`), profiles of single steps (`profile`), warnings about metrics that
look wrong (`alarms`) and about a reward that is being exploited (`reward_checks`). What does not: the metrics of a step
(`rlkit.train.metrics`), where they are written (`rlkit.run.metrics_log`), and what ends a run (`rlkit.run.progress`).
"""
