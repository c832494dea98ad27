"""First layer: the input of a linear layer is the quotient of its gradients."""

from dataclasses import dataclass

import torch

from gradveil.attacks import _linear_input as linear
from gradveil.attacks._recursion import distances
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.task import Task


@ATTACKS.register("first-layer")
@dataclass(frozen=True, repr=False)
class FirstLayer(Attack):
    r"""Read a single example off the gradients of a linear layer that is fed the input.

    .. math:: \nabla W = k x^T, \quad \nabla b = k \qquad \Rightarrow \qquad x = \nabla W_i / \nabla b_i
        \text{ for every unit i with } k_i \ne 0

    All units together are the best product :math:`k [x^T \mid 1]` of rank one, found by a singular value decomposition;
    with independent noise of one size on all coordinates that is the most likely one. An adaptive attacker fits it to
    the coordinates that it believes: to those that arrived, or weighted by the inverse of their noise's variance.

    The loss is the relative distance between the shared gradients and those of what was found, over all layers. It is
    zero up to rounding for an undefended update, and says that nothing was verified if it is not.

    References:
        Phong, Aono, Hayashi, Wang and Moriai, Privacy-Preserving Deep Learning via Additively Homomorphic Encryption,
        IEEE TIFS 2018, for the quotient; Geiping et al., NeurIPS 2020, proposition 3.1.

    Example:
        >>> import gradveil
        >>> from gradveil import metrics, models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3, activation="sigmoid")
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> image, label = torch.rand(1, 1, 4, 4, generator=torch.manual_seed(1)), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> found = FirstLayer().reconstruct(task, update, ThreatModel())
        >>> found.labels.tolist(), bool(metrics.psnr(image, found.inputs[0]) > 90)
        ([[2]], True)
    """

    paper = "Phong et al., TIFS 2018"
    adapts = True
    finds_labels = True

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse batches, local steps, and models that do not begin with a linear layer with a bias."""
        super().check_threat(task, threat)
        if threat.batch_size != 1:
            raise ThreatModelError(
                f"{self.name}: reads single examples, got batch_size={threat.batch_size}; spear separates batches"
            )
        linear.check_single_gradient(self.name, task, threat)
        linear.find_layer(self.name, task)

    @torch.no_grad()
    def run(self, problem: Problem) -> Reconstruction:
        """Fit the product, victim by victim."""
        task, layer = problem.task.to(torch.float64), linear.find_layer(self.name, problem.task)
        known = problem.labels if problem.threat.labels == "known" else None
        inputs, labels = [], []
        for victim in range(problem.victims):
            update = {name: value[victim] for name, value in problem.updates.items()}
            matrix = linear.joined(layer, update)
            product = linear.fit_product(matrix, 1, linear.reader(layer, update, problem.knowledge))
            rows = product.right if len(product.sizes) else matrix.mean(0, keepdim=True)
            signal = rows[:, -1:] * (product.left.T if len(product.sizes) else torch.ones_like(matrix[None, :, 0]))
            found = task.denormalised((rows[:, :-1] / rows[:, -1:]).view(1, *task.input_shape))
            inputs.append(found)
            labels.append(linear.find_labels(task, layer, found, signal, None if known is None else known[victim]))
            if problem.progress:
                problem.progress(victim + 1, problem.victims, 0.0)
        images, targets = torch.stack(inputs), torch.stack(labels)
        losses = distances(task, images, targets, problem.updates)
        return Reconstruction(images, targets, losses, torch.zeros(problem.victims, dtype=torch.long))
