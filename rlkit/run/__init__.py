"""A run's life: from a checked recipe to a run folder with an outcome, whatever happens.

What belongs here: launching processes (`launch`), training until the last step, a signal or a failure (`fit`,
`session`, `validator`, `evaluate`, `ending`), the other ranks (`peers`), what is watched (`progress`, `alarms`), the
engine and the precision that a recipe leaves open (`build`), and writing every file of the run folder (`folder`,
`record`, `metrics_log`, `answers`, `lock`). What does not: how a step trains (`rlkit.train`), reading a run folder
(`rlkit.records`), how a store of checkpoints is laid out (`rlkit.models.store`), and how a run is displayed
(`rlkit.cli.display`).
"""
