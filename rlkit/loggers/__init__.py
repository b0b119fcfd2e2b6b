"""Loggers."""

from rlkit.loggers.csv import CSV
from rlkit.loggers.mlflow import MLflow
from rlkit.loggers.tensorboard import TensorBoard
from rlkit.loggers.wandb import Wandb

__all__ = ["CSV", "MLflow", "TensorBoard", "Wandb"]
