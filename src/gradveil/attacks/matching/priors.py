"""Priors: how unlikely a candidate is in itself, whatever its gradient."""

from collections.abc import Callable

from torch import Tensor

from gradveil.core.errors import ThreatModelError
from gradveil.task import Task

Prior = Callable[[Tensor], Tensor]
"""A term added to the cost of a candidate."""

LEAST_PRIOR = 0.004
"""The `least_prior` of attacks that have no prior of their own, see `Matching`."""


ROUNDING = 1e-2
"""How far the kinks of a prior are rounded off for an optimiser that needs a smooth cost."""


def check_prior(owner: str, weight: str, task: Task) -> None:
    """Refuse a task whose inputs have no prior.

    Args:
        owner: the caller's name, for error messages.
        weight: the name of the parameter that weights the prior.
        task: the model and its inputs.
    """
    modality = task.modality
    if modality.prior(modality.probe(1, task.input_shape, dtype=task.dtype, device=task.device)) is None:
        raise ThreatModelError(
            f"{owner}: {weight} needs inputs with a prior, got {modality.name} inputs of shape "
            f"{list(task.input_shape)}, which have none; use {weight}=0"
        )
