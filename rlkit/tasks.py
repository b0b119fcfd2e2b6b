"""Tasks: where prompts come from.

What belongs here: the path by which recipes and scripts name the tasks of `rlkit_tasks`. What does not: which rows a
run trains on and in which order (`rlkit.data`), and conversations about them (`rlkit.rollout`).
"""

from rlkit.registry.shelf import attribute_of

__all__: list[str] = []

__getattr__ = attribute_of("tasks")
