"""A model and its loss as pure functions, and how strongly its gradients react to the inputs."""

from gradveil.task.language import NextToken
from gradveil.task.model import Classifier, Gradients
from gradveil.task.sensitivity import sensitivity_error
from gradveil.task.task import LOSSES, Loss, Task

__all__ = ["LOSSES", "Classifier", "Gradients", "Loss", "NextToken", "Task", "sensitivity_error"]
