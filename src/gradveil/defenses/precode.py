"""PRECODE: a variational bottleneck before the classifier."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.core.errors import InputError
from gradveil.core.parameters import integer, number
from gradveil.core.randomness import Source, fresh_generator
from gradveil.defenses.base import DEFENSES, Batch, Prepared, StepDefense
from gradveil.defenses.knowledge import Evidence, Knowledge
from gradveil.task import Gradients, Task
from gradveil.task.model import recording
from gradveil.update import ClientRound, LocalSteps


@DEFENSES.register("precode")
@dataclass(frozen=True, repr=False)
class Precode(StepDefense):
    r"""Train a **different model**: the given one with a variational bottleneck before its classifier.

    .. math:: (\mu, \log \sigma^2) = E r, \quad b = \mu + \sigma \epsilon, \quad \epsilon \sim N(0, I), \quad
              logits = C D b, \qquad loss = CE + \beta \, KL(N(\mu, \sigma^2) \| N(0, I))

    r is the representation that the classifier C received before; E and D are linear layers to and from `width` values.
    KL is summed over the bottleneck and averaged over the batch. `prepare` returns the task of the extended model: it
    has more parameters (``width (3 units + 2) + units`` more; lenet becomes 31 times as large), other names
    (``classifier.1.weight``) and another accuracy, and everything afterwards must use that task.

    A client draws a fresh epsilon for every image and every step, so its gradient is random; the attacker does not
    know it and computes with epsilon = 0, as the trained model does when it predicts. The layers before the bottleneck
    are affected by the noise only through the backpropagated error: an attacker may leave the bottleneck and the
    classifier out of the matching (``mute=classifier`` of the matching attacks).

    Choices where the source says nothing: log-variance parametrisation, torch's default range for the new weights, no
    noise at prediction.

    Args:
        width: size of the bottleneck.
        beta: weight of the KL term.

    References:
        Scheliga, Mäder and Seeland, PRECODE: A Generic Model Extension to Prevent Deep Gradient Leakage, WACV 2022.

    Example:
        >>> import gradveil
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> task = gradveil.Task(model, input_shape=(1, 2, 2), classes=3)
        >>> list(Precode(width=2).prepare(task).task.parameters)[:3]
        ['1.0.encoder.weight', '1.0.encoder.bias', '1.0.decoder.weight']
    """

    paper = "Scheliga et al., WACV 2022"
    has_adaptive_attacker = True
    needs_preparing = True

    width: int = integer(256, low=1)
    beta: float = number(1e-3, low=0)

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Prepared:
        """The task of the extended model, with the given weights and new ones for the bottleneck."""
        generator = generator or fresh_generator(task.device)
        return Prepared(self, VariationalTask.extend(task, self.width, self.beta, generator))

    def step_gradients(self, client: ClientRound) -> Gradients:
        """The gradients of the extended model, with fresh noise."""
        task = self._extended(client.task)
        return task.with_noise(len(client.inputs), client.source).gradients(client.inputs, client.targets)

    def _extended(self, task: Task) -> "VariationalTask":
        if not isinstance(task, VariationalTask):
            raise InputError(f"{self.name}: the model has no bottleneck yet; call prepare and use the task it returns")
        return task

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """The bottleneck reveals its noise: for one image, its linear layers' gradients give what went in and out.

        A batch mixes the images; then the bottleneck and the classifier are left out of the matching.
        """
        left_out = self._extended(task).place.rpartition(".")[0]
        if batch_size == 1 and local is None:
            return {
                "solve-noise": Knowledge("computes the noise from the bottleneck's gradients", task=_with_solved_noise)
            }

        def read(_expected: Gradients, update: Gradients) -> Evidence:
            return Evidence(
                update, {n: torch.full_like(v, not f".{n}".startswith(f".{left_out}.")) for n, v in update.items()}
            )

        return {"mute": Knowledge("leaves the bottleneck and the classifier out", read=read)}


def _with_solved_noise(task: Task, update: Gradients) -> Task:
    """The task with the noise that a client with one image drew.

    A linear layer's weight gradient is the product of its bias gradient and its input. So the encoder's gradients give
    the representation, hence mean and deviation, and the decoder's give the noisy bottleneck values.
    """
    assert isinstance(task, VariationalTask)
    layer_inputs = {
        name: update[f"{task.place}.{name}.bias"]
        @ update[f"{task.place}.{name}.weight"]
        / update[f"{task.place}.{name}.bias"].square().sum()
        for name in ("encoder", "decoder")
    }
    weight, bias = (task.parameters[f"{task.place}.encoder.{kind}"] for kind in ("weight", "bias"))
    mean, log_variance = (weight @ layer_inputs["encoder"] + bias).chunk(2)
    noise = (layer_inputs["decoder"] - mean) / (0.5 * log_variance).exp()
    return task.with_parameters(task.parameters, {f"{task.place}.noise": noise[None]})


class Bottleneck(nn.Module):
    """``decoder(mean + std * noise)``; the noise is a buffer, so that the module remains a pure function of tensors."""

    def __init__(self, units: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(units, 2 * width)
        self.decoder = nn.Linear(width, units)
        self.noise: Tensor
        self.register_buffer("noise", torch.zeros(1, width))

    def forward(self, values: Tensor) -> Tensor:
        """What the classifier receives in place of `values`."""
        mean, log_variance = self.encoder(values).chunk(2, dim=-1)
        decoded: Tensor = self.decoder(mean + (0.5 * log_variance).exp() * self.noise)
        return decoded


class VariationalTask(Task):
    """The task of a model with a bottleneck before its classifier; the loss includes the KL term."""

    place: str  # name of the bottleneck
    beta: float

    @classmethod
    def extend(cls, task: Task, width: int, beta: float, generator: torch.Generator) -> "VariationalTask":
        """`task` with a bottleneck of `width` values; the model of the given task is not changed."""
        if task.classifier is None:
            raise InputError("precode: the model has no linear classifier to put a bottleneck before")
        model = task.copy_model()
        name = task.classifier.weight.rpartition(".")[0]
        classifier = model.get_submodule(name)
        assert isinstance(classifier, nn.Linear)
        bottleneck = Bottleneck(classifier.in_features, width).to(task.device, task.dtype)
        for parameter, fan_in in zip(bottleneck.parameters(), 2 * [classifier.in_features] + 2 * [width], strict=True):
            nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=generator)
        extended = nn.Sequential(bottleneck, classifier)
        if name:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, extended)
        else:
            model = extended
        result = cls.like(task, model)
        result.place, result.beta = f"{name}.0".lstrip("."), beta
        return result

    def with_noise(self, examples: int, source: Source) -> "VariationalTask":
        """The same task with fresh noise for each of `examples` examples."""
        name = f"{self.place}.noise"
        noise = source.normal(self.buffers[name].expand(examples, -1))
        other = self.with_parameters(self.parameters, {name: noise})
        assert isinstance(other, VariationalTask)
        return other

    def loss(self, parameters: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch plus beta times the mean KL divergence of its bottleneck distribution."""
        moments: dict[str, Tensor] = {}
        encoder = f"{self.place}.encoder"
        modules = {encoder: self._functional.stateless.get_submodule(encoder)}
        with recording(modules, moments.__setitem__, outputs=True):
            loss = super().loss(parameters, inputs, labels)
        return loss + self.beta * divergence(moments[encoder])


def divergence(moments: Tensor) -> Tensor:
    """KL(N(mean, variance) || N(0, I)), summed over the bottleneck, averaged over the batch."""
    mean, log_variance = moments.chunk(2, dim=-1)
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
