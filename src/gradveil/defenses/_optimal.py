"""What the optimal defenses share: how much each coordinate leaks relative to its utility, on own or on public data.

All three weigh the squared sensitivity of a coordinate, s_i^2 = |d g_i / d x|^2, which enters the reconstruction bound,
against its squared gradient g_i^2, which enters the utility.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.core.errors import InputError, ParameterError
from gradveil.core.randomness import Source, derived_generator, source_of
from gradveil.core.tensors import Tensors, shapes_of
from gradveil.defenses.base import Batch, Defense, Prepared, StepDefense, check_result, checked_gradients
from gradveil.defenses.knowledge import NOTHING_TO_KNOW, Knowledge, each_round, read_weighted, typical_variance
from gradveil.task import Gradients, Task
from gradveil.update import ClientRound, LocalSteps, Memory, Update, sizes_of, variance_factor

FORMS = ("local", "global")
SCALES = ("power", "frobenius")
SMALLEST_GRADIENT = 1e-6
"""The paper's c: a smaller gradient counts as this large, so that no ratio is infinite."""


GUESSES = 10
"""Number of random batches from which an attacker guesses where the local form puts its noise."""


class Measured(NamedTuple):
    """E s^2 and E g^2 of every coordinate, as means over public examples, for the global form."""

    sensitivity: Tensors
    weight: Tensors


class SensitivityDriven(StepDefense):
    """A defense that treats each coordinate according to its sensitivity and its gradient.

    In the local form both come from the client's batch at the current weights; with ``every=r``, the sensitivity may
    be up to r - 1 rounds old (it is kept in the client's `memory`). In the global form both are means over single
    public examples, measured once in `prepare`.

    Under FedAvg it acts in every local step; with ``every`` above 1, all steps use the sensitivity of the first one.

    Subclasses declare the parameters below and implement `defend`.
    """

    directions: int
    form: str
    every: int
    layerwise: bool
    measured: Measured | None  # only in the global form, after `prepare`

    def check(self) -> None:
        """Refuse `every` in the global form, which measures once."""
        if self.form == "global" and self.every > 1:
            raise ParameterError(
                f"{self.name}: every must be 1 in the global form, which measures once in prepare, got {self.every}"
            )

    @property
    def needs_preparing(self) -> bool:  # type: ignore[override]
        """Whether this is the global form."""
        return self.form == "global"

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether its parameters make it the identity."""

    @abstractmethod
    def defend(
        self, gradients: Gradients, sensitivity: Mapping[str, Tensor], weight: Mapping[str, Tensor], source: Source
    ) -> Gradients:
        """The defended gradients of one step.

        Args:
            gradients: the client's gradients, which must not be changed.
            sensitivity: s^2 of every coordinate.
            weight: g^2 of every coordinate; in the global form that of the public examples.
            source: the client's randomness.
        """

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Prepared:
        """In the global form, measure the public examples one at a time."""
        if self.form == "local":
            return Prepared(self, task)
        if public is None:
            raise InputError(f"{self.name}: the global form needs prepare(task, public=(inputs, labels))")
        source, measured = source_of(generator), task.without_dropout()
        sensitivity = {name: torch.zeros_like(value) for name, value in task.parameters.items()}
        weight = {name: torch.zeros_like(value) for name, value in task.parameters.items()}
        for example, label in zip(*public, strict=True):
            batch = example[None], label[None]
            gradients = measured.gradients(*batch)
            clipped = self.clipped(gradients)
            for name, value in measured.sensitivity(*batch, self.directions, generator=source).items():
                sensitivity[name] += value * (clipped[name] == gradients[name]) / len(public[0])
                weight[name] += clipped[name].square() / len(public[0])
        found = Measured(Tensors(sensitivity), Tensors(weight))
        return Prepared(type(self)(**{**self.parameters, "measured": found}), task)

    def make_update(self, client: ClientRound) -> Update:
        """Compute the client's update from defended steps, after checking that it can."""
        if self.form == "global":
            self._check_prepared(client.task)
        if self.every > 1:
            if client.memory is None:
                raise InputError(
                    f"{self.name}: every={self.every} needs memory=, a mapping that belongs to the client and is kept "
                    "through all rounds"
                )
            _expire_sensitivity(client.memory, self.every)
        return super().make_update(client)

    def step_gradients(self, client: ClientRound) -> Gradients:
        """Measure the sensitivity or recall it, then defend the gradients."""
        task, source, memory = client.task, client.source, client.memory
        batch = client.inputs, client.targets
        gradients = task.gradients(*batch)
        checked_gradients(self.name, gradients)
        if self.idle:
            return gradients
        if self.measured is not None:
            return self.defend(gradients, *self.measured, source)
        sensitivity = None if self.every == 1 else _recall(memory, gradients)
        if sensitivity is None:
            sensitivity = task.sensitivity(*batch, self.directions, generator=source)
            if self.every > 1:
                _remember(memory, sensitivity)
        weight = {name: value.square() for name, value in gradients.items()}
        return self.defend(gradients, sensitivity, weight, source)

    def _check_prepared(self, task: Task) -> None:
        if self.measured is None:
            raise InputError(
                f"{self.name}: the global form is not prepared yet; call prepare(task, public=(inputs, labels)) once"
            )
        expected, got = shapes_of(self.measured.sensitivity), shapes_of(task.parameters)
        if got != expected:
            raise InputError(f"{self.name}: prepared for layers {expected}, got {got}; prepare it for this model")


class SensitivityNoise(SensitivityDriven):
    """A sensitivity-driven defense that adds noise: subclasses also implement `variance`."""

    has_adaptive_attacker = True

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Clip candidates as the client does, and trust each coordinate according to its noise (`variance`).

        In the local form the noise of each coordinate depends on the image and can only be guessed. Trusting all
        coordinates alike then does as well on a LeNet, and better on a resnet18, where the guess is misleading
        (experiments/adaptive).
        """
        if self.idle:
            return NOTHING_TO_KNOW
        step_variance = self._guessed_variance(task, sizes_of(local, batch_size)[0])
        variance = {name: variance_factor(local, batch_size) * value for name, value in step_variance.items()}
        typical = typical_variance(variance)  # 0 if the defense only clips
        expect = None if local else each_round(self.clipped)
        weighted = Knowledge(
            "trusts each coordinate by the noise it should have, weighs a prior",
            expect=expect,
            read=read_weighted(variance) if typical else None,
            variance=typical,
        )
        if self.form == "global" or not typical:
            return {"weighted": weighted}
        mean = float(torch.cat([value.double().flatten() for value in variance.values()]).mean())
        prior = Knowledge("weighs a prior by the mean noise", expect=expect, variance=mean)
        return {"prior": prior, "weighted": weighted}

    def repeated(self, times: int) -> Defense | None:
        """The local form with one sensitivity for all updates: they differ in their noise."""
        if self.form == "global" or self.every > 1 or self.idle:
            return None
        return type(self)(**{**self.parameters, "every": times})

    def checked(self, noisy: Gradients) -> Gradients:
        """The noisy gradients; refused if they are not finite."""
        check_result(self, noisy)
        return noisy

    @abstractmethod
    def variance(self, sensitivity: Mapping[str, Tensor], weight: Mapping[str, Tensor]) -> Gradients:
        """The noise variance of each coordinate, from its s^2 and g^2."""

    def _guessed_variance(self, task: Task, batch_size: int) -> Gradients:
        """The variance that the attacker assumes: exact in the global form, else the mean over random batches."""
        if self.measured is not None:
            return self.variance(*self.measured)
        task, generator = task.without_dropout(), derived_generator(0, "guessed variance", device=task.device)
        total = {name: torch.zeros_like(value) for name, value in task.parameters.items()}
        for _ in range(GUESSES):
            shape = (batch_size, *task.input_shape)
            inputs = task.modality.start(shape, generator, dtype=task.dtype, device=task.device)
            labels = task.random_labels(batch_size, generator)
            weight = {name: value.square() for name, value in self.clipped(task.gradients(inputs, labels)).items()}
            sensitivity = task.sensitivity(inputs, labels, self.directions, generator=generator)
            for name, value in self.variance(sensitivity, weight).items():
                total[name] += value / GUESSES
        return total


# A client's memory holds its sensitivity, and for how many more rounds it may be used.


def _expire_sensitivity(memory: Memory, every: int) -> None:
    """Count down at the start of a round; forget the sensitivity when its rounds are used up."""
    rounds_left = int(memory["rounds-left"]) if "rounds-left" in memory else 0
    if rounds_left == 0:
        for key in [key for key in memory if key.startswith("sensitivity/")]:
            del memory[key]
    memory["rounds-left"] = torch.tensor(rounds_left - 1 if rounds_left else every - 1)


def _recall(memory: Memory | None, gradients: Gradients) -> Gradients | None:
    assert memory is not None
    if any(f"sensitivity/{name}" not in memory for name in gradients):
        return None
    return {name: memory[f"sensitivity/{name}"] for name in gradients}


def _remember(memory: Memory | None, sensitivity: Gradients) -> None:
    assert memory is not None
    for name, value in sensitivity.items():
        memory[f"sensitivity/{name}"] = value


def optimal_variance(
    sensitivity: Mapping[str, Tensor],
    weight: Mapping[str, Tensor],
    *,
    std: float,
    scale_by: str = "power",
    cap: float | None = None,
    layerwise: bool = False,
    where: Mapping[str, Tensor] | None = None,
) -> Gradients:
    r"""The noise variance of each coordinate that leaks least for its cost in utility, at the level `std`.

    .. math:: \Sigma_{ii} = \lambda \, s_i / \max(|g_i|, c)

    minimises :math:`\sum_i s_i^2 / \Sigma_{ii}` for a given :math:`\sum_i g_i^2 \Sigma_{ii}`. The ratios are first
    capped at `cap` times their median and then scaled. If no coordinate is sensitive at all, the noise is uniform.

    Args:
        sensitivity: s^2 by layer.
        weight: g^2 by layer.
        std: standard deviation of the uniform noise that is as strong, by the measure `scale_by`.
        scale_by: what is ``std^2``: ``"power"``: the mean variance; ``"frobenius"``: the variances' root mean square.
        cap: largest ratio, as a multiple of the median of the nonzero ratios; None: no limit.
        layerwise: whether to use one variance per layer, from the sums over the layer.
        where: True for coordinates that get noise; the others get none and do not count. Default: all.

    >>> s2, g2 = {"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([1.0, 1.0])}
    >>> optimal_variance(s2, g2, std=3.0)["w"].tolist()  # s is 1 and 2
    [6.0, 12.0]
    >>> optimal_variance(s2, g2, std=5**0.5, scale_by="frobenius")["w"].square().mean().sqrt().item()
    5.0
    """
    names = [name for name, value in sensitivity.items() if value.numel()]
    if where is not None:
        sensitivity = {name: sensitivity[name] * where[name] for name in sensitivity}
        weight = {name: weight[name] * where[name] for name in weight}
    ratios: Gradients = {}
    for name in names:
        s2, g2, floor = sensitivity[name].double(), weight[name].double(), SMALLEST_GRADIENT**2
        if layerwise:
            s2, g2 = s2.sum().expand_as(s2), g2.sum().expand_as(g2)
            floor *= g2.numel()
        ratios[name] = (s2 / g2.clamp_min(floor)).sqrt()
        if where is not None:
            ratios[name] = ratios[name] * where[name]
    flat = torch.cat([ratios[name].flatten() for name in names])
    noisy_count = flat.numel() if where is None else sum(int(where[name].sum()) for name in names)
    if cap is not None and bool((flat > 0).any()):
        limit = cap * float(flat[flat > 0].median())
        ratios = {name: value.clamp_max(limit) for name, value in ratios.items()}
    total = math.fsum(float(value.sum()) for value in ratios.values())
    if total == 0:
        ratios = {name: torch.ones_like(ratios[name]) if where is None else where[name].double() for name in names}
        total = float(noisy_count)
    scale = std**2 * noisy_count / total if total else 0.0
    if scale and scale_by == "frobenius":
        scale = std**2 * math.sqrt(noisy_count / math.fsum(float(value.square().sum()) for value in ratios.values()))
    return {
        name: (scale * ratios[name]).to(value.dtype) if name in ratios else torch.zeros_like(value)
        for name, value in sensitivity.items()
    }


def add_noise(gradients: Mapping[str, Tensor], variance: Mapping[str, Tensor], std: float, source: Source) -> Gradients:
    """The gradients plus independent normal noise of these variances, of which `std` squared is typical."""
    return {name: source.add_normal(value, variance[name].sqrt(), typical=std) for name, value in gradients.items()}
