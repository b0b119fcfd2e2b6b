"""Loggers of metrics to products: TensorBoard, W&B, MLflow, SwanLab, ClearML and Trackio."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_trackers.loggers import ClearML, MLflow, SwanLab, TensorBoard, Trackio, Wandb


@hookimpl
def rlkit_register(register: Register) -> None:
    for logger in (ClearML, MLflow, SwanLab, TensorBoard, Trackio, Wandb):
        register(logger)
