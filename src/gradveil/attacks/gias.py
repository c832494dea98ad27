"""GIAS: search a generator's latent space, then its weights, one set of weights per victim."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks._generation import MISSING, generated, generator_for
from gradveil.attacks._restarts import best_of
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import LossHistory, Reconstruction
from gradveil.attacks.ggl import search_latents
from gradveil.attacks.matching import NOTHING, RELATIVE, Adam, Matching, Space, match, matched_layers
from gradveil.attacks.problem import Problem, Progress
from gradveil.attacks.threat import ThreatModel
from gradveil.core.parameters import integer, number, text
from gradveil.models.generator import Generator
from gradveil.task import Task


@ATTACKS.register("gias")
@dataclass(frozen=True, repr=False)
class GIAS(Attack):
    r"""Gradient inversion in alternative spaces: first the latent vectors, then also the generator's weights.

    .. math:: \min_{z, c} \frac{|D(\nabla L(G_w(z, y), y)) - u|^2}{|u|^2} + pull \cdot (|z|^2 + |c|^2),
              \qquad w = w_0 + spread \cdot c

    The first stage is `ggl`: c = 0. The best of its starting points is where the second stage begins, in which z and c
    move together. The generator no longer confines the images to its own, but remains a good place to start. The
    weights w are those of one victim, shared by the examples of its batch. They have a normal prior around the trained
    ones, which counts like that of z: an adaptive attacker weights it by the variance of the noise.

    Args:
        iterations: Adam steps of the latent search.
        weight_iterations: Adam steps of the search that includes the weights.
        lr: step size in units of the prior's deviation: 1 for latent vectors, `spread` for weights.
        pull: weight of the squared length of z and c, the pull to the prior.
        spread: prior deviation of the weights from the trained ones.
        seeds: starting points of the latent search; the best by the attacker's own loss is continued.
        generator: name of a data set for which scripts/train_generator.py made one, ``"face-generator"``, or a file.
        mute: layers left out of the matching, as names of parameters or modules separated by ``|``: the attacker's
            answer to a defense that spoils only some layers. ``"none"``: all are matched.

    References:
        Jeon et al., Gradient Inversion with Generative Image Prior, NeurIPS 2021. The pull of the weights to the
        trained ones is an addition; without it, noise on the update ends up in the weights.

    Example:
        >>> import gradveil, tempfile
        >>> from safetensors.torch import save_file
        >>> file = tempfile.mkdtemp() + "/tiny.safetensors"
        >>> _ = torch.manual_seed(0)
        >>> save_file(Generator(latent=3, side=2, widths=(8,), channels=1).state_dict(), file)
        >>> task = gradveil.Task(gradveil.models.create("mlp", input_shape=(1, 4, 4), classes=3),
        ...                      input_shape=(1, 4, 4), classes=3)
        >>> image, label = torch.rand(1, 1, 4, 4, generator=torch.manual_seed(1)), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> attack = GIAS(generator=file, iterations=50, weight_iterations=400, seeds=1, spread=0.1)
        >>> found = attack.reconstruct(task, update, ThreatModel(), generator=torch.manual_seed(1))
        >>> bool((found.inputs[0] - image).abs().mean() < 0.05)  # an image that the generator cannot make
        True
    """

    paper = "Jeon et al., NeurIPS 2021"
    caveat = (
        "given a generator of images like the victims'. Its pictures look clean whatever the attacker knows, so the "
        "noise ratio says nothing here."
    )

    adapts = True

    iterations: int = integer(300, low=1)
    weight_iterations: int = integer(300, low=1)
    lr: float = number(0.1, above=0)
    pull: float = number(1e-6, low=0)
    spread: float = number(0.03, above=0)
    seeds: int = integer(4, low=1)
    generator: str = text(MISSING)
    mute: str = text(NOTHING)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse a generator that does not fit the task."""
        super().check_threat(task, threat)
        generator_for(self.name, self.generator, task)

    def run(self, problem: Problem) -> Reconstruction:
        """Find the latent vectors of every victim, then continue with the weights."""
        generator = generator_for(self.name, self.generator, problem.task)
        layers = matched_layers(self.name, problem.updates, self.mute)

        def search(problem: Problem) -> Reconstruction:
            return search_latents(problem, generator, layers, iterations=self.iterations, lr=self.lr, pull=self.pull)

        total = self.iterations + self.weight_iterations
        first = best_of(self.seeds, search, replace(problem, progress=_part(problem.progress, 0, total)))
        if first.interrupted:
            space = weight_space(problem, generator, self.spread, self.pull)
            return space.unpacked(replace(first, inputs=with_weights(first.inputs, generator)))
        # The order of the labels that fitted best, if there were several.
        problem = replace(problem, labels=first.labels, progress=_part(problem.progress, self.iterations, total))
        space = weight_space(problem, generator, self.spread, self.pull)
        found = match(
            problem,
            with_weights(first.inputs, generator),
            Adam(self.lr),
            Matching(layers, RELATIVE),
            iterations=self.weight_iterations,
            space=space,
        )
        assert first.history is not None
        assert found.history is not None
        history = LossHistory(first.history.start, found.history.late, first.history.restarts)
        return replace(space.unpacked(found), iterations=first.iterations + found.iterations, history=history)


def with_weights(latents: Tensor, generator: Generator) -> Tensor:
    """Candidates ``[victims, n]`` of the space of latent vectors and weights, at the trained weights."""
    changes = latents.new_zeros(len(latents), sum(value.numel() for value in generator.parameters()))
    return torch.cat([latents.flatten(1), changes], dim=1)


def weight_space(problem: Problem, generator: Generator, spread: float, pull: float) -> Space:
    """The space of latent vectors and changes of the weights, with the standard normal prior."""
    trained = dict(generator.named_parameters())
    latent_values = problem.examples * generator.latent
    sizes = [value.numel() for value in trained.values()]

    def unpack(candidate: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        latents, *changes = torch.split(candidate, [latent_values, *sizes])
        weights = {
            name: value + spread * change.view_as(value)
            for (name, value), change in zip(trained.items(), changes, strict=True)
        }
        return generated(generator, latents.view(problem.examples, -1), labels, problem.task, weights), labels

    return Space(unpack, surprise=lambda candidate: candidate.square().sum(), weight=pull)


def _part(progress: Progress, before: int, total: int) -> Progress:
    """Report the progress of one search as part of several, at the pace of this one."""
    if progress is None:
        return None

    def report(done: int, steps: int, left: float) -> None:
        later = total - before - steps
        progress(before + done, total, left + later * left / max(1, steps - done))

    return report
