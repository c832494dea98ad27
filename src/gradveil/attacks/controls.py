"""What a generator achieves without the update: controls for the attacks that search one.

A generator's images look like the victims' whatever the attacker knows. So every figure of such an attack needs two
others beside it: the same attack on noise, and random images of the generator. What they reach is no leak.
"""

import torch
from torch import Tensor

from gradveil.attacks._generation import generated, generator_for
from gradveil.task import Task
from gradveil.update import Update


def noise_like(update: Update, generator: torch.Generator) -> Update:
    """Normal noise of the same length (over all layers together) in place of an update, to attack as if it were one.

    The label cannot be inferred from it: give the attack the labels, or compare with one that knows no label either.

    Args:
        update: what the client sent.
        generator: the source of the noise.

    >>> noise = noise_like(Update({"w": torch.tensor([3.0, 4.0])}), torch.manual_seed(0))
    >>> float(noise["w"].norm())
    5.0
    """
    noise = {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)
        for name, value in update.items()
    }
    lengths = [
        torch.stack([value.square().sum() for value in tensors.values()]).sum().sqrt() for tensors in (update, noise)
    ]
    return Update({name: value * (lengths[0] / lengths[1]) for name, value in noise.items()}, update.meta)


@torch.no_grad()
def random_samples(name: str, task: Task, labels: Tensor, generator: torch.Generator) -> Tensor:
    """A random image of a generator for every label, in the shape of the task's inputs.

    Args:
        name: the generator's name or file, as in the attack's parameter `generator`.
        task: the model whose inputs are images.
        labels: ``[N]``; images of their classes are drawn if the generator has classes.
        generator: the source of the latent vectors.
    """
    network = generator_for("random samples", name, task)
    shape = (len(labels), network.latent)
    latents = torch.randn(shape, generator=generator, dtype=task.dtype, device=task.device)
    return generated(network, latents, labels, task)
