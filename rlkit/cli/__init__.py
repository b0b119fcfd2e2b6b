"""The command line: `fit`; the other verbs are packages of the shelf (`rlkit_inspect` and others).

What belongs here: `main`, which finds verbs and prints errors, and what is shown of a run (`display`). What does not:
what all verbs use (`rlkit.commands`, `rlkit.base.terminal`), and how a recipe is read (`rlkit.recipe.parsing`).
"""
