"""R-GAP: invert the network layer by layer, from the classifier to the image."""

from dataclasses import dataclass

import torch
from torch import nn

from gradveil.attacks._recursion import chain_of, check_invertible, distances, invert_head, invert_leaf, weight_of
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.core.parameters import integer
from gradveil.task import Task
from gradveil.theory.rank import why_impassable


@ATTACKS.register("r-gap")
@dataclass(frozen=True, repr=False)
class RGap(Attack):
    r"""Solve for the input of each layer in turn, with linear algebra only.

    For a layer with input a, output z and error signal :math:`k = \partial L / \partial z` it solves, by least squares,

    .. math:: W a = z, \qquad \nabla W = k a^T \; (\text{a convolution: } a * k),

    inverts the activation in front of the layer and continues with
    :math:`k' = (W^T k) \cdot \sigma'`. A linear layer is solved by the second set alone.
    `gradveil.theory.recursion_ranks` says beforehand which networks can be inverted. Networks that are not a plain
    chain of convolutions, linear layers and (leaky) ReLUs or sigmoids are refused. If there are too few equations, the
    smallest solution is taken.

    At the classifier ``∇W = k a^T`` fixes k and a up to one factor. With a bias, k is the bias gradient. Without one,
    the factor is a root of a scalar equation, ``k(z) = softmax(z) - e_y`` (or ``sigmoid(z) - y`` for one logit) with
    ``z = W a``. There can be two roots and, for one logit, two labels: all are followed to the image, and the one whose
    gradient comes nearest to the shared one is returned.

    Where the paper leaves room: it treats one logit with a logistic loss; ten logits need nothing more, because the
    label is the largest entry of k and ten equations fix the one factor. Both sets of equations have equal weight, the
    second with k scaled to norm 1. The least-squares problem is solved for all victims at once by conjugate gradients
    (CGLS) on the convolutions themselves, not by a dense inverse, and always in double precision.

    Args:
        steps: maximum number of CGLS steps per layer; the solver stops as soon as every victim has converged.

    References:
        Zhu and Blaschko, R-GAP: Recursive Gradient Attack on Privacy, ICLR 2021.

    Example:
        >>> import gradveil
        >>> from gradveil import metrics, models
        >>> model = models.create("cnn6", input_shape=(1, 8, 8), classes=1)
        >>> task = gradveil.Task(model, "logistic", input_shape=(1, 8, 8), classes=2)
        >>> image, label = torch.rand(1, 1, 8, 8, generator=torch.manual_seed(1)), torch.tensor([1])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> found = RGap().reconstruct(task, update, ThreatModel())
        >>> found.labels.tolist(), bool(metrics.psnr(image, found.inputs[0].clamp(0, 1)) > 60)
        ([[1]], True)
    """

    paper = "Zhu & Blaschko, ICLR 2021"
    finds_labels = True

    steps: int = integer(1000, low=1)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse batches, local steps, and networks that cannot be inverted layer by layer."""
        super().check_threat(task, threat)
        check_invertible(self.name, task, threat)
        if threat.batch_size != 1:
            raise ThreatModelError(
                f"{self.name}: inverts the gradient of one example, got batch_size={threat.batch_size}; use a batch of "
                "one"
            )
        if threat.known_labels is not None and threat.known_labels.is_floating_point():
            raise ThreatModelError(f"{self.name}: known_labels must be class numbers, got probabilities")
        chain = chain_of(task)
        if task.classifier is None or not isinstance(chain[-1].module, nn.Linear):
            raise InputError(f"{self.name}: the model must end in a linear classifier, got {chain[-1].name!r}")
        names = [leaf.name for leaf in chain]
        for leaf in chain:
            obstacle = why_impassable(leaf.module)
            if not leaf.follows:
                obstacle = "it is not fed by the layer before it alone"
            elif isinstance(leaf.module, nn.Linear | nn.Conv2d) and f"{leaf.name}.weight" not in task.parameters:
                obstacle = "its weights are not trained, or shared with another layer, so it has no gradient of its own"
            elif names.count(leaf.name) > 1 and any(True for _ in leaf.module.parameters()):
                obstacle = "it runs more than once, so its gradient is a sum"
            if obstacle:
                raise InputError(
                    f"{self.name}: cannot pass {leaf.name!r} ({type(leaf.module).__name__}): {obstacle}; use a plain "
                    "chain such as cnn6, lenet or mlp"
                )

    @torch.no_grad()
    def run(self, problem: Problem) -> Reconstruction:
        """Go through the chain backwards, with all victims and all hypotheses about the classifier together."""
        task = problem.task
        chain = chain_of(task)
        targets = {name: value.double() for name, value in problem.updates.items()}
        known_labels = problem.labels[:, 0] if problem.threat.labels == "known" else None
        head = chain[-1]
        hypotheses = invert_head(task, head, targets, known_labels)
        victim, number = hypotheses.distinct.nonzero(as_tuple=True)
        repeated = {name: value[victim] for name, value in targets.items()}
        signal = (hypotheses.signal[victim, number] @ weight_of(head))[:, None]
        values, labels = hypotheses.values[victim, number, None], hypotheses.labels[victim, number]
        known = torch.ones_like(values, dtype=torch.bool)
        for done, leaf in enumerate(reversed(chain[:-1]), start=1):
            values, signal, known = invert_leaf(leaf, values, signal, known, repeated, self.steps)
            if problem.progress:
                problem.progress(done, len(chain), 0.0)
        images = task.denormalised(values.view(-1, *task.input_shape))
        losses = torch.full(hypotheses.distinct.shape, torch.inf, dtype=torch.float64, device=values.device)
        losses[hypotheses.distinct] = distances(task, images[:, None], labels[:, None], repeated)
        best = losses.argmin(1)
        index = torch.zeros_like(hypotheses.labels)  # of each distinct hypothesis among the images
        index[hypotheses.distinct] = torch.arange(len(victim), device=index.device)
        victims = torch.arange(len(best), device=index.device)
        chosen = index[victims, best]
        return Reconstruction(
            inputs=images[chosen][:, None],
            labels=labels[chosen][:, None],
            loss=losses[victims, best],
            iterations=torch.zeros(len(best), dtype=torch.long),
            execution="batch",
        )
