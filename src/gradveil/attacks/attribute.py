"""Attributes: which property, other than the label, do the examples behind an update have?"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from gradveil.attacks._learned import Learning
from gradveil.attacks._reduction import Coordinates, centres_of, simulated_directions, simulated_features
from gradveil.attacks._simulation import (
    Cohort,
    Steps,
    check_simulation,
    kinds_of,
    setting_of,
    shares_of,
)
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Attributes
from gradveil.attacks.problem import Problem, granted_attributes
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.core.parameters import choice, integer, state
from gradveil.core.tensors import Tensors
from gradveil.models.vectors import VectorClassifier, fit_logistic, fit_perceptron
from gradveil.task import Task

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Weights of the squared weights of the linear form; the held-out public examples choose."""
_LAYER = "layer "


@ATTACKS.register("attribute")
@dataclass(frozen=True, repr=False)
class AttributeInference(Attack):
    r"""Infer a property of the examples that is not the label: learned from simulated updates of public examples.

    .. math:: \max_\theta \; E_{x, D} \, \log p_\theta(a(x) \mid V^T (D(\nabla L(x, y)) - \bar u_y), \, y)

    over public examples x with label y and attribute a(x) and draws of the defense D. The attacker simulates clients,
    with the defense in use if it is adaptive, as `lti` does: updates are centred by class and projected on the
    principal directions V of what clients send on average. The caller passes the attribute of each public example:
    ``ThreatModel(public=(inputs, labels), public_attributes=attributes)``, whole numbers from 0.

    ``form=linear`` is multinomial logistic regression on these features and the label. A gradient is a product of the
    error at the output and of activations, so what a value says about the input depends on the label;
    ``form=network``, the default, therefore also trains a perceptron with two hidden layers. A tenth of the
    public examples of every class is held out; it chooses the penalty, the epoch, and the linear form if no epoch has a
    lower cross-entropy there.

    **The honest baseline.** An attribute that goes with the label is known to whoever knows the label. The findings
    therefore hold the attribute's public rate given the label (`Attributes.baseline`), and
    `gradveil.metrics.attribute_summary` reports what the update adds to it.

    For a batch, the scores are the shares of the attributes among its examples, and the baseline is the mean over their
    labels. Clients are in their first round; of several observed rounds only the first is attacked. What was learned
    holds for one model at these weights, and one setting; anything else is refused. Memory is bounded as for `lti`.

    Args:
        form: ``"network"``, or ``"linear"``: only the logistic regression.
        directions: number of principal directions.
        draws: independent draws of the defense for each simulated client; one is used if the defense draws nothing.
        hidden: width of the network's two hidden layers.
        epochs: the most passes of the network over the simulated updates.

    References:
        Melis et al., Exploiting Unintended Feature Leakage in Collaborative Learning, S&P 2019 (classifiers of
        updates); Cui et al., RecUP-FL, AsiaCCS 2023 (the attack of Refiner's appendix G). The reduction is `lti`'s.

    Example:
        >>> import gradveil
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=2)
        >>> images = torch.rand(201, 1, 4, 4, generator=torch.manual_seed(0))
        >>> labels, bright = torch.arange(201) % 2, torch.arange(201) // 2 % 2
        >>> images[..., 0] *= 0.1 + 0.9 * bright[:, None, None]
        >>> threat = gradveil.ThreatModel(public=(images[1:], labels[1:]), public_attributes=bright[1:])
        >>> attack = AttributeInference(hidden=32).fit(task, threat, generator=torch.manual_seed(1))
        >>> update = gradveil.defense("none").share(task, images[:1], labels[:1])
        >>> found = attack.infer(task, update, threat)
        >>> int(found.guesses) == int(bright[0]), [round(float(rate), 1) for rate in found.baseline[0].exp()]
        (True, [0.5, 0.5])
    """

    paper = "Melis et al., S&P 2019"
    adapts = True
    needs_public = True
    simulates = True
    finds = Attributes

    form: str = choice("network", ["network", "linear"])
    directions: int = integer(400, low=1)
    draws: int = integer(8, low=1)
    hidden: int = integer(256, low=1)
    epochs: int = integer(100, low=1)
    learned: Tensors | None = state()
    fitted_for: str | None = state()

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Refuse knowledge of a defense in any form but its simulation, and public data without attributes."""
        super().check_threat(task, threat)
        check_simulation(self.name, threat)
        granted_attributes(self.name, threat)

    @torch.no_grad()
    def learn(self, task: Task, threat: ThreatModel, learning: Learning) -> Self:
        """Simulate clients, reduce their updates to features, and fit classifiers of the attribute."""
        assert threat.public is not None
        generator = learning.generator
        attributes = granted_attributes(self.name, threat)
        count = int(attributes.max()) + 1
        cohort = Cohort.of(self.name, task, threat, generator, width=self.directions, draws=self.draws)
        clients, taught, held = cohort.clients, cohort.taught, cohort.held
        shown = cohort.kept_draws(self.directions)
        coordinates = Coordinates.most_telling(clients, taught, cohort.kinds, generator)
        subset = cohort.some(coordinates.width)
        steps = Steps(learning.progress, cohort.draws * len(subset) + shown * len(taught) + len(held))
        directions, kept = simulated_directions(
            clients, coordinates, subset, cohort.shares(subset), cohort.draws, self.directions, learning, steps
        )

        def features_of(whose: str, groups: Tensor, drawn: int, kept: Tensor | None = None) -> Tensor:
            return simulated_features(clients, coordinates, directions, groups, drawn, whose, learning, steps, kept)

        features, shares = features_of("taught", taught, shown, kept), cohort.shares(taught)
        centres = centres_of(features.mean(0), shares)

        def examples(groups: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
            """What classifiers are shown, and the shares of the attributes: a row for every draw of every client."""
            shown = _shown(drawn, cohort.shares(groups), centres).flatten(0, 1)
            return shown, shares_of(attributes[groups], count).repeat(len(drawn), 1)

        known, unseen = examples(taught, features), examples(held, features_of("held", held, 1))
        fitted = [fit_logistic(*known, penalty=penalty) for penalty in PENALTIES]
        if self.form == "network":
            hidden = [self.hidden, self.hidden]
            fitted.append(
                fit_perceptron(*known, hidden=hidden, epochs=self.epochs, generator=generator, held_out=unseen)
            )
        best = min(fitted, key=lambda classifier: classifier.cross_entropy(*unseen))
        steps.finish()
        learned = {
            "directions": directions,
            "centres": centres,
            "rates": attribute_rates(cohort.kinds, attributes, cohort.classes, count),
            **{f"{_LAYER}{number}": tensor for number, tensor in enumerate(best.tensors)},
            **coordinates.learned,
        }
        return replace(self, learned=Tensors(learned), fitted_for=setting_of(task, threat))

    @torch.no_grad()
    def run(self, problem: Problem) -> Attributes:
        """Reduce the updates to features and apply the learned classifier."""
        learned, task = self.learned, problem.task
        assert learned is not None
        if self.fitted_for != (setting := setting_of(task, problem.threat)):
            raise ThreatModelError(
                f"{self.name}: was fitted for {self.fitted_for}, got {setting}; use attack = attack.fit(task, threat)"
            )
        kinds, classes = kinds_of(task, problem.labels, 2)
        shares = shares_of(kinds, classes)
        rows = Coordinates.of_learned(task, learned).rows(problem.updates)
        classifier = VectorClassifier(tuple(value for name, value in learned.items() if name.startswith(_LAYER)))
        scores = classifier(_shown(rows @ learned["directions"], shares, learned["centres"])).log_softmax(1)
        return Attributes(scores.double(), (shares.double() @ learned["rates"]).log())


def _shown(features: Tensor, shares: Tensor, centres: Tensor) -> Tensor:
    """What a classifier is shown of updates: features centred by class, and the share of each class."""
    centred = features - shares @ centres
    return torch.cat([centred, shares.expand(*centred.shape[:-1], -1)], -1)


def attribute_rates(kinds: Tensor, attributes: Tensor, classes: int, count: int) -> Tensor:
    """The rate of each attribute given the class, ``[classes, count]``, with half an example added to every attribute.

    >>> attribute_rates(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]), 2, 2)
    tensor([[0.6250, 0.3750],
            [0.2500, 0.7500]], dtype=torch.float64)
    """
    table = functional.one_hot(kinds, classes).double().T @ functional.one_hot(attributes, count).double() + 0.5
    return table / table.sum(1, keepdim=True)
