"""What a plugin subclasses, and the data that its methods receive.

What belongs here: an abstract class per kind of part, documented completely, and checks of what foreign code returns
(`outputs`). What does not: any implementation. A module here imports only `rlkit.base`, `rlkit.types` and `rlkit.ops`.
"""
