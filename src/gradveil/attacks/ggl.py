"""GGL: search the latent space of a generator for images whose gradient matches."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.attacks._generation import MISSING, generated, generator_for, random_latents
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.matching import NOTHING, RELATIVE, Adam, Matching, Space, match, matched_layers
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.parameters import integer, number, text
from gradveil.models.generator import Generator
from gradveil.task import Task


@ATTACKS.register("ggl")
@dataclass(frozen=True, repr=False)
class GGL(Attack):
    r"""Generative gradient leakage: find latent vectors z whose images G(z, y) have the shared gradient.

    .. math:: \min_z \frac{|D(\nabla L(G(z, y), y)) - u|^2}{|u|^2} + pull \cdot |z|^2, \qquad z \sim N(0, 1)

    The labels y are known or inferred first. D is what an adaptive attacker expects the defense to make of a gradient.
    Under noise of known variance the pull of an adaptive attacker grows by variance / \|u\|^2: the cost then has its
    minimum at the most probable z. The generator confines the search to images of its kind, so that little of the
    update is needed; but its pictures look clean whatever the attacker knows. `gradveil.attacks.controls` says what the
    generator alone achieves.

    Batches have one latent vector per example. A generator of larger or colour images also serves tasks with smaller or
    grey ones.

    Args:
        iterations: Adam steps.
        lr: step size in units of the prior's deviation.
        pull: weight of the squared length of the latent vectors, the pull to the prior.
        restarts: independent starting points, drawn from the prior; the best by the attacker's own loss is returned.
        generator: name of a data set for which scripts/train_generator.py made one, ``"face-generator"``, or a file.
        mute: layers left out of the matching, as names of parameters or modules separated by ``|``: the attacker's
            answer to a defense that spoils only some layers. ``"none"``: all are matched.

    References:
        Li et al., Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage, CVPR 2022. They
        prefer optimisers without derivatives (Bayesian optimisation, CMA-ES), and pull to the prior by its KL
        divergence. We use Adam on the latent vectors with several restarts: the derivatives are at hand, and all
        restarts of all victims are evaluated together.

    Example:
        >>> import gradveil, tempfile, torch
        >>> from safetensors.torch import save_file
        >>> file = tempfile.mkdtemp() + "/tiny.safetensors"
        >>> _ = torch.manual_seed(0)
        >>> tiny = Generator(latent=3, side=2, widths=(8,), channels=1)
        >>> save_file(tiny.state_dict(), file)
        >>> image, label = tiny(torch.tensor([[1.0, -1.0, 0.5]])).detach(), torch.tensor([2])
        >>> task = gradveil.Task(gradveil.models.create("mlp", input_shape=(1, 4, 4), classes=3),
        ...                      input_shape=(1, 4, 4), classes=3)
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> attack = GGL(generator=file, iterations=200, restarts=2)
        >>> found = attack.reconstruct(task, update, ThreatModel(), generator=torch.manual_seed(1))
        >>> bool((found.inputs[0] - image).abs().max() < 0.01)
        True
    """

    paper = "Li et al., CVPR 2022"
    caveat = (
        "given a generator of images like the victims'. Its pictures look clean whatever the attacker knows, so the "
        "noise ratio says nothing here."
    )

    adapts = True

    iterations: int = integer(300, low=1)
    lr: float = number(0.2, above=0)
    pull: float = number(1e-6, low=0)
    restarts: int = integer(4, low=1)
    generator: str = text(MISSING)
    mute: str = text(NOTHING)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse a generator that does not fit the task."""
        super().check_threat(task, threat)
        generator_for(self.name, self.generator, task)

    def run(self, problem: Problem) -> Reconstruction:
        """Minimise the relative squared distance over the latent vectors."""
        generator = generator_for(self.name, self.generator, problem.task)
        layers = matched_layers(self.name, problem.updates, self.mute)
        found = search_latents(problem, generator, layers, iterations=self.iterations, lr=self.lr, pull=self.pull)
        return latent_space(problem, generator, self.pull).unpacked(found)


def latent_space(problem: Problem, generator: Generator, pull: float) -> Space:
    """The space of latent vectors ``[examples, latent]``, with the standard normal prior."""

    def unpack(latents: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return generated(generator, latents, labels, problem.task), labels

    return Space(unpack, surprise=lambda latents: latents.square().sum(), weight=pull)


def search_latents(
    problem: Problem, generator: Generator, layers: list[str], *, iterations: int, lr: float, pull: float
) -> Reconstruction:
    """The latent vectors whose images match best, in place of inputs."""
    start, space = random_latents(problem, generator.latent), latent_space(problem, generator, pull)
    return match(problem, start, Adam(lr), Matching(layers, RELATIVE), iterations=iterations, space=space)
