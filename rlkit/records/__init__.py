"""What a run leaves, as data: the files of its folder, and what their numbers tell.

What belongs here: the layout of a run folder (`folder`), its JSON lines (`lines`), rollouts as rows (`rows`), metrics
of validations (`validation_metrics`, `sources`), rewards over the steps (`rewards`), and the verdict with the command
that comes next (`verdict`). What does not: the run itself (`rlkit.run`), a whole folder at once, alone or beside
another, and how it is shown (`rlkit_report`).
"""
