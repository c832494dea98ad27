"""RecUP: a small perturbation that misleads the client's own attribute classifiers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.core.errors import InputError
from gradveil.core.parameters import integer, number, state
from gradveil.core.randomness import Draws, fresh_generator
from gradveil.core.tensors import Tensors, shapes_of
from gradveil.defenses.base import DEFENSES, Batch, Perturbation, Prepared
from gradveil.defenses.knowledge import NOTHING_TO_KNOW, Evidence, Knowledge
from gradveil.models.vectors import VectorClassifier, fit_perceptron
from gradveil.task import Gradients, Task
from gradveil.update import Announced, LocalSteps

SKETCH = 512
"""Values of the sketch of an update that the classifiers see. Every value of the update is added to one of them, with a
random sign, so inner products of updates are kept on average and no layer is left out."""
ZOO: tuple[tuple[int, ...], ...] = ((), (64,), (128,), (64, 64))
"""The hidden layers of each classifier."""
EPOCHS = 60
_ATTRIBUTES = "attributes"
_PLACES = "places of "
_ZOO = "classifier "


@DEFENSES.register("recup")
@dataclass(frozen=True, repr=False)
class RecUP(Perturbation):
    r"""Add the perturbation that misleads an ensemble of the client's own attribute classifiers most.

    .. math:: \tilde g = g + \delta, \qquad
        \delta \approx \arg\max_{|\delta|_\infty \le \epsilon} \sum_m \ell_m(g + \delta), \qquad
        \ell_m(v) = \log \sum_{a \ne \hat a} e^{z_{m,a}(v)} - z_{m, \hat a}(v)

    `prepare` trains the classifiers :math:`z_m`, four perceptrons of different shapes, on gradients of single public
    examples with known attribute. The attribute :math:`\hat a` that is hidden is the one that the ensemble reads from
    the clean update; a defense is not told the client's own. The perturbation takes `iterations` signed steps. As in
    the paper, each of them first goes up the loss of all classifiers but one, then, from there, up the loss of that
    one; only the second part is kept, so that what it finds carries over to classifiers that it has not seen. The one
    that is left out changes from step to step. Nothing is random after `prepare`.

    Which attribute: ``defense.for_attributes(attributes)``, whole numbers from 0, one for each public example that
    `prepare` will be given. Without it, the attribute is on which side of its class mean an example lies, along the
    direction in which public examples of one class differ most: a stand-in for the property that a user would name.

    It acts once, on the finished update, also under FedAvg. The classifiers are trained once, at the weights that
    `prepare` was given.

    Args:
        epsilon: the largest change of any value, in units of the gradient; 0 is the identity.
        iterations: number of steps.

    References:
        Cui et al., RecUP-FL: Reconciling Utility and Privacy in Federated Learning via User-configurable Privacy
        Defense, AsiaCCS 2023; compared in appendix G of Refiner (USENIX Security 2025). **Our choices**:
        classifiers see a sketch of the update; the loss is a margin, because the cross-entropy of a classifier that is
        certain has no gradient; the ensemble's reading stands for the true attribute.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> task = Task(model, input_shape=(1, 4, 4), classes=3)
        >>> public = torch.rand(30, 1, 4, 4, generator=torch.manual_seed(0)), torch.arange(30) % 3
        >>> defense, task = RecUP(epsilon=0.01).prepare(task, public=public, generator=torch.manual_seed(0))
        >>> clean, sent = task.gradients(*public), defense.share(task, *public)
        >>> 0.009 < float((sent["1.weight"] - clean["1.weight"]).abs().max()) < 0.011
        True
    """

    paper = "Cui et al., AsiaCCS 2023"
    caveat = (
        "it is tuned against the client's own attribute classifiers, trained once on public data; an attacker who "
        "trains others, or trains on updates that it has perturbed itself, may still read the attribute: there is no "
        "guarantee."
    )
    has_adaptive_attacker, needs_preparing = True, True

    epsilon: float = number(0.01, low=0, strength=(1e-4, 1.0), log=True)
    iterations: int = integer(10, low=1)
    attributes: Tensors | None = state()  # of the public examples, set by `for_attributes`
    learned: Tensors | None = state()  # the sketch and the classifiers, set by `prepare`

    def for_attributes(self, attributes: Tensor) -> "RecUP":
        """The same defense, to be prepared with public examples that have these attributes.

        Args:
            attributes: ``[N]``, whole numbers from 0, one for each public example.
        """
        if attributes.ndim != 1 or attributes.dtype != torch.long or not len(attributes) or int(attributes.min()) < 0:
            raise InputError(
                f"{self.name}: attributes must be whole numbers from 0, one for each public example, got shape "
                f"{list(attributes.shape)} of {attributes.dtype}"
            )
        return replace(self, attributes=Tensors({_ATTRIBUTES: attributes}))

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Prepared:
        """Train the classifiers on the gradients of the public examples."""
        if public is None:
            raise InputError(
                f"{self.name}: prepare needs public=(inputs, labels), about 100 examples that are not private"
            )
        task.check(*public)
        attributes = side_of_class_mean(task, *public) if self.attributes is None else self.attributes[_ATTRIBUTES]
        if len(attributes) != len(public[0]):
            raise InputError(
                f"{self.name}: expected one attribute for each of {len(public[0])} public examples, got "
                f"{len(attributes)}; pass those of the same examples to for_attributes"
            )
        generator = generator or fresh_generator(task.device)
        attributes = attributes.to(task.device)
        places = {name: _drawn_places(value, generator) for name, value in task.parameters.items()}
        gradients = task.without_dropout().per_example_gradients(*public)
        sketches = _sketch({name: value.flatten(1) for name, value in gradients.items()}, places).detach()
        targets = torch.nn.functional.one_hot(attributes, max(2, int(attributes.max()) + 1)).to(sketches)
        learned = {f"{_PLACES}{name}": value for name, value in places.items()}
        for number_, hidden in enumerate(ZOO):
            classifier = fit_perceptron(sketches, targets, hidden=hidden, epochs=EPOCHS, generator=generator)
            for part, tensor in enumerate(classifier.tensors):
                learned[f"{_ZOO}{number_} {part}"] = tensor
        return Prepared(replace(self, learned=Tensors(learned)), task)

    def perturb_rows(self, rows: Tensor, draws: Draws) -> Tensor:
        """Refused: the classifiers see all layers together, in `perturb_layers`."""
        raise InputError(f"{self.name}: perturbs all layers together, got one; call perturb with the whole gradient")

    def perturb_layers(
        self, layers: Mapping[str, Tensor], draws: Draws, announced: Announced | None = None
    ) -> dict[str, Tensor]:
        """Climb the losses of the classifiers in signed steps."""
        places, zoo = self._prepared({name: rows.shape[1] for name, rows in layers.items()})
        if self.epsilon == 0:
            return {name: rows.clone() for name, rows in layers.items()}
        with torch.no_grad():
            clean = _sketch(layers, places)
            read = torch.stack([classifier(clean).softmax(1) for classifier in zoo]).mean(0).argmax(1)
        step = 2 * self.epsilon / self.iterations  # a value can cross the box
        change = {name: torch.zeros_like(rows) for name, rows in layers.items()}
        for number_ in range(self.iterations):
            left_out = number_ % len(zoo)
            others = [classifier for place, classifier in enumerate(zoo) if place != left_out]
            trial = self._within({n: change[n] + step * up for n, up in _ascent(others, clean, change, places, read)})
            kept = _ascent([zoo[left_out]], clean, trial, places, read)
            change = self._within({name: change[name] + step * up for name, up in kept})
        return {name: rows + change[name] for name, rows in layers.items()}

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """Every value of the gradient lies within epsilon of the value that was sent."""
        if self.epsilon == 0:
            return NOTHING_TO_KNOW

        def read(expected: Gradients, update: Gradients) -> Evidence:
            return Evidence(
                {
                    name: expected[name].maximum(value - self.epsilon).minimum(value + self.epsilon)
                    for name, value in update.items()
                }
            )

        return {"interval": Knowledge("asks candidates to lie within epsilon of what was sent", read=read)}

    def _within(self, change: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.clamp(-self.epsilon, self.epsilon) for name, value in change.items()}

    def _prepared(self, sizes: Mapping[str, int]) -> tuple[dict[str, Tensor], list[VectorClassifier]]:
        """Where each value goes in the sketch, and the classifiers."""
        learned = self.learned
        if learned is None:
            raise InputError(
                f"{self.name}: the classifiers are not trained yet; call prepare(task, public=(inputs, labels)) once "
                "first"
            )
        places = {n.removeprefix(_PLACES): value for n, value in learned.items() if n.startswith(_PLACES)}
        if {name: value.numel() for name, value in places.items()} != sizes:
            raise InputError(
                f"{self.name}: prepared for layers {shapes_of(places)}, got sizes {dict(sizes)}; prepare it for this "
                "model"
            )
        zoo = []
        for number_ in range(len(ZOO)):
            parts = [value for name, value in learned.items() if name.startswith(f"{_ZOO}{number_} ")]
            zoo.append(VectorClassifier(tuple(parts)))
        return places, zoo


def side_of_class_mean(task: Task, inputs: Tensor, labels: Tensor) -> Tensor:
    """On which side of its class mean each example lies, along the direction in which one class's examples differ most.

    >>> task = Task(torch.nn.Linear(2, 2), input_shape=(2,), classes=2)
    >>> inputs = torch.tensor([[0.0, 0.0], [0.0, 1.0], [5.0, 2.0], [5.0, 4.0]])
    >>> side_of_class_mean(task, inputs, torch.tensor([0, 0, 1, 1])).tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])
    True
    """
    flat = inputs.flatten(1).double()
    one_class = task.classes is None or labels.ndim > 1 or labels.is_floating_point()
    kinds = torch.zeros(len(flat), dtype=torch.long, device=flat.device) if one_class else labels
    centred = flat.clone()
    for kind in torch.unique(kinds):
        centred[kinds == kind] -= flat[kinds == kind].mean(0)
    # The first eigenvector of the Gram matrix has the examples' positions along that direction.
    positions: Tensor = torch.linalg.eigh(centred @ centred.T).eigenvectors[:, -1]
    return (positions > 0).long()


def _drawn_places(layer: Tensor, generator: torch.Generator) -> Tensor:
    """For each value, one of the places 1 to `SKETCH`, with the sign with which the value is added there."""
    shape, device = layer.shape, generator.device
    places = torch.randint(1, SKETCH + 1, shape, generator=generator, device=device)
    signs = 2 * torch.randint(0, 2, shape, generator=generator, device=device) - 1
    return (places * signs).to(layer.device, torch.int16)


def _sketch(layers: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> Tensor:
    """The sketches ``[clients, SKETCH]`` of updates, each layer ``[clients, values]``."""
    first = next(iter(layers.values()))
    sketch = first.new_zeros(len(first), SKETCH)
    for name, rows in layers.items():
        place = places[name].flatten().long()
        sketch = sketch.index_add(1, place.abs() - 1, rows * place.sign())
    return sketch


def _ascent(
    zoo: Sequence[VectorClassifier],
    clean: Tensor,
    change: Mapping[str, Tensor],
    places: Mapping[str, Tensor],
    read: Tensor,
) -> list[tuple[str, Tensor]]:
    """The signs of the derivatives of the classifiers' summed margins, for each layer by name."""
    with torch.enable_grad():
        sketch = (clean + _sketch(change, places)).detach().requires_grad_()
        margins = [_margin(classifier, sketch, read) for classifier in zoo]
        (slope,) = torch.autograd.grad(torch.stack(margins).sum(), sketch)
    return [
        (name, (slope[:, place.flatten().long().abs() - 1] * place.flatten().sign()).sign().to(change[name]))
        for name, place in places.items()
    ]


def _margin(classifier: Callable[[Tensor], Tensor], sketch: Tensor, read: Tensor) -> Tensor:
    """How far the logit of the attribute that was read lies below those of all others together, for each client."""
    logits = classifier(sketch)
    chosen = torch.nn.functional.one_hot(read, logits.shape[1]).bool()
    return logits.masked_fill(chosen, -torch.inf).logsumexp(1) - logits[chosen]
