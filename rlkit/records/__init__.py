"""What a run leaves, as data: the files of its folder, and what their numbers tell.

What belongs here: the layout of a run folder (`folder`), rollouts as rows (`rows`), all of a folder read as far as it
is written (`files`, `headline`, `saved_validation`), two folders side by side (`comparison`), metrics of validations
(`validation_metrics`, `sources`), rewards over the steps (`rewards`), and the verdict with the command that comes next
(`verdict`). What does not: the run itself (`rlkit.run`), and how records are shown (`rlkit.cli`, `rlkit_report`).
"""
