"""Refiner: share the gradients of robust data in place of the client's own."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from gradveil.core.errors import InputError
from gradveil.core.parameters import flag, integer, number, text
from gradveil.defenses._denoising import denoise, noise_deviation
from gradveil.defenses.base import DEFENSES, StepDefense, checked_gradients
from gradveil.defenses.knowledge import Knowledge
from gradveil.modality import Table, Text
from gradveil.models.evaluation import evaluation_network
from gradveil.models.fitted_evaluation import COMMAND, fitted_kind, fitted_network
from gradveil.task import Gradients, Task
from gradveil.update import ClientRound, LocalSteps, Memory

SOLVER_STEPS = 50
"""Number of steps taken to solve the equation of appendix M."""

WARM_BYTES = 64 << 20
"""Bytes that the robust data in one client's memory may take; the least recently used samples are dropped first."""

IMAGES = "images"
"""The evaluation network that comes with gradveil."""

_WARM_PREFIX = "refined/"


@DEFENSES.register("refiner")
@dataclass(frozen=True, repr=False)
class Refiner(StepDefense):
    r"""Share the gradient of robust data, which looks like noise and whose gradient is near the client's own.

    .. math::
        x^* = \arg\min_{x^* \in [0, 1]} \frac{UM(x^*)}{UM((x + v) / 2)} - balance \cdot \overline{D(x^*)}, \quad
        UM(x^*) = \sum_i w_i (g^*_i - g_i)^2, \quad w_i = |g_i \theta_i| \, decay^{\,layer(i)}

    .. math:: shared = g + \min(1, epsilon / |g^* - g|) \, (g^* - g)

    Here g is the client's gradient, g* that of the robust data x* under the same labels (both means over the batch),
    v is uniform noise, and D is the share of noise that the evaluation network sees (`gradveil.models.evaluation`),
    averaged over the batch. Layers are counted from 1 at the input; the weight and bias of a module share a number. The
    search starts at ``(1 - blend) x + blend v``: started at x itself, it fools D with a small adversarial change, and
    x* still shows the image.

    `epsilon` sets the strength. It is absolute and means something only relative to |g|: on the papers' LeNet with
    uniform weights a single image has |g| of about 30, and .1 changes next to nothing. It is only an upper limit: if
    g* is nearer to g than `epsilon`, g* itself is shared. All samples of a batch are refined together.

    With `memory`, the search for a sample starts from its previous x*, which is found by a digest of image and label;
    if every sample of the batch has one, half the iterations suffice. The robust data of the last step is kept as
    ``memory["trained_on"]`` for audits. Both stay with the client.

    What it does not stop: an attacker who knows it. Robust data is the image, paler and under noise, and undoing that
    (`undo-blend`, in `adapt`) recovers 19.2 dB where plain Inverting Gradients stops at 16.2 (16 CIFAR-10 images, a
    GELU LeNet with normalised images, epsilon .1); the paper's own adaptive attack does worse than the plain one. An
    active server's imprint block reads nine in ten images as if there were no defense (docs/active-servers.md).

    For text, x are word vectors, v those of random words, `step` is in units of the vectors' spread, and there is no
    box; padding stays padding. What a matching attack then recovers is a blend of two words at each place; by the
    nearest word half of the client's come back at initial weights, and most of them to an attacker who tells both words
    apart (`undo_blended_parts`). A projected update still has the client's words in its span, so `dager` reads a
    sentence off word for word (docs/text.md).

    For rows of a table, v are random rows, with uniform numbers and categories of which each is equally likely. The
    search moves inside the box and the simplexes of soft blocks, which blends are in from the start. The attacker who
    knows it (`undo-blend`) takes the likelier of the two categories in each block by what is known about the columns.

    Under FedAvg it acts in every local step. Batch-norm statistics are sent as with every other defense: they are those
    of the client's own images and are not protected.

    The paper leaves the search open; it says gradient descent, 10 iterations at a learning rate of 1. Here every sample
    moves against the slope inside the box [0, 1], by a root mean square that falls linearly from ``2 step`` to 0, so
    that its length does not depend on the scale of the model's gradients. With the weights as equation 3 prints them,
    the balance of the two terms does depend on it: on a LeNet with torch's default weights UM is about 1e-5 next to a D
    near 1, D alone decides the direction, and the search leaves the gradient further from the client's than the blended
    start was. `normalise` measures UM in units of what half an image and half noise costs, so that both terms count on
    every model.

    With the defaults the search improves both the distance and D over the blended start, and both improve further with
    more iterations (the paper's figure 13), for single images and for batches of 16 on a GELU LeNet with normalised
    images, a ReLU LeNet and mnist-cnn, and for single images on a LeNet with uniform weights; for 16 images there,
    where the loss is rough, the distance grows (experiments/refiner, table "The search"). D(x*) is .61 to .80 for
    single images (.51 on the uniform LeNet); appendix K has .63 above D(x). The mean squared error between x and x*,
    however, is .036 to .071, where appendix K has .0839: ``normalise=False, step=0.06`` comes near that on LeNets with
    default weights, but then the search brings the gradients of 16 images hardly nearer than the blend.

    Args:
        epsilon: largest distance between the shared gradient and the client's own; 0 is the identity.
        blend: share of noise in the starting point (the paper's alpha).
        balance: weight of the privacy metric against the utility metric (beta).
        iterations: number of search steps; half as many (rounded up) if every sample has a warm start.
        decay: factor by which each further layer counts less (tau).
        step: mean length of a search step, as the root mean square over an image's values.
        normalise: whether the utility metric has a unit, as above; False: with the weights as equation 3 prints them.
        network: the evaluation network: ``"images"``, which comes with gradveil, or for text and tables a file for the
            model's embedding or the table, see `gradveil.models.fitted_evaluation`.

    References:
        Fan, Chen, Wang, Li & Zhou, Refiner: Data Refining against Gradient Leakage Attacks in Federated Learning.
        Correction: equation 4 sums the weighted differences before squaring them; the text describes a weighted sum of
        squared differences, which is what we use.

    Example:
        >>> import gradveil
        >>> from gradveil import models
        >>> model = models.create("lenet", input_shape=(1, 28, 28), classes=10, init="uniform")
        >>> task = gradveil.Task(model, input_shape=(1, 28, 28), classes=10)
        >>> image, label = torch.full((1, 1, 28, 28), 0.5), torch.tensor([3])
        >>> memory = {}
        >>> update = Refiner(epsilon=0.1).share(task, image, label, generator=torch.manual_seed(0), memory=memory)
        >>> own = task.gradients(image, label)
        >>> distance = sum((update[name] - own[name]).square().sum() for name in own).sqrt()
        >>> round(distance.item(), 3)
        0.1
        >>> evaluation_network()(memory["trained_on"]).item() > 0.4
        True
    """

    paper = "Fan et al., USENIX Security 2025"
    has_adaptive_attacker = True

    epsilon: float = number(0.1, low=0, strength=(1e-3, 100.0), log=True)
    blend: float = number(0.5, low=0, high=1)
    balance: float = number(1.0, low=0)
    iterations: int = integer(10, low=1)
    decay: float = number(0.95, above=0, high=1)
    step: float = number(0.01, above=0)
    normalise: bool = flag(True)
    network: str = text(IMAGES, quiet=True)

    def step_gradients(self, client: ClientRound) -> Gradients:
        """The gradient of the robust data, projected to within `epsilon` of the client's own."""
        task, inputs, labels = client.task, client.inputs, client.targets
        self.evaluation(task)
        own = task.gradients(inputs, labels)
        checked_gradients(self.name, own)
        if self.epsilon == 0:
            return own
        noise = task.modality.noise(inputs, client.source)
        start, warm = self._start(inputs, labels, noise, client.memory)
        weights = self.search_weights(task, own, torch.lerp(inputs, noise, 0.5), labels)
        robust = self.refine(task, own, labels, start, weights, -(-self.iterations // 2) if warm else self.iterations)
        if client.memory is not None:
            _remember(client.memory, inputs, labels, robust, whole=task.modality.bounds is None)
        return project(own, task.gradients(robust, labels), self.epsilon)

    def refine(
        self, task: Task, own: Gradients, labels: Tensor, start: Tensor, weights: Gradients, iterations: int
    ) -> Tensor:
        """The robust data for the client's `own` gradient that the search finds from `start`."""
        network, unit = self.evaluation(task), task.modality.scale
        robust = start
        for index in range(iterations):
            slope = self._slope(task, robust, labels, own, weights, network)
            lengths = slope.flatten(1).square().mean(1).sqrt().clamp_min(torch.finfo(slope.dtype).tiny)
            size = unit * self.step * 2 * (1 - (index + 0.5) / iterations)
            robust = task.modality.project(robust - size * slope / lengths.view(-1, *[1] * (slope.ndim - 1)))
        return robust

    def evaluation(self, task: Task) -> nn.Module:
        """The evaluation network for the inputs of a task."""
        if kind := fitted_kind(task.modality):
            if self.network == IMAGES:
                raise InputError(
                    f"refiner: the evaluation network for images does not see {kind.sees}; make one for this "
                    f"{kind.belongs_to} with {COMMAND} and use refiner:network=FILE, or use a defense that needs "
                    "only gradients"
                )
            return fitted_network(self.network, task.modality).to(task.device, task.dtype)
        if self.network != IMAGES:
            raise InputError(
                f"refiner: network is for text and tables, got {self.network} and other inputs; leave it out"
            )
        if len(task.input_shape) != 3 or task.input_shape[0] not in (1, 3):
            raise InputError(
                f"refiner: the evaluation network sees images of 1 or 3 channels, the inputs have shape "
                f"{list(task.input_shape)}; use a defense that needs only gradients"
            )
        return evaluation_network(task.dtype, task.device)

    def search_weights(self, task: Task, own: Gradients, half_noise: Tensor, labels: Tensor) -> Gradients:
        """The weights of the utility metric in the search: with `normalise`, such that it is 1 for `half_noise`."""
        weights = self.weights(own, task.parameters)
        if not self.normalise:
            return weights
        unit = _utility(task.gradients(half_noise, labels), own, weights).clamp_min(torch.finfo(task.dtype).tiny)
        return {name: value / unit for name, value in weights.items()}

    def weights(self, gradients: Gradients, parameters: Gradients) -> Gradients:
        """How much each coordinate counts in the utility metric, before `normalise` (equation 3)."""
        layers = layer_numbers(gradients)
        return {
            name: (value * parameters[name]).abs() * self.decay ** layers[name] for name, value in gradients.items()
        }

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """The paper does not consider the first of these attackers; the second is from its appendix M."""
        solving = "solves the equation that the utility metric leaves for the gradient"
        solve = {"solve-gradient": Knowledge(solving, before=self.solve_gradient, single_gradient=True)}
        modality = task.modality
        if isinstance(modality, Text | Table):
            what = "word" if isinstance(modality, Text) else "cells"
            telling = f"tells the client's {what} from random ones in the robust data that is found"
            return {"undo-blend": Knowledge(telling, after=partial(self.undo_blended_parts, modality)), **solve}
        undo = Knowledge("takes the noise out of the robust data that is found", after=self.undo_blend)
        return {"undo-blend": undo, **solve}

    def undo_blended_parts(self, modality: Text | Table, found: Tensor) -> Tensor:
        """Recover texts or rows from the robust data that an inversion of refiner's update leads to.

        Each word, and each block of categories, of robust data is a blend of two: the client's and a random one. Where
        both weigh the same, the more frequent one is the likelier (`Text.unblended`, `Table.unblended`). The paper does
        not consider this attacker.
        """
        return modality.unblended(found, self.blend, self.step * self.iterations)

    def undo_blend(self, images: Tensor) -> Tensor:
        r"""Recover the image from the robust data that an inversion of refiner's update leads to.

        Robust data starts as ``(1 - blend) x + blend v`` and moves little from there, so x is still in it, paler and
        under noise. The noise has a deviation s, which is estimated from x* and limited to what blend and search can
        produce together; r is the share of v that explains s, at most `blend`. (It is less than `blend` if the update
        was projected.)

        .. math:: \hat x = TV\text{-}denoise\Big(\frac{x^* - r/2}{1 - r}, \; \frac{s}{1 - r}\Big), \quad
            r = \min(\sqrt{12} \, s, blend), \quad s \le \sqrt{blend^2 / 12 + path^2}

        The paper does not consider this attacker.
        """
        path_length = self.step * self.iterations
        deviation = noise_deviation(images).clamp(max=math.hypot(self.blend / math.sqrt(12), path_length))
        noise_share = (math.sqrt(12) * deviation).clamp(max=min(self.blend, 0.99))
        per_pixel = noise_share.view(-1, 1, 1, 1)
        return denoise((images - per_pixel / 2) / (1 - per_pixel), deviation / (1 - noise_share))

    def solve_gradient(self, task: Task, shared: Gradients, generator: torch.Generator) -> Gradients:
        r"""Solve the equation that the utility metric implies for the client's gradient (appendix M).

        .. math:: \sum_i w_i(g') (u_i - g'_i)^2 = const, \quad w_i(g') = |g'_i \theta_i| \, decay^{\,layer(i)}

        u is the shared gradient. This is one equation for as many unknowns as the model has parameters: some g' is
        found, hardly ever the right one. The paper gives neither the constant nor the starting point. Here the constant
        is what a perturbation of the known length `epsilon` in a random direction gives on average, `epsilon`^2 times
        the mean weight; the start is u plus such a perturbation; and each step is the shortest one that solves the
        equation to first order.
        """
        solved = []
        for victim in range(len(next(iter(shared.values())))):
            target = {name: value[victim] for name, value in shared.items()}
            solved.append(_solve_one(task.parameters, target, self, generator))
        return {name: torch.stack([gradients[name] for gradients in solved]) for name in shared}

    def _slope(
        self,
        task: Task,
        robust: Tensor,
        labels: Tensor,
        own: Gradients,
        weights: Gradients,
        network: nn.Module,
    ) -> Tensor:
        """The derivative of the objective with respect to the robust data."""
        leaf = robust.detach().requires_grad_()
        with torch.enable_grad():
            gradients = task.by_autograd().gradient(task.parameters, leaf, labels)
            (privacy,) = torch.autograd.grad(network(leaf).mean(), leaf)
        # The utility metric is quadratic in the gradients: its slope needs no graph, which of a large model takes long.
        slopes = [(gradients[name].detach() - value).mul_(weights[name]) for name, value in own.items()]
        (utility,) = torch.autograd.grad([gradients[name] for name in own], leaf, slopes)
        return 2 * utility - self.balance * privacy

    def _start(self, inputs: Tensor, labels: Tensor, noise: Tensor, memory: Memory | None) -> tuple[Tensor, bool]:
        """Where the search starts, and whether every sample has a warm start."""
        start = torch.lerp(inputs, noise, self.blend)
        if memory is None:
            return start, False
        previous = [memory.get(key) for key in _keys(inputs, labels)]
        starts = [cold if warm is None else warm.to(cold) for cold, warm in zip(start, previous, strict=True)]
        return torch.stack(starts), all(warm is not None for warm in previous)


def project(own: Gradients, robust: Gradients, epsilon: float) -> Gradients:
    """The point nearest to `robust` that is at most `epsilon` away from `own`.

    >>> project({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([1.0, 4.0])}, 0.5)["w"].tolist()
    [1.0, 0.5]
    """
    difference = {name: robust[name] - value for name, value in own.items()}
    squares = [value.square().sum(dtype=torch.float64) for value in difference.values()]
    distance = torch.stack(squares).sum().sqrt().item()
    if distance <= epsilon:
        return robust
    return {name: value + epsilon / distance * difference[name] for name, value in own.items()}


def _utility(robust: Gradients, own: Gradients, weights: Gradients) -> Tensor:
    """The utility metric: the weighted squared distance between two gradients."""
    return torch.stack([(weights[name] * (robust[name] - value).square()).sum() for name, value in own.items()]).sum()


def _solve_one(parameters: Gradients, shared: Gradients, defense: Refiner, generator: torch.Generator) -> Gradients:
    target = defense.epsilon**2 * float(_flat(defense.weights(shared, parameters)).mean())
    if target == 0:
        return shared
    noise = {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)
        for name, value in shared.items()
    }
    length = defense.epsilon / float(_flat(noise).norm())
    guess = {name: value + length * noise[name] for name, value in shared.items()}
    for _ in range(SOLVER_STEPS):
        leaves = {name: value.detach().requires_grad_() for name, value in guess.items()}
        with torch.enable_grad():
            weights = defense.weights(leaves, parameters)
            utility = _utility(leaves, shared, weights)
            slopes = dict(zip(leaves, torch.autograd.grad(utility, list(leaves.values())), strict=True))
        missing = target - utility.item()
        if abs(missing) <= 1e-6 * target:
            break
        step = missing / float(_flat(slopes).square().sum())
        guess = {name: value + step * slopes[name] for name, value in guess.items()}
    return guess


def _flat(gradients: Gradients) -> Tensor:
    return torch.cat([value.flatten() for value in gradients.values()])


def layer_numbers(names: Gradients) -> dict[str, int]:
    """Each parameter's layer, counted from 1 at the input; parameters of one module share a number.

    >>> layer_numbers(dict.fromkeys(["conv.weight", "conv.bias", "fc.weight"], torch.zeros(1)))
    {'conv.weight': 1, 'conv.bias': 1, 'fc.weight': 2}
    """
    modules: dict[str, int] = {}
    return {name: modules.setdefault(name.rpartition(".")[0], len(modules) + 1) for name in names}


def _keys(inputs: Tensor, labels: Tensor) -> list[str]:
    """The key of each sample's robust data in the memory."""
    pairs = zip(inputs.cpu().numpy(), labels.cpu().numpy(), strict=True)
    return [_WARM_PREFIX + hashlib.sha256(image.tobytes() + label.tobytes()).hexdigest() for image, label in pairs]


def _remember(memory: Memory, inputs: Tensor, labels: Tensor, robust: Tensor, *, whole: bool) -> None:
    """Keep the robust data; in full precision if `whole`, because padding is recognised by its exact values."""
    memory["trained_on"] = robust
    for key, value in zip(_keys(inputs, labels), robust, strict=True):
        memory.pop(key, None)  # a mapping keeps its keys in insertion order, so this one moves to the end
        memory[key] = value if whole else value.half()
    capacity = WARM_BYTES // ((robust.element_size() if whole else 2) * robust[0].numel())
    kept = [key for key in memory if key.startswith(_WARM_PREFIX)]
    for key in kept[: max(0, len(kept) - capacity)]:
        del memory[key]
