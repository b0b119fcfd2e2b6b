"""Loggers of metrics to products that keep experiments: MLflow, SwanLab, ClearML and Trackio."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_trackers.loggers import ClearML, MLflow, SwanLab, Trackio


@hookimpl
def rlkit_register(register: Register) -> None:
    for logger in (ClearML, MLflow, SwanLab, Trackio):
        register(logger)
