"""Learning to invert: a map from updates to inputs, trained on simulated clients with public data."""

import math
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Self

import torch
from torch import Tensor

from gradveil.attacks._inverse import (
    Examples,
    Network,
    apply_linear,
    average_of,
    best_share,
    blend_of,
    error_of,
    fit_linear,
    gains_of,
    train_network,
)
from gradveil.attacks._learned import Learning
from gradveil.attacks._limits import CLIENTS, with_chosen_limits
from gradveil.attacks._reduction import (
    Coordinates,
    centres_of,
    draws_kept,
    simulated_directions,
    simulated_features,
)
from gradveil.attacks._simulation import (
    Cohort,
    Steps,
    check_simulation,
    kinds_of,
    setting_of,
    shares_of,
)
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.core.parameters import choice, integer, number, state
from gradveil.core.tensors import Tensors
from gradveil.task import Task

LAYER = "layer "
"""How the names of the network's weights begin among what was learned."""
NETWORK_OUTPUTS = 1 << 15
"""The most values behind an update that the network predicts; its last layer then takes 512 MiB while it is trained."""


@ATTACKS.register("lti")
@dataclass(frozen=True, repr=False)
class LTI(Attack):
    r"""Learning to invert: learn from public data what inputs look like whose defended updates look like this one.

    .. math:: \min_\theta \; E_{x, D} \, | x - \bar x_y - f_\theta(S^{-1} V^T (D(\nabla L(x, y)) - \bar u_y)) |^2

    over public inputs x with label y and draws of the defense D: the attacker simulates clients. An adaptive attacker
    simulates the defense in use, so it adapts to every defense without knowing anything else about it; a plain one
    simulates undefended clients. :math:`\bar x_y, \bar u_y` are the means of the class (for a batch,
    :math:`\bar u` is fitted to the share of each class), V holds the principal directions of the mean defended update
    of a client, and S is the deviation of each feature, signal and noise together; the network gets them times the
    square root of the share that is signal. Where it helps, the values of updates are also shown with soft limits, and
    these have directions of their own (see `_limits.with_chosen_limits`): on single CIFAR-10 images, undefended, with
    4,000 public ones, they lower the error of the linear map from .055 to .026 and that of the blend from .041 to .025
    (ReLU LeNet at its initial weights).

    The first rung, ``form=linear``, is the best linear map in closed form, :math:`C_{xf} (C_{ff} + \lambda I)^{-1}`.
    ``form=network`` is a perceptron with three hidden layers of GELUs, trained with AdamW in mini-batches of 128. If
    the values of an input have bounds, as pixels have, it predicts their logits (see `_inverse.Network`). The default,
    ``form=blend``, predicts a weighted mean of both if that is clearly better than the network. A tenth of the public
    inputs of every class is held out: it chooses :math:`\lambda`, the epoch that is kept and the weights of the blend;
    if the linear map is better there than every epoch, ``form=network`` uses that. For batches, examples are ordered by
    label, and an error counts after the best assignment of predicted to true examples.

    Of updates with more than 65,536 values, only so many are used: those that differ most between undefended clients of
    one class (see `_reduction.Coordinates`). Memory: no table exceeds 512 MiB, and two of them are never needed at
    once; together with a quarter of a GiB for the clients that are simulated at a time, learning stays below 1 GiB
    beyond the public inputs. If `draws` times the clients do not fit into a table, there are fewer draws, and at last
    fewer clients.

    Of a defense that announces, the attacker expects an honest announcement by another client. Clients are in their
    first round, and of several observed rounds only the first is attacked. Under secure aggregation, all examples
    behind the sum are simulated as those of one client. Of a class without public inputs it knows only the mean of all.
    What was learned holds for one model at these weights, and one setting; anything else is refused.

    Args:
        form: ``"blend"``; ``"network"``: only the network; or ``"linear"``: only the closed form.
        directions: number of principal directions.
        draws: independent draws of the defense for each simulated client; the epochs take them in turn. The principal
            directions are those of their mean. One is enough, and used, if the defense draws nothing.
        hidden: width of the network's hidden layers.
        epochs: passes of the network over the simulated clients.
        networks: how many networks are trained, from different starts; their predictions are averaged.
        seconds: the network's training ends with the epoch in which this time is over; None: it has no limit. With a
            limit, results depend on the machine.

    References:
        Wu, Chen, Guo and Weinberger, Learning to Invert: Simple Adaptive Attacks for Gradient Inversion in Federated
        Learning, UAI 2023. They train a perceptron on the defended gradients themselves, or on a random subset of their
        values. The principal directions, the centring by class, the soft limits, the linear rung and the blend are
        additions.

    Example:
        >>> import gradveil
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> shapes = torch.rand(3, 1, 4, 4, generator=torch.manual_seed(0))
        >>> images = torch.rand(301, 1, 1, 1, generator=torch.manual_seed(1)) * shapes[torch.arange(301) % 3]
        >>> labels, defense = torch.arange(301) % 3, gradveil.defense("gaussian-noise", std=0.02)
        >>> threat = gradveil.ThreatModel(public=(images[1:], labels[1:]), defense=defense, adaptive=True)
        >>> attack = LTI(form="linear").fit(task, threat, generator=torch.manual_seed(2))
        >>> update = defense.share(task, images[:1], labels[:1], generator=torch.manual_seed(3))
        >>> found = attack.reconstruct(task, update, threat)
        >>> bool((found.inputs[0] - images[:1]).abs().mean() < 0.1)
        True
    """

    paper = "Wu et al., UAI 2023"

    adapts = True
    needs_public = True
    simulates = True

    form: str = choice("blend", ["blend", "network", "linear"])
    directions: int = integer(400, low=1)
    draws: int = integer(16, low=1)
    hidden: int = integer(1024, low=1)
    epochs: int = integer(60, low=1)
    networks: int = integer(1, low=1)
    seconds: float | None = number(None, above=0)
    learned: Tensors | None = state()
    fitted_for: str | None = state()

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Refuse knowledge of a defense in any form but its simulation, and more values than the network predicts."""
        super().check_threat(task, threat)
        check_simulation(self.name, threat)
        outputs = threat.batch_size * math.prod(task.input_shape)
        if self.form != "linear" and outputs > NETWORK_OUTPUTS:
            raise ThreatModelError(
                f"{self.name}: the network predicts at most {NETWORK_OUTPUTS:,} values, got {outputs:,} behind each "
                "update; use form=linear or smaller batches"
            )

    @torch.no_grad()
    def learn(self, task: Task, threat: ThreatModel, learning: Learning) -> Self:
        """Simulate clients, reduce their updates to features, and fit the maps from features to inputs."""
        assert threat.public is not None
        generator = learning.generator
        cohort = Cohort.of(self.name, task, threat, generator, width=self.directions, draws=self.draws)
        clients, taught, held, kinds = cohort.clients, cohort.taught, cohort.held, cohort.kinds
        coordinates = Coordinates.most_telling(clients, taught, kinds, generator)
        subset = cohort.some(coordinates.width)
        tried = subset[:CLIENTS]
        network = self.form != "linear"
        shown = cohort.kept_draws(self.directions)
        twice = min(shown, draws_kept(clients, coordinates, len(subset), cohort.draws)) * len(subset)
        drawn = cohort.draws * len(subset) + shown * len(taught) - twice
        simulated = len(tried) + drawn + len(held)
        steps = Steps(learning.progress, simulated + network * self.networks * self.epochs * len(taught))

        flat = threat.public[0].flatten(1).float()
        targets = flat[tried].flatten(1)
        coordinates = with_chosen_limits(clients, coordinates, tried, cohort.shares(tried), targets, learning, steps)
        subset = cohort.some(coordinates.width)
        directions, kept = simulated_directions(
            clients, coordinates, subset, cohort.shares(subset), cohort.draws, self.directions, learning, steps
        )

        def features_of(whose: str, groups: Tensor, count: int, kept: Tensor | None = None) -> Tensor:
            return simulated_features(clients, coordinates, directions, groups, count, whose, learning, steps, kept)

        one_hot = torch.nn.functional.one_hot(kinds[cohort.parts[0]], cohort.classes)
        means = centres_of(flat[cohort.parts[0]], one_hot)

        def examples(groups: Tensor, features: Tensor) -> Examples:
            return Examples(features, cohort.shares(groups), means[kinds[groups]], groups, flat)

        features = features_of("taught", taught, cohort.kept_draws(directions.shape[1]), kept)
        shares = cohort.shares(taught)
        centres = centres_of(features.mean(0), shares)
        features -= shares @ centres
        scale = features.square().mean((0, 1)).sqrt().clamp_min(torch.finfo(features.dtype).tiny)
        features /= scale
        known = examples(taught, features)
        unseen = examples(held, (features_of("held", held, 1) - cohort.shares(held) @ centres) / scale)
        linear, linear_error = fit_linear(known, unseen)
        error, gains = linear_error, gains_of(features)
        networks: list[Network] = []
        bounds = task.modality.bounds
        share, taken = 1.0, 0
        # Part of a blend, a network need not beat the linear map by itself.
        to_beat = linear_error if self.form == "network" else math.inf
        if network:
            with torch.enable_grad():
                limit, begun = self.seconds or float("inf"), perf_counter()

                def go_on(_epochs: int) -> bool:
                    steps.add(len(taught))
                    return perf_counter() - begun < limit

                for _ in range(self.networks):
                    start = Network.untrained(gains, cohort.classes, linear.shape[1], self.hidden, bounds, generator)
                    trained = train_network(start, to_beat, known, unseen, generator, epochs=self.epochs, go_on=go_on)
                    networks += [trained.network] if trained.network else []
                    taken += trained.steps
            if networks and self.form == "blend":
                share, error = best_share(networks, linear, unseen, bounds)
            elif networks:
                error = error_of(average_of(networks), unseen)
        steps.finish()
        learned = {
            "directions": directions,
            "centres": centres,
            "scale": scale,
            "gains": gains,
            "means": means,
            "linear": linear,
            "share": torch.tensor(share, dtype=torch.float64),
            **{
                f"{LAYER}{number}.{n}": layer
                for number, one in enumerate(networks)
                for n, layer in enumerate(one.layers)
            },
            **coordinates.learned,
            "linear error": torch.tensor(linear_error, dtype=torch.float64),
            "error": torch.tensor(error, dtype=torch.float64),
            "steps": torch.tensor(taken),
        }
        return replace(self, learned=Tensors(learned), fitted_for=setting_of(task, threat))

    def first_rung(self) -> Self:
        """The fitted attack with only its linear map, which was fitted on the way to the network."""
        if self.learned is None:
            raise ThreatModelError(f"{self.name}: must be fitted first; use attack = attack.fit(task, threat)")
        kept = {name: value for name, value in self.learned.items() if not name.startswith(LAYER)}
        known = {**kept, "error": self.learned["linear error"], "steps": torch.tensor(0)}
        return replace(self, learned=Tensors(known))

    @torch.no_grad()
    def run(self, problem: Problem) -> Reconstruction:
        """Reduce the updates to features and apply the learned map."""
        learned, task = self.learned, problem.task
        assert learned is not None
        if self.fitted_for != (setting := setting_of(task, problem.threat)):
            raise ThreatModelError(
                f"{self.name}: was fitted for {self.fitted_for}, got {setting}; use attack = attack.fit(task, threat)"
            )
        kinds, classes = kinds_of(task, problem.labels, 2)
        order = kinds.argsort(dim=1, stable=True)
        kinds = kinds.gather(1, order)
        labels = torch.stack([row[places] for row, places in zip(problem.labels, order, strict=True)])
        shares = shares_of(kinds, classes)
        rows = Coordinates.of_learned(task, learned).rows(problem.updates)
        features = (rows @ learned["directions"] - shares @ learned["centres"]) / learned["scale"]
        layers: dict[str, list[Tensor]] = {}
        for name, value in learned.items():
            if name.startswith(LAYER):
                layers.setdefault(name.partition(".")[0], []).append(value)
        guesses = learned["means"][kinds]
        if layers:
            bounds, share = task.modality.bounds, float(learned["share"])
            networks = [Network(learned["gains"], one, bounds) for one in layers.values()]
            found = blend_of(networks, learned["linear"], share, bounds)(features, shares, guesses)
        else:
            found = apply_linear(learned["linear"], features, shares, guesses)
        inputs = problem.modality.project(found.view(*kinds.shape, *task.input_shape).to(task.dtype))
        steps = torch.full((problem.victims,), int(learned["steps"]))
        return Reconstruction(inputs, labels, learned["error"].expand(problem.victims).clone(), steps)
