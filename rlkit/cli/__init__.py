"""The command line: a verb per file.

What belongs here: each verb's usage and arguments, and `main`, which finds verbs and prints errors. What does not: how
a recipe is read (`rlkit.cli.parsing`), and what verbs draw or compute to show (`rlkit.cli.views`).
"""
