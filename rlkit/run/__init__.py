"""A run's life: from a checked recipe to a run folder with an outcome, whatever happens.

What belongs here: launching processes (`launch`), training until the last step, a signal or a failure (`fit`,
`session`, `validator`, `ending`), the other ranks (`peers`), and every file of the run folder (`folder`, `record`,
`metrics_log`, `rows`, `answers`, `lock`). What does not: how a step trains (`rlkit.train`), how a store of checkpoints
is laid out (`rlkit.models.store`), and how a run is displayed (`rlkit.cli.display`).
"""
