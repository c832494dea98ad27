"""CI-Net: an untrained, over-parameterised network as the image prior."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.matching import COSINE, NOTHING, Adam, Matching, Space, check_prior, match, matched_layers
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.core.parameters import integer, number, text
from gradveil.task import Task

LATENT_CHANNELS = 64
GROUPS = 8
_BLOCKS = 3


@ATTACKS.register("ci-net")
@dataclass(frozen=True, repr=False)
class CINet(Attack):
    r"""Find the weights of an untrained network whose output, for a fixed random input, has the shared gradient.

    .. math:: \min_w 1 - \cos(\nabla L(N_w(v), y), u) + tv \cdot TV(N_w(v))

    The network N turns v, drawn once as ``[examples, 64, height / 8, width / 8]`` (rounded up), into images by three
    blocks (upsampling by 2, a 3 x 3 convolution, group norm, LeakyReLU), a 1 x 1 convolution and a sigmoid; what is
    larger than the images is cropped. It has more weights than the batch has pixels: the width of its blocks is the
    smallest multiple of 64 for which that is so. Convolutions fit smooth images sooner than noise, which is all the
    prior there is: it needs no public data.

    Args:
        iterations: Adam steps.
        lr: step size of the weights.
        tv: weight of the total variation.
        restarts: independent initial weights; the best by the attacker's own loss is returned.
        mute: layers left out of the matching, as names of parameters or modules separated by ``|``: the attacker's
            answer to a defense that spoils only some layers. ``"none"``: all are matched.

    References:
        Zhang et al., Generative Gradient Inversion via Over-Parameterized Networks in Federated Learning, ICCV 2023.

    Example:
        >>> import gradveil
        >>> task = gradveil.Task(gradveil.models.create("mlp", input_shape=(1, 8, 8), classes=3),
        ...                      input_shape=(1, 8, 8), classes=3)
        >>> image, label = torch.linspace(0, 1, 64).view(1, 1, 8, 8), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> attack = CINet(iterations=300, lr=0.003)
        >>> found = attack.reconstruct(task, update, ThreatModel(), generator=torch.manual_seed(0))
        >>> bool((found.inputs[0] - image).abs().mean() < 0.05)
        True
    """

    paper = "Zhang et al., ICCV 2023"

    adapts = True

    iterations: int = integer(1000, low=1)
    lr: float = number(1e-3, above=0)
    tv: float = number(1e-4, low=0)
    restarts: int = integer(1, low=1)
    mute: str = text(NOTHING)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse inputs that are not images."""
        super().check_threat(task, threat)
        if len(task.input_shape) != 3:
            raise ThreatModelError(
                f"{self.name}: needs images [channels, height, width], got inputs of shape {list(task.input_shape)}; "
                "use inverting-gradients with tv=0"
            )
        if self.tv:
            check_prior(self.name, "tv", task)

    def run(self, problem: Problem) -> Reconstruction:
        """Minimise one minus the cosine over the weights, packed into one vector."""
        task, modality = problem.task, problem.modality
        channels, height, width = task.input_shape
        rows, columns = (math.ceil(side / 2**_BLOCKS) for side in (height, width))
        planes = block_width(problem.examples * math.prod(task.input_shape), channels)
        fixed = torch.randn(
            (problem.examples, LATENT_CHANNELS, rows, columns),
            generator=problem.generator,
            dtype=task.dtype,
            device=task.device,
        )
        # Drawn victim by victim, so that a start does not depend on how many victims follow.
        start = torch.stack([self._weights(problem, planes) for _ in range(problem.victims)])
        with torch.device("meta"):
            network = untrained_network(planes, channels)
        shapes = {name: value.shape for name, value in network.named_parameters()}

        def unpack(weights: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            parts = torch.split(weights, [shape.numel() for shape in shapes.values()])
            named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
            images: Tensor = functional_call(network, named, (fixed,))
            return images[:, :, :height, :width], labels

        def prior(inputs: Tensor) -> Tensor:
            penalty = modality.prior(inputs)
            assert penalty is not None  # see `check_threat`
            return self.tv * penalty

        matching = Matching(matched_layers(self.name, problem.updates, self.mute), COSINE, prior if self.tv else None)
        space = Space(unpack)
        return space.unpacked(match(problem, start, Adam(self.lr), matching, iterations=self.iterations, space=space))

    def _weights(self, problem: Problem, planes: int) -> Tensor:
        """One victim's initial weights, as torch draws them."""
        rng, task = problem.generator, problem.task
        seed = int(torch.randint(1 << 31, (1,), generator=rng, device=rng.device))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            network = untrained_network(planes, task.input_shape[0])
            return parameters_to_vector(network.parameters()).to(task.device, task.dtype)


def untrained_network(planes: int, channels: int) -> nn.Sequential:
    """The network with blocks of `planes` planes, with random weights, for images with `channels` channels."""
    layers: list[nn.Module] = []
    for before in (LATENT_CHANNELS, *[planes] * (_BLOCKS - 1)):
        layers += [
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(before, planes, 3, padding=1),
            nn.GroupNorm(GROUPS, planes),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers, nn.Conv2d(planes, channels, 1), nn.Sigmoid())


def block_width(pixels: int, channels: int) -> int:
    """The smallest multiple of 64 planes with which `untrained_network` has more weights than there are `pixels`.

    >>> block_width(3 * 32 * 32, 3), block_width(128 * 3 * 32 * 32, 3)
    (64, 192)
    """
    planes = 0
    weights = 0
    while weights <= pixels:
        planes += 64
        with torch.device("meta"):
            weights = sum(value.numel() for value in untrained_network(planes, channels).parameters())
    return planes
