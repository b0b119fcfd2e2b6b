"""The command line: `fit`; the other verbs are packages of the shelf (`rlkit_inspect`, `rlkit_policy`, `rlkit_report`).

What belongs here: `main`, which finds verbs and prints errors, what a run of a folder means to a verb (`checkpoint`),
and what verbs print with (`display`). What does not: how a recipe is read (`rlkit.cli.parsing`).
"""
