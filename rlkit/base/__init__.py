"""What every room may use, and what knows nothing of training.

What belongs here: errors and texts that are safe to show (`errors`, `text`), types of options (`ranges`, `names`),
deadlines, retries, limits and tasks of the event loop, and the installed plugins' metadata. What does not: anything
that imports torch, a recipe, or a part.
"""
