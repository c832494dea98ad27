"""Peel: take off the layers whose inputs the gradient fixes, and search only below them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import grad

from gradveil.attacks._recursion import chain_of, check_invertible, distances, invert_head, invert_leaf, weight_of
from gradveil.attacks._separation import Examples, separate
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import LossHistory, Reconstruction
from gradveil.attacks.inverting_gradients import near_the_middle
from gradveil.attacks.matching import LBFGS, ROUNDING, Objective, Solution, check_prior
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import InputError, ThreatModelError
from gradveil.core.parameters import integer, number
from gradveil.task import Gradients, Task
from gradveil.theory.rank import Leaf, judge_convolution, why_impassable

SMOOTHING = (5.0, 20.0, 80.0, 320.0, 1280.0)
"""Sharpness of the ReLUs below in each stage: units must be free to switch while there is still far to go."""
_CLOSED_FORM_STEPS = 2000
_Report = Callable[[float, float], None]  # called with (share of the search done, seconds left)
_TOLERANCE = 1e-3
"""A convolution is passed if no singular value of its equations is smaller than this share of the largest: updates have
seven digits, and what is lost in one layer is missing in all below."""
_VERIFIED = 1e-2
"""Relative error, at most, of the error signals that the classifier gives for features that were told apart."""
_ROUGH = 1e-4
"""What was solved for says so too: values behind a ReLU are negative by rounding alone. If they are by more than this
share of the largest, small active units are taken for silent ones, and all below is wrong."""
_HISTORY = 30
_OUTSIDE = 1.0
"""Weight of the squared distance from the allowed range of inputs."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """What is known for certain inside the network, at the input of one module.

    Args:
        module: the module's name.
        values: what it is fed, ``[examples, ...]``.
        known: where `values` are known; elsewhere a ReLU behind the module's input is silent, so they are not positive.
        signal: the gradient of the loss with respect to what the module is fed.
        below: the names of the parameters that lie below.
        at_input: whether the module is fed the network's input itself, so that there is nothing left to search for.

    Example:
        >>> one = torch.ones(1, 2)
        >>> Frontier("fc", one, one.bool(), one, ("conv.weight",), at_input=False).below
        ('conv.weight',)
    """

    module: str
    values: Tensor
    known: Tensor
    signal: Tensor
    below: tuple[str, ...]
    at_input: bool


@ATTACKS.register("peel")
@dataclass(frozen=True, repr=False)
class Peel(Attack):
    r"""Solve the upper layers exactly, as R-GAP does, and search for the image only below them.

    The gradient of the classifier's weight and bias gives its input a and the error signal k of a single example
    exactly, and of each example of a batch if a comes out of a ReLU, whose zeros tell the examples apart, and if there
    are more classes than examples. So do, layer by layer, the equations of R-GAP for the inputs of a linear layer, and
    of a convolution if they determine all of them (a ReLU says which of its outputs were positive; only these are
    equations; the examples of a batch share those from the gradient). Where they do not, z, the values there, and
    :math:`s = \partial L / \partial z` are still known exactly. What is left of the network is f, from the image to z,
    with parameters :math:`\theta`, and the search is for

    .. math:: \min_x \ \frac{|f(x) - z|^2}{|z|^2}
        + \sum_\ell \frac{|\partial_{\theta_\ell} \langle s, f_\theta(x) \rangle - g_\ell|^2}{|g_\ell|^2}
        + tv \cdot TV(x)

    A search through the whole network must find the activations of all layers at once, and on trained ReLU networks it
    fails for that reason, not for lack of information. Here s is fixed, so the gradients below are those of a network
    whose only unknown is the image. Kinks are smoothed, less from stage to stage. Where z comes out of a ReLU, its
    silent units only say that f(x) is not positive there.

    Works for one step and models whose logits come from a linear layer with a bias. What lies between the layers that
    can be solved and the images may be anything differentiable that treats each example alone.

    Args:
        iterations: most L-BFGS steps in each stage of smoothing.
        tv: weight of the total variation; what the equations leave undetermined is made smooth.
        restarts: independent starting points; the best by the attacker's own loss is returned.

    References:
        Zhu and Blaschko, R-GAP: Recursive Gradient Attack on Privacy, ICLR 2021, for the closed form. The combination
        with a search below is ours.

    Example:
        >>> import gradveil
        >>> from gradveil import metrics, models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> image, label = torch.rand(1, 1, 4, 4, generator=torch.manual_seed(1)), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> found = Peel(tv=0.0).reconstruct(task, update, ThreatModel(), generator=torch.manual_seed(0))
        >>> found.labels.tolist(), bool(metrics.psnr(image, found.inputs[0].clamp(0, 1)) > 40)
        ([[2]], True)
    """

    paper = "ours; Zhu & Blaschko, ICLR 2021"
    finds_labels = True

    iterations: int = integer(400, low=1)
    tv: float = number(1e-2, low=0)
    restarts: int = integer(1, low=1)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse local steps, models that do not end in a linear layer with a bias, and batches of too many."""
        super().check_threat(task, threat)
        check_invertible(self.name, task, threat)
        if task.classifier is None or task.classifier.bias not in task.parameters:
            raise InputError(f"{self.name}: the model must end in a linear layer with a bias, which reveals its input")
        if threat.batch_size > 1 and (task.loss_name == "logistic" or threat.batch_size >= (task.classes or 0)):
            raise ThreatModelError(
                f"{self.name}: tells the examples of a batch apart if there are fewer than classes, got "
                f"batch_size={threat.batch_size} and {task.classes} classes; use a smaller batch"
            )
        if self.tv:
            check_prior(self.name, "tv", task)

    def run(self, problem: Problem) -> Reconstruction:
        """Peel and search, victim by victim: how far a network can be peeled is different for each.

        A batch that cannot be taken apart stays where it started, with an infinite loss, unless none can.
        """
        task, start = problem.task.to(torch.float64), near_the_middle(problem).double()
        labels, solutions = torch.zeros(problem.victims, problem.examples).long(), list[Solution]()
        refusals = list[InputError]()
        for victim in range(problem.victims):
            gradients = {name: value[victim].double() for name, value in problem.updates.items()}

            def report(share: float, left: float, done: int = victim) -> None:
                if problem.progress:
                    problem.progress(round(100 * (done + share)), 100 * problem.victims, left)

            try:
                frontier, labels[victim] = peeled(task, gradients, problem.examples, problem.generator)
            except InputError as error:
                refusals.append(error)
                solutions.append(_nothing(start[victim, None]))
                continue
            if frontier.at_input:
                solutions.append(_solved(task, frontier, labels[victim], gradients))
            else:
                solutions.append(self._search(task, frontier, gradients, start[victim, None], report))
            if solutions[-1].interrupted:
                break
        if len(refusals) == problem.victims:
            raise refusals[0]
        interrupted = solutions[-1].interrupted
        solutions += [_nothing(start[victim, None]) for victim in range(len(solutions), problem.victims)]
        return Reconstruction(
            torch.cat([found.candidates for found in solutions]),
            labels,
            torch.cat([found.losses for found in solutions]),
            torch.cat([found.iterations for found in solutions]),
            interrupted=interrupted,
        )

    def _search(
        self,
        task: Task,
        frontier: Frontier,
        gradients: Gradients,
        start: Tensor,
        report: Callable[[float, float], None],
    ) -> Solution:
        """Find the input that gives what is known at the frontier, in stages of less and less smoothing."""
        shared = {name: gradients[name][None] for name in frontier.below if bool(gradients[name].any())}
        stages: tuple[float | None, ...] = SMOOTHING if task.has_kinks else (None,)
        candidates, taken = start, torch.zeros(1).long()
        for stage, sharpness in enumerate(stages):
            cost = _Cost(self, task if sharpness is None else task.smoothed(sharpness), frontier.module)
            known = (frontier.values[None], frontier.known[None], frontier.signal[None])
            objective = Objective(cost, shared, *known, execution="loop")

            def progress(done: int, steps: int, left: float, stage: int = stage) -> None:
                later = len(stages) - stage - 1
                report((stage + done / steps) / len(stages), left + later * left * steps / max(1, steps - done))

            solution = LBFGS(history=_HISTORY).minimise(
                objective, candidates, iterations=self.iterations, progress=progress
            )
            candidates, taken = solution.candidates, taken + solution.iterations
            if solution.interrupted:
                break
        return replace(solution, iterations=taken)


def _nothing(start: Tensor) -> Solution:
    """What is returned for a victim of whom nothing was found."""
    loss = torch.full((1,), torch.inf, dtype=start.dtype)
    return Solution(start, loss, torch.zeros(1).long(), LossHistory(loss, loss, loss[:, None]))


def _solved(task: Task, frontier: Frontier, labels: Tensor, gradients: Gradients) -> Solution:
    """The inputs that were peeled down to, with the distance of their gradient: a defended update has another."""
    found = task.denormalised(frontier.values.view(-1, *task.input_shape))[None]
    loss = distances(task, found, labels[None], {name: value[None] for name, value in gradients.items()})
    return Solution(found, loss, torch.zeros(1).long(), LossHistory(loss, loss, loss[:, None]))


class _Cost:
    """The cost of a candidate for the input, given what is known at the frontier.

    Args:
        attack: the weights of its parts.
        task: the model, perhaps with smoothed kinks.
        module: where it ends.
    """

    def __init__(self, attack: Peel, task: Task, module: str) -> None:
        self.attack, self.task, self.module = attack, task, module
        self.parameters = task.parameters

    def __call__(self, candidate: Tensor, shared: Gradients, values: Tensor, known: Tensor, signal: Tensor) -> Tensor:
        """The cost of a candidate for one victim."""
        modality = self.task.modality

        def paired(below: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            fed = self.task.inputs_of(self.module, {**self.parameters, **below}, candidate)
            return (fed * signal).sum(), fed

        below = {name: self.parameters[name] for name in shared}
        simulated, fed = grad(paired, has_aux=True)(below)
        missed = torch.where(known, fed - values, fed.clamp_min(0)).square().sum()
        cost = missed / values.square().sum().clamp_min(torch.finfo(values.dtype).tiny)
        for name, gradient in shared.items():
            cost = cost + (simulated[name] - gradient).square().sum() / gradient.square().sum()
        cost = cost + _OUTSIDE * (candidate - modality.project(candidate)).square().mean()
        if self.attack.tv:
            penalty = modality.prior(candidate, rounding=ROUNDING)
            assert penalty is not None  # see `check_threat`
            cost = cost + self.attack.tv * penalty
        return cost


@torch.no_grad()
def peeled(task: Task, gradients: Gradients, examples: int, generator: torch.Generator) -> tuple[Frontier, Tensor]:
    """Go down from the classifier as far as everything is determined.

    Args:
        task: the model, in double precision.
        gradients: the shared gradients of one victim, by name, in double precision.
        examples: the number of examples behind them.
        generator: draws what separates the examples of a batch.

    Returns:
        The frontier and the labels ``[examples]``.
    """
    chain = chain_of(task)
    at = next(index for index, leaf in reversed(list(enumerate(chain))) if isinstance(leaf.module, nn.Linear))
    head, one_victim = chain[at], {name: value[None] for name, value in gradients.items()}
    if examples == 1:
        hypothesis = invert_head(task, head, one_victim, None)
        found = Examples(hypothesis.values[0], hypothesis.signal[0], hypothesis.labels[0])
    else:
        weight, bias = (gradients[f"{head.name}.{part}"] for part in ("weight", "bias"))
        found = separate("peel", weight, bias, examples, generator)
        _check_signals(head, found)
    values, signal = found.features[None], (found.signals @ weight_of(head))[None]
    known = torch.ones_like(values, dtype=torch.bool)
    while at > 0 and chain[at].follows and _can_pass(task, chain, at - 1, known[0], signal[0]):
        solved = invert_leaf(chain[at - 1], values, signal, known, one_victim, _CLOSED_FORM_STEPS)
        if at > 1 and isinstance(chain[at - 2].module, nn.ReLU) and chain[at - 1].follows and _is_rough(solved[0]):
            break
        at -= 1
        values, signal, known = solved
    above = {leaf.name for leaf in chain[at:]}
    below = tuple(name for name in gradients if name.rpartition(".")[0] not in above)
    at_input = at == 0 and chain[at].follows
    return Frontier(chain[at].name, values[0], known[0], signal[0], below, at_input), found.labels


def _check_signals(head: Leaf, found: Examples) -> None:
    """Refuse examples whose features do not give, through the classifier, the error signals that they came with."""
    assert isinstance(head.module, nn.Linear)
    chances = head.module(found.features).softmax(1)
    expected = (chances - nn.functional.one_hot(found.labels, chances.shape[1])) / len(chances)
    missed = float(((expected - found.signals).norm(dim=1) / expected.norm(dim=1)).max())
    if not missed < _VERIFIED:
        raise InputError(
            f"peel: expected examples whose features explain their error signals to {_VERIFIED:g}, got {missed:.2g}; "
            "the batch was not taken apart well enough, or is defended"
        )


def _is_rough(rectified: Tensor) -> bool:
    """Whether values that came out of a ReLU are so far below zero that the zeros among them cannot be told."""
    return bool(-rectified.min() > _ROUGH * rectified.max())


def _can_pass(task: Task, chain: list[Leaf], index: int, known: Tensor, signal: Tensor) -> bool:
    """Whether the inputs of a leaf follow from its outputs, for all examples together."""
    leaf = chain[index]
    if why_impassable(leaf.module) or [other.name for other in chain].count(leaf.name) > 1:
        return False
    if isinstance(leaf.module, nn.Linear | nn.Conv2d) and f"{leaf.name}.weight" not in task.parameters:
        return False
    if isinstance(leaf.module, nn.Linear):
        sizes = torch.linalg.svdvals(signal)
        return len(signal) <= signal.shape[1] and bool(sizes[-1] > _TOLERANCE * sizes[0])
    if isinstance(leaf.module, nn.Conv2d):
        enough = leaf.module.weight.numel() + int(known.sum()) >= len(known) * leaf.inputs.numel()
        return enough and judge_convolution(leaf, known, signal, _TOLERANCE).recoverable
    return True
