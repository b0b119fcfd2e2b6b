"""The command line: `fit`; the other verbs are packages of the shelf (`rlkit_inspect` and others).

What belongs here: `main`, which finds verbs and prints errors, the recipe that a verb takes from a run folder
(`checkpoint`), and what verbs print with (`display`). What does not: how a recipe is read (`rlkit.cli.parsing`).
"""
