"""What the attacks that search a generator share: a generator that fits the task, and its images."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from gradveil.attacks.problem import Problem
from gradveil.core.errors import ThreatModelError
from gradveil.models import generator as generators
from gradveil.models.generator import Generator
from gradveil.task import Task

MISSING = "none"
"""The default of the parameter `generator`: none is named, and the attack is refused."""


def generator_for(owner: str, name: str, task: Task) -> Generator:
    """Load the generator called `name` on the task's device and in its precision; refused if it does not fit the task.

    Args:
        owner: the attack's name, for error messages.
        name: see `gradveil.models.generator.find`.
        task: the model whose inputs are images.
    """
    if name == MISSING:
        raise ThreatModelError(
            f"{owner}: needs a generator of images like the victims', got none; use generator=NAME or FILE "
            "(python scripts/train_generator.py DATASET makes one)"
        )
    generator = generators.load(generators.find(name))
    channels = generator.image_shape[0]
    if len(task.input_shape) != 3 or (channels, task.input_shape[0]) not in ((1, 1), (3, 3), (3, 1)):
        raise ThreatModelError(
            f"{owner}: the generator {name} makes images with {channels} channels, got inputs of shape "
            f"{list(task.input_shape)}; use another generator"
        )
    if generator.classes and generator.classes != task.single_classes(owner):
        raise ThreatModelError(
            f"{owner}: the generator {name} makes images of {generator.classes} classes, got a task with "
            f"{task.classes}; use a generator of the task's classes"
        )
    return generator.to(task.device, task.dtype)


def generated(
    generator: Generator, latents: Tensor, labels: Tensor, task: Task, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """The generator's images [N, *input_shape] in the shape of the task's inputs.

    Colour becomes grey by the mean of the channels; sizes are changed by averaging over the area of a pixel.

    Args:
        generator: one that fits the task, see `generator_for`.
        latents: ``[N, latent]``.
        labels: ``[N]``; used if the generator has classes.
        task: the model whose inputs are images.
        weights: weights in place of the generator's own.
    """
    arguments = (latents, labels if generator.classes else None)
    images: Tensor = generator(*arguments) if weights is None else functional_call(generator, dict(weights), arguments)
    if images.shape[1] > task.input_shape[0]:
        images = images.mean(1, keepdim=True)
    _, height, width = task.input_shape
    return images if images.shape[2:] == (height, width) else F.adaptive_avg_pool2d(images, (height, width))


def random_latents(problem: Problem, latent: int) -> Tensor:
    """Starting points ``[victims, examples, latent]`` from the standard normal prior.

    They are drawn victim by victim, so that one does not depend on how many victims follow.
    """
    task, rng = problem.task, problem.generator
    shape = (problem.examples, latent)
    draws = [torch.randn(shape, generator=rng, dtype=task.dtype, device=task.device) for _ in range(problem.victims)]
    return torch.stack(draws)
