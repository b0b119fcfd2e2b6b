"""The command line: a verb per file; the verbs that look at runs are those of `rlkit_report`.

What belongs here: each verb's usage and arguments, `main`, which finds verbs and prints errors, and what verbs print
with (`display`). What does not: how a recipe is read (`rlkit.cli.parsing`), and what verbs show (`rlkit.cli.views`).
"""
