"""What looks at recipes, their data and this machine before a run, and makes a step of a run again.

What belongs here: the verbs `recipe`, `explain`, `data`, `doctor`, `docs`, `completion` and `replay`, and the estimates
of time and memory. What does not: the checks with which a run starts (`rlkit.run.preflight`), reading a recipe
(`rlkit.commands`), and pages and comparisons of runs (`rlkit_report`).
"""
