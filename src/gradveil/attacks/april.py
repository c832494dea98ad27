"""APRIL: the gradient of a learned position embedding gives a vision transformer's image away."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.attacks._linear_input import check_single_gradient
from gradveil.attacks._recursion import distances
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.core.randomness import derived_generator
from gradveil.task import Gradients, Task
from gradveil.theory.rank import Leaf, trace

_SAME = 1e-9  # relative difference up to which two gradients in double precision are the same


@dataclass(frozen=True, eq=False)
class Patches:
    """How a model turns an image into tokens.

    Args:
        embedding: name of the convolution that maps each patch to a token.
        side: height and width of a patch.
        positions: name of the learned positions that are added to the tokens.
        first: how many of the positions come before those of the patches, for class tokens.
        count: number of patches.
        width: number of values of a token.

    Example:
        >>> Patches("tokens.patches", (4, 4), "tokens.positions", first=1, count=64, width=128).count
        64
    """

    embedding: str
    side: tuple[int, ...]
    positions: str
    first: int
    count: int
    width: int


@ATTACKS.register("april")
@dataclass(frozen=True, repr=False)
class April(Attack):
    r"""Solve for the patches of a single image, given the gradient of the learned position embedding.

    Tokens are :math:`z_t = E x_t + e + p_t`, with patches :math:`x_t`, the embedding E, e and the positions p. So the
    gradient of the positions is that of the tokens, and the embedding's gradient is linear in the patches:

    .. math:: g_t = \frac{\partial L}{\partial z_t} = \frac{\partial L}{\partial p_t}, \qquad
        \frac{\partial L}{\partial E} = \sum_t g_t x_t^T

    These are (token width) x (values of a patch) equations, which determine the patches if the width is at least the
    number of patches and no two patches get the same gradient; whatever follows the embedding does not matter.

    The paper inserts :math:`\partial L / \partial z` into the equations of the first attention instead, which
    requires that the tokens enter it as they are. In our `vit`, as in most transformers, a normalisation stands before
    the attention and a shortcut around it. The embedding's own equations need neither to be absent.

    Directions in which the gradients of the tokens do not stand out of the noise, which is measured on what the
    patches leave unexplained, keep the mean patch, which the embedding's gradients also give. The loss is the relative
    distance between the shared gradients and those of what was found.

    References:
        Lu, Zhang, Zhao, He and Cheng, APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers, CVPR 2022.

    Example:
        >>> import gradveil
        >>> from gradveil import metrics, models
        >>> model = models.create("vit", input_shape=(1, 8, 8), classes=3).double()
        >>> task = gradveil.Task(model, input_shape=(1, 8, 8), classes=3)
        >>> image = torch.rand(1, 1, 8, 8, generator=torch.manual_seed(1), dtype=torch.float64)
        >>> update = gradveil.defense("none").share(task, image, torch.tensor([2]))
        >>> found = April().reconstruct(task, update, ThreatModel())
        >>> bool((found.inputs[0] - image).abs().max() < 1e-9)
        True
    """

    paper = "Lu et al., CVPR 2022"

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse batches, local steps, and models without a patch embedding and learned positions."""
        super().check_threat(task, threat)
        if threat.batch_size != 1:
            raise ThreatModelError(
                f"{self.name}: reads single images, got batch_size={threat.batch_size}; a batch adds up in the "
                "gradient of the positions, use a gradient-matching attack"
            )
        check_single_gradient(self.name, task, threat)
        find_patches(self.name, task)

    @torch.no_grad()
    def run(self, problem: Problem) -> Reconstruction:
        """Solve the equations of all victims."""
        task, patches = problem.task, find_patches(self.name, problem.task)
        updates = {name: value.double() for name, value in problem.updates.items()}
        found = []
        for victim in range(problem.victims):
            solved = solve(patches, {name: value[victim] for name, value in updates.items()})
            values = nn.functional.fold(solved.T[None], task.input_shape[1:], patches.side, stride=patches.side)
            found.append(task.denormalised(values))
            if problem.progress:
                problem.progress(victim + 1, problem.victims, 0.0)
        images = torch.stack(found)
        losses = distances(task, images, problem.labels, updates)
        return Reconstruction(images, problem.labels, losses, torch.zeros(problem.victims, dtype=torch.long))


def solve(patches: Patches, update: Gradients) -> Tensor:
    """The normalised patches ``[count, values]`` behind the gradients of one image, in double precision."""
    tokens = update[patches.positions].reshape(-1, patches.width)[patches.first : patches.first + patches.count]
    product = update[f"{patches.embedding}.weight"].flatten(1)  # [width, values]
    total = tokens.sum(0)
    mean = total @ product / total.square().sum().clamp_min(torch.finfo(total.dtype).tiny)
    missing = product - torch.outer(total, mean)  # what the mean patch alone does not explain
    left, sizes, right = torch.linalg.svd(tokens.T, full_matrices=False)
    explained = left.T @ missing
    unexplained = (missing - left @ explained).square().sum()
    freedom = max(1, (patches.width - patches.count) * product.shape[1])
    noise = float(unexplained / freedom) ** 0.5
    rounding = torch.finfo(sizes.dtype).eps * float(sizes[0])
    heard = sizes > max(noise, rounding) * (patches.width**0.5 + patches.count**0.5)
    solved: Tensor = mean + right[heard].T @ (explained[heard] / sizes[heard, None])
    return solved


def find_patches(owner: str, task: Task) -> Patches:
    """How a model turns an image into patches; one without a patch embedding and learned positions is refused.

    Args:
        owner: the caller's name, for error messages.
        task: the model.
    """
    generator = derived_generator(0, "patches")
    probe = task.modality.start((1, *task.input_shape), generator, dtype=torch.float64, device=generator.device)
    if len(task.input_shape) != 3 or not probe.is_floating_point():
        raise InputError(f"{owner}: needs images, got {task.modality.name} inputs of shape {list(task.input_shape)}")
    probe = probe.to(task.device)
    fed = task.normalised(probe)
    leaf = next((leaf for leaf in trace(task, probe) if torch.equal(leaf.inputs, fed) and _cuts_patches(leaf)), None)
    if leaf is None or f"{leaf.name}.weight" not in task.parameters:
        raise InputError(
            f"{owner}: expected a model that cuts the image into patches by a trained convolution whose stride is its "
            "kernel, got none; use a vision transformer such as vit"
        )
    _, width, rows, columns = leaf.outputs.shape
    count = rows * columns
    if count > width:
        raise InputError(
            f"{owner}: {count} patches have more values than the gradient of an embedding of width {width} has "
            "equations; larger patches or a wider model could be solved"
        )
    signal, gradients = _gradients_at(task, leaf.name, probe, generator)
    tokens = signal[0].flatten(1).T  # [count, width]
    for name, gradient in gradients.items():
        if gradient.ndim < 2 or gradient.shape[-1] != width or gradient.numel() < tokens.numel():
            continue
        every = gradient.reshape(-1, width)
        for first in range(len(every) - count + 1):
            if float((every[first : first + count] - tokens).norm()) <= _SAME * float(tokens.norm()):
                side = tuple(int(size) for size in leaf.module.kernel_size)  # type: ignore[union-attr]
                return Patches(leaf.name, side, name, first, count, width)
    raise InputError(
        f"{owner}: expected learned positions that are added to the patches, whose gradient is that of the tokens, got "
        "a model without; use a gradient-matching attack"
    )


def _cuts_patches(leaf: Leaf) -> bool:
    module = leaf.module
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == module.stride
        and module.groups == 1
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and all(size % side == 0 for size, side in zip(leaf.inputs.shape[2:], module.kernel_size, strict=True))
    )


def _gradients_at(task: Task, module: str, probe: Tensor, generator: torch.Generator) -> tuple[Tensor, Gradients]:
    """The gradients of a random mixture of the model's outputs: at a module's output, and of each parameter."""
    model, outputs = task.to(torch.float64).copy_model(), list[Tensor]()
    model.get_submodule(module).register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    parameters = {name: value for name, value in model.named_parameters() if name in task.parameters}
    with torch.enable_grad():
        for value in parameters.values():
            value.requires_grad_()
        result = model(task.normalised(probe))
        mixture = torch.randn(result.shape, generator=generator, dtype=torch.float64, device=generator.device)
        wanted = [outputs[0], *parameters.values()]
        found = torch.autograd.grad((result * mixture.to(result)).sum(), wanted, allow_unused=True)
    named = zip(parameters, found[1:], strict=True)
    assert found[0] is not None
    return found[0], {name: gradient for name, gradient in named if gradient is not None}
