r"""What attacks on a linear layer that is fed the input share: finding the layer, and its gradient as a product.

For a batch of b the layer's gradients are, with the error signals :math:`k_i` at its outputs,

.. math:: [\nabla W \mid \nabla b] = \sum_i k_i \, [x_i^T \mid 1]

a matrix of rank b whose row space holds the inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.core.randomness import derived_generator
from gradveil.defenses.knowledge import Knowledge
from gradveil.metrics.matching import optimize
from gradveil.task import Gradients, Task
from gradveil.theory.rank import trace

REFITS = 100
"""Most steps of the alternating least squares that fit a product of low rank to a part of the coordinates."""
_CONVERGED = 1e-12  # they stop when a step changes less than this share of the matrix
_STALLED = 5  # or when so many steps in succession did not change it less than before
_RIDGE = 1e-13  # keeps a row or column of which nothing arrived solvable, relative to the largest


@dataclass(frozen=True, eq=False)
class InputLayer:
    """A linear layer that is fed the flattened input.

    Args:
        name: the module's name.
        weight: its weights, ``[units, values]``, in double precision.
        bias: its bias, ``[units]``.
        rectified: whether a ReLU follows, so that the error signal of an example is zero where its output is negative.

    Example:
        >>> task = Task(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), input_shape=(3,), classes=2)
        >>> layer = find_layer("test", task)
        >>> layer.name, layer.rectified
        ('0', True)
    """

    name: str
    weight: Tensor
    bias: Tensor
    rectified: bool

    @property
    def names(self) -> tuple[str, str]:
        """The names of its parameters."""
        return parameter_of(self.name, "weight"), parameter_of(self.name, "bias")


def parameter_of(module: str, kind: str) -> str:
    """The full name of a module's parameter; the module may be the model itself, whose name is empty."""
    return f"{module}.{kind}" if module else kind


def check_single_gradient(owner: str, task: Task, threat: ThreatModel) -> None:
    """Refuse what leaves no product of low rank to read: local steps, batch statistics, dropout; and unknown labels.

    Args:
        owner: the caller's name, for error messages.
        task: the model and its loss.
        threat: what the attacker may know.
    """
    if threat.local is not None or threat.rounds > 1:
        raise ThreatModelError(
            f"{owner}: reads one gradient, got local={threat.local} and rounds={threat.rounds}; use ThreatModel(local="
            "None, rounds=1)"
        )
    if task.has_batch_statistics or task.has_dropout:
        what = "batch norm on the statistics of the batch" if task.has_batch_statistics else "active dropout"
        raise InputError(
            f"{owner}: cannot verify what it finds in a model with {what}; put these modules in eval mode "
            "(--norms inference, --dropout inference)"
        )
    if threat.labels == "infer" and (task.loss_name is None or task.classes is None or task.positions):
        raise ThreatModelError(
            f"{owner}: finds the labels only if every input has one class and the loss is cross-entropy or logistic; "
            "use ThreatModel(labels='known', known_labels=...), or --labels known"
        )
    if threat.adaptive and threat.defense is not None and not threat.defense.has_adaptive_attacker:
        raise ThreatModelError(
            f"{owner}: has no adaptive form against {threat.defense.name}, whose draws can only be simulated; use "
            "ThreatModel(adaptive=False) or a gradient-matching attack"
        )


def find_layer(owner: str, task: Task) -> InputLayer:
    """The linear layer that is fed the (normalised) input, flattened; a model without one is refused.

    Args:
        owner: the caller's name, for error messages.
        task: the model.
    """
    generator = derived_generator(0, "first-layer")
    # Random values, so that a layer that is fed the input in another order is not mistaken for one.
    probe = task.modality.start((1, *task.input_shape), generator, dtype=torch.float64, device=generator.device)
    if not probe.is_floating_point():
        raise InputError(f"{owner}: needs inputs that are numbers, got {task.modality.name} inputs")
    probe = probe.to(task.device)
    leaves, fed = trace(task, probe), task.normalised(probe).flatten()
    for index, leaf in enumerate(leaves):
        layer = leaf.module
        if not isinstance(layer, nn.Linear) or not torch.equal(leaf.inputs.flatten(), fed) or leaf.inputs.ndim != 2:
            continue
        missing = [kind for kind in ("weight", "bias") if parameter_of(leaf.name, kind) not in task.parameters]
        if missing:
            raise InputError(
                f"{owner}: the first layer {leaf.name!r} must have a trained weight and bias of its own, whose "
                f"gradients reveal its input; got no gradient of its {missing[0]}"
            )
        if sum(getattr(other.module, "weight", None) is layer.weight for other in leaves) > 1:
            raise InputError(f"{owner}: the first layer {leaf.name!r} runs more than once, so its gradient is a sum")
        following = leaves[index + 1] if index + 1 < len(leaves) else None
        behind = None if following is None else following.inputs.flatten()
        rectified = behind is not None and (
            (isinstance(following.module, nn.ReLU) and torch.equal(behind, leaf.outputs.flatten()))  # type: ignore[union-attr]
            or torch.equal(behind, leaf.outputs.clamp_min(0).flatten())  # a ReLU outside any module
        )
        return InputLayer(leaf.name, layer.weight.detach(), layer.bias.detach(), rectified)
    raise InputError(
        f"{owner}: expected a model whose first layer is a linear layer on the flattened input, got "
        f"{type(leaves[0].module).__name__} {leaves[0].name!r} first; use a fully connected model such as mlp"
    )


@dataclass(frozen=True, eq=False)
class Product:
    """The gradients of the layer as ``left diag(sizes) right``, as far as they stand out of the noise.

    Args:
        left: ``[units, rank]``, orthonormal columns.
        sizes: ``[rank]``, the largest first.
        right: ``[rank, values + 1]``, orthonormal rows; the last column belongs to the bias.
        noise: standard deviation of what is left, per coordinate.

    Example:
        >>> product = fit_product(torch.outer(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 1.0])).double(), 2)
        >>> len(product.sizes), bool(product.noise < 1e-12)
        (1, True)
    """

    left: Tensor
    sizes: Tensor
    right: Tensor
    noise: float


def joined(layer: InputLayer, gradients: Gradients) -> Tensor:
    """The gradients of weight and bias as one matrix, ``[..., units, values + 1]``, in double precision."""
    weight, bias = (gradients[name].double() for name in layer.names)
    return torch.cat([weight, bias[..., None]], dim=-1)


def fit_product(
    matrix: Tensor, rank: int, read: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None, noise: float | None = None
) -> Product:
    r"""The nearest product of at most this rank, cut where its singular values no longer stand out of the noise.

    Noise of standard deviation s on every coordinate of an m x n matrix has singular values of up to
    :math:`s (\sqrt m + \sqrt n)` (the edge of the Marchenko-Pastur law); what lies below says nothing.

    Args:
        matrix: what was observed, ``[m, n]``, in double precision.
        rank: the largest rank, the size of the batch.
        read: turns a product into the values that the attacker believes, given it, and their weights, both ``[m, n]``.
            The product is then fitted by alternating (weighted) least squares. None: all of the matrix is believed.
        noise: the standard deviation if it is known; None: it is measured on what the product does not explain.
    """
    rank = min(rank, *matrix.shape)
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    values, weights = matrix, torch.ones_like(matrix)
    if read is not None:
        factors = left[:, :rank] * sizes[:rank].sqrt(), sizes[:rank, None].sqrt() * right[:rank]
        factors, values, weights = _alternate(factors, read)
        left, sizes, right = torch.linalg.svd(factors[0] @ factors[1], full_matrices=False)
    left, sizes, right = left[:, :rank], sizes[:rank], right[:rank]
    if noise is None:
        missed = (values - left * sizes @ right).square() * weights
        unknowns = rank * (sum(matrix.shape) - rank)
        freedom = max(1.0, float(weights.sum()) * (1 - unknowns / max(matrix.numel(), unknowns + 1)))
        noise = float(missed.sum() / freedom) ** 0.5
    rounding = torch.finfo(matrix.dtype).eps * float(sizes.max()) if len(sizes) else 0.0
    edge = max(noise, rounding) * (matrix.shape[0] ** 0.5 + matrix.shape[1] ** 0.5)
    kept = int((sizes > edge).sum())
    return Product(left[:, :kept], sizes[:kept], right[:kept], max(noise, rounding / matrix.shape[1] ** 0.5))


def _alternate(
    factors: tuple[Tensor, Tensor], read: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Fit a product to the values that are believed by alternating weighted least squares."""
    left, right = factors
    fit, smallest, stalled = left @ right, float("inf"), 0
    for _ in range(REFITS):
        values, weights = read(fit)
        right = _solved(left, values.T, weights.T).T
        left = _solved(right.T, values, weights)
        previous, fit = fit, left @ right
        change = float((fit - previous).norm() / fit.norm().clamp_min(torch.finfo(fit.dtype).tiny))
        stalled = 0 if change < smallest else stalled + 1
        smallest = min(change, smallest)
        if smallest <= _CONVERGED or stalled == _STALLED:
            break
    return (left, right), *read(fit)


def _solved(known: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """For every row r, the x that minimises ``|weights_r^(1/2) (known x - values_r)|``; ``[rows, rank]``."""
    rank = known.shape[1]
    squares = (known[:, :, None] * known[:, None]).flatten(1)  # [columns, rank * rank]
    gram = (weights @ squares).view(-1, rank, rank)
    ridge = _RIDGE * gram.diagonal(dim1=1, dim2=2).amax().clamp_min(torch.finfo(gram.dtype).tiny)
    gram = gram + ridge * torch.eye(rank, dtype=gram.dtype, device=gram.device)
    solved: Tensor = torch.linalg.solve(gram, ((weights * values) @ known)[..., None])[..., 0]
    return solved


def reader(
    layer: InputLayer, update: Gradients, knowledge: Knowledge | None
) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """What an adaptive attacker believes of the layer's gradients of one victim, for `fit_product`."""
    if knowledge is None or knowledge.read is None:
        return None
    shared, believe = {name: update[name].double() for name in layer.names}, knowledge.read

    def read(fit: Tensor) -> tuple[Tensor, Tensor]:
        evidence = believe(dict(zip(layer.names, (fit[:, :-1], fit[:, -1]), strict=True)), shared)
        values = joined(layer, evidence.values)
        weights = torch.ones_like(values) if evidence.weights is None else joined(layer, evidence.weights)
        return values, weights

    return read


def declared_noise(knowledge: Knowledge | None, update: Gradients) -> float | None:
    """The standard deviation of the noise that a defense declares, for one victim; None: it declares none."""
    if knowledge is None:
        return None
    variance = knowledge.variance(update) if callable(knowledge.variance) else knowledge.variance
    return float(variance) ** 0.5 or None


def find_labels(task: Task, layer: InputLayer, inputs: Tensor, signals: Tensor, known_labels: Tensor | None) -> Tensor:
    """The label of each input: the one whose error signal points most nearly in the direction of the observed one.

    Args:
        task: the model, in double precision.
        layer: the layer at whose outputs the signals were observed.
        inputs: ``[examples, *input_shape]``.
        signals: ``[examples, units]``, up to positive factors.
        known_labels: the labels ``[examples, ...]`` in any order, which are then assigned; None: any class.
    """
    parameters, (_, bias) = task.parameters, layer.names
    choices = known_labels if known_labels is not None else torch.arange(task.classes or 1, device=inputs.device)

    def signal(example: Tensor, label: Tensor) -> Tensor:
        def loss(value: Tensor) -> Tensor:
            return task.loss({**parameters, bias: value}, example[None], label[None])

        found: Tensor = grad(loss)(parameters[bias])
        return found

    expected = torch.stack([vmap(signal, in_dims=(None, 0))(example, choices) for example in inputs])
    agreement = torch.nn.functional.cosine_similarity(expected, signals[:, None], dim=-1).nan_to_num()
    if known_labels is None:
        return choices[agreement.argmax(1)]
    _, assigned = optimize.linear_sum_assignment(agreement.cpu().numpy(), maximize=True)
    return choices[torch.as_tensor(assigned, device=inputs.device)]
