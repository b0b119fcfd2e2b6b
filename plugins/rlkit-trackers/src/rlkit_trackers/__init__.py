"""Loggers of metrics: a table, and products that keep experiments or watch services."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_trackers.loggers import ClearML, MLflow, SwanLab, TensorBoard, Trackio, Wandb
from rlkit_trackers.table import CSV
from rlkit_trackers.telemetry import OpenTelemetry, Prometheus


@hookimpl
def rlkit_register(register: Register) -> None:
    for logger in (CSV, ClearML, MLflow, OpenTelemetry, Prometheus, SwanLab, TensorBoard, Trackio, Wandb):
        register(logger)
