"""Mjolnir: remove the noise from an update with a diffusion model of public gradients, then match what is left."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from gradveil.attacks._diffusion import (
    AT_ENTRY,
    SPAN,
    Channel,
    Denoiser,
    Noisy,
    calibration,
    error_of,
    train_denoiser,
)
from gradveil.attacks._inverse import Examples, fit_linear
from gradveil.attacks._learned import Learning
from gradveil.attacks._reduction import Coordinates, centres_of, principal_directions
from gradveil.attacks._simulation import (
    Cohort,
    SimulatedClients,
    Steps,
    check_simulation,
    draw_seeds,
    kinds_of,
    setting_of,
    shares_of,
)
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction, RecoveredUpdate
from gradveil.attacks.inverting_gradients import SMOOTHING, near_the_middle
from gradveil.attacks.matching import LBFGS, ROUNDING, SQUARED, Distance, Matching, check_prior, match
from gradveil.attacks.problem import Problem
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.core.parameters import choice, integer, number, state
from gradveil.core.randomness import derived_generator
from gradveil.core.tensors import Tensors
from gradveil.task import Gradients, Task

LEAST_TRUSTED = 1e-4
"""The least variance that errors in a direction are assumed to have, as a share of the largest variance there is."""
HELD_DRAWS = 4
"""How often each held-out client is made noisy to see what the denoiser makes of it."""


@ATTACKS.register("mjolnir")
@dataclass(frozen=True, repr=False)
class Mjolnir(Attack):
    r"""Denoise the update with a diffusion model of public gradients, then match the denoised gradient.

    .. math::
        z' &= z + t \, p \odot n, \qquad z = W V^T (\nabla L(x, y) - \bar g_y) \\
        \hat z &= D_\theta(z', t, y) \approx E[z \,|\, z'] \\
        \hat x &= \arg\min_x \; \frac1k \sum_i \frac{(R^T W^{-1} (z(x) - \hat z / b))_i^2}{v_i + v_0}
            + \frac{|(I - V V^T)(\nabla L(x, y) - \bar g_y)|^2}{k v_0} + tv \cdot TV(x)

    The attacker computes the gradients of public inputs. Their means :math:`\bar g_y` (for a batch, fitted to the share
    of each class), their k principal directions V and the whitening W turn an update into coordinates of variance 1. A
    diffusion model (`_diffusion.Denoiser`) learns to remove noise of any level t from them; given an update, its
    reverse chain is entered at the level of the noise in it.

    An adaptive attacker simulates the defense on clients with public inputs. The regression of undefended features on
    defended ones gives the profile p of the noise for every defense, whether it adds noise, scales, prunes or all of
    that; the chain is then entered at t = 1. What a defense declares about its noise is not needed. A plain attacker
    assumes equal noise on every value. It finds the standard deviation of each update from the energy outside the
    principal directions, beyond what undefended updates of held-out public inputs have there.

    The rung below, ``form=linear``, is the best linear estimate: the same regression,
    :math:`C_{zf} (C_{ff} + \lambda I)^{-1} f`, or for equal noise the shrinkage s / (s + t^2) of each direction.

    The denoised features are matched where they are, by L-BFGS. Held-out public inputs say how much of a coordinate
    denoising keeps on average (b), and how large the errors are that remain (v, after the rotation R that makes them
    uncorrelated), so that what is uncertain counts little. Outside the basis, a candidate's gradient should be that of
    the class mean (:math:`v_0` is the variance of the last direction). That also works with updates of
    which only some values are used.

    Of updates with more than 65,536 values only so many are used (`_reduction.Coordinates`). Clients are in their
    first round. What was learned holds for one model at these weights and one setting; anything else is refused.

    Args:
        form: ``"diffusion"``, or ``"linear"``: only the best linear estimate.
        directions: number of principal directions.
        draws: draws of the defense for each simulated client from which an adaptive attacker learns what it does. One
            is enough, and used, if the defense draws nothing.
        epochs: passes of the denoiser's training over the simulated clients.
        steps: steps of the reverse chain. 1 is the posterior mean, which is nearest to the true gradient; more follow
            the chain down to a typical gradient.
        iterations: L-BFGS steps of the matching; for networks with ReLUs, in each of three stages.
        tv: weight of the total variation.

    References:
        Liu et al., Mjolnir: Breaking the Shield of Perturbation-Protected Gradients via Adaptive Diffusion, AAAI 2025.
        They train on gradients of a surrogate of the client's model, and the number of reverse steps follows the size
        of the perturbation. This attacker is granted the model itself and public data. The basis, the centring by
        class, the regression, the linear rung and the weighted matching are additions.

    Example:
        >>> import gradveil
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> shapes = torch.rand(3, 1, 4, 4, generator=torch.manual_seed(0))
        >>> images = torch.rand(301, 1, 1, 1, generator=torch.manual_seed(1)) * shapes[torch.arange(301) % 3]
        >>> labels, defense = torch.arange(301) % 3, gradveil.defense("gaussian-noise", std=0.02)
        >>> threat = gradveil.ThreatModel(public=(images[1:], labels[1:]), defense=defense, adaptive=True)
        >>> attack = Mjolnir(form="linear", tv=0.0).fit(task, threat, generator=torch.manual_seed(2))
        >>> update = defense.share(task, images[:1], labels[:1], generator=torch.manual_seed(3))
        >>> problem = attack.pose(task, [update], threat, torch.manual_seed(4))
        >>> denoised, true = attack.denoise(problem).updates["1.weight"][0], task.gradients(images[:1], labels[:1])
        >>> bool((denoised - true["1.weight"]).norm() < 0.5 * (update["1.weight"] - true["1.weight"]).norm())
        True
        >>> bool((attack.run(problem).inputs[0] - images[:1]).abs().mean() < 0.1)
        True
    """

    paper = "Liu et al., AAAI 2025"

    adapts = True
    needs_public = True
    simulates = True

    form: str = choice("diffusion", ["diffusion", "linear"])
    directions: int = integer(400, low=1)
    draws: int = integer(4, low=1)
    epochs: int = integer(40, low=1)
    steps: int = integer(1, low=1)
    iterations: int = integer(150, low=1)
    tv: float = number(0.3, low=0)
    learned: Tensors | None = state()
    fitted_for: str | None = state()

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Also refuse several rounds, what cannot be simulated, and `tv` for inputs that have no prior."""
        super().check_threat(task, threat)
        if threat.rounds > 1:
            raise ThreatModelError(
                f"{self.name}: learns from single rounds, got rounds={threat.rounds}; use ThreatModel(rounds=1)"
            )
        check_simulation(self.name, threat)
        if self.tv:
            check_prior(self.name, "tv", task)

    @torch.no_grad()
    def learn(self, task: Task, threat: ThreatModel, learning: Learning) -> Self:
        """Simulate clients, reduce their updates to features, learn what the defense does to them and to undo it."""
        assert threat.public is not None
        generator = learning.generator
        cohort = Cohort.of(self.name, task, threat, generator, width=self.directions, draws=self.draws)
        clients, taught, held = cohort.clients, cohort.taught, cohort.held
        draws = cohort.kept_draws(self.directions) if threat.adaptive else 0
        seed = int(torch.randint(1 << 31, (1,), generator=generator, device=generator.device))
        coordinates = Coordinates.most_telling(clients, taught, cohort.kinds, generator)
        subset = cohort.some(coordinates.width)
        network = self.form == "diffusion"
        simulated = len(subset) + (1 + draws) * (len(taught) + len(held))
        steps = Steps(learning.progress, simulated + network * self.epochs * len(taught))

        basis = self._basis(clients, coordinates, subset, cohort.shares(subset), generator, steps)
        shares, held_shares = cohort.shares(taught), cohort.shares(held)
        features_of = partial(_features, clients, basis, draws, learning, steps)
        clean, received, _ = features_of("taught", taught, shares)
        held_clean, held_received, held_outside = features_of("held", held, held_shares)

        shift = centres_of(clean, shares)  # the basis was centred by fewer clients
        basis = replace(basis, centres=basis.centres + shift @ basis.directions.T)
        clean -= shares @ shift
        held_clean -= held_shares @ shift
        offsets = torch.zeros_like(shift)
        if draws:
            offsets = centres_of(received.mean(0), shares)
            received -= shares @ offsets
            held_received -= held_shares @ offsets
            offsets -= shift
            weights = _regression((received, shares, clean), (held_received, held_shares, held_clean))
            channel = Channel.of_simulated(clean, received, weights)
            levels, at_entry = (1 / SPAN, 1.0), AT_ENTRY
            coordinates_of_held = (held_clean @ channel.whiten).repeat(draws, 1)
            observed = (held_received @ channel.observe).flatten(0, 1)
            known = Noisy(coordinates_of_held, observed, observed.new_ones(len(observed)), held_shares.repeat(draws, 1))
        else:
            channel = Channel.of_equal_noise(clean)
            deviations = 1 / channel.profile
            levels, at_entry = (float(deviations.min()), 3 * float(deviations.max())), 0.0
            places = torch.linspace(0, 1, HELD_DRAWS * len(held), device=task.device)
            drawn_levels = levels[0] * (levels[1] / levels[0]) ** places.view(-1, HELD_DRAWS).T.flatten()
            known = _made_noisy(channel.profile, held_clean @ channel.whiten, held_shares, drawn_levels, seed)

        denoiser, taken = Denoiser(channel.profile, levels, []), 0
        error = error_of(denoiser, channel.mix, known)
        if network:
            trained = train_denoiser(
                Denoiser.untrained(channel.profile, levels, cohort.classes, generator),
                channel.mix,
                clean @ channel.whiten,
                shares,
                known,
                generator,
                at_entry=at_entry,
                epochs=self.epochs,
                after_epoch=lambda: steps.add(len(taught)),
            )
            denoiser, error, taken = trained.denoiser, trained.error, trained.steps
        steps.finish()
        if draws:
            found = denoiser.reverse(known.observed, known.levels, known.shares, self.steps)
            slopes, spreads = calibration(found, known.clean)
            reliability = {"slopes": slopes, "spreads": spreads}
            rotation = _uncorrelated(spreads / slopes.square(), channel.mix)
        else:
            reliability = {"held": held_clean @ channel.whiten, "held shares": held_shares}
            rotation = functional.normalize(channel.mix).T
        variances = clean.square().mean(0)
        learned = {
            "directions": basis.directions,
            "centres": basis.centres,
            "offsets": offsets,
            "observe": channel.observe,
            "mix": channel.mix,
            "profile": channel.profile,
            "rotation": rotation,
            "levels": torch.tensor(levels, dtype=torch.float64),
            **{f"layer {n}": layer for n, layer in enumerate(denoiser.layers)},
            **reliability,
            "outside": held_outside.mean(),
            "least variance": variances.min().maximum(LEAST_TRUSTED * variances.max()),
            **coordinates.learned,
            "seed": torch.tensor(seed),
            "error": torch.tensor(error, dtype=torch.float64),
            "steps": torch.tensor(taken),
        }
        return replace(self, learned=Tensors(learned), fitted_for=setting_of(task, threat))

    def _basis(
        self,
        clients: SimulatedClients,
        coordinates: Coordinates,
        groups: Tensor,
        shares: Tensor,
        generator: torch.Generator,
        steps: Steps,
    ) -> "_Basis":
        """The class means and the principal directions of undefended updates."""
        rows = torch.empty(len(groups), coordinates.width, device=clients.task.device)
        done = 0
        for part in torch.split(groups, clients.chunk(groups.shape[1])):
            updates = clients.undefended(part, draw_seeds(1, len(part), generator))
            rows[done : done + len(part)] = coordinates.rows(updates)
            done += len(part)
            steps.add(len(part))
        centres = centres_of(rows, shares)
        for place in range(0, len(rows), 256):  # in parts, so that there is no other table
            rows[place : place + 256] -= shares[place : place + 256] @ centres
        directions = principal_directions(rows, self.directions)
        if not directions.numel():
            raise ThreatModelError(
                f"{self.name}: needs public inputs of the same class with different updates, got {len(rows)} to learn "
                "from without any; grant more public inputs in ThreatModel(public=...)"
            )
        return _Basis(coordinates, directions, centres)

    @torch.no_grad()
    def denoise(self, problem: Problem) -> RecoveredUpdate:
        """The updates without their noise, as the attacker estimates them: in the basis, and elsewhere the class mean.

        Args:
            problem: from `pose`.
        """
        found = self._denoised(problem)
        basis, learned = found.basis, self._learned(problem)
        if basis.coordinates.places is not None:
            raise ThreatModelError(
                f"{self.name}: only {basis.coordinates.width:,} values of an update are denoised, got updates with "
                f"{problem.task.size:,}; use reconstruct, which needs no others"
            )
        rows = found.centres + found.coordinates @ learned["mix"] @ basis.directions.T
        return RecoveredUpdate(basis.coordinates.updates(rows))

    def run(self, problem: Problem) -> Reconstruction:
        """Denoise the updates, and find the inputs whose gradients have the denoised coordinates."""
        with torch.no_grad():
            found = self._denoised(problem)
        learned, task, coordinates = self._learned(problem), problem.task, found.basis.coordinates
        least = learned["least variance"].double()
        readout = learned["directions"].double() @ learned["rotation"].double()
        # No direction is trusted more than it is trusted that there is nothing outside the basis.
        target = {"features": found.features, "variances": found.variances + least, "centres": found.centres}

        def between(simulated: Gradients, target: Gradients) -> Tensor:
            row = coordinates.rows({name: value[None] for name, value in simulated.items()}, torch.float64)[0]
            row = row - target["centres"]
            features = row @ readout
            inside = ((features - target["features"]).square() / target["variances"]).sum()
            return (inside + (row.square().sum() - features.square().sum()) / least) / len(features)

        def prior(inputs: Tensor) -> Tensor:
            penalty = problem.modality.prior(inputs, rounding=ROUNDING)
            assert penalty is not None  # see `check_threat`
            return self.tv * penalty

        return match(
            replace(problem, rounds=[(task, target)]),
            near_the_middle(problem),
            LBFGS(),
            Matching(list(target), Distance(between, SQUARED.unit), prior if self.tv else None),
            iterations=self.iterations,
            smoothing=SMOOTHING if task.has_kinks else (),
        )

    def _learned(self, problem: Problem) -> Tensors:
        assert self.learned is not None
        if self.fitted_for != (setting := setting_of(problem.task, problem.threat)):
            raise ThreatModelError(
                f"{self.name}: was fitted for {self.fitted_for}, got {setting}; use attack = attack.fit(task, threat)"
            )
        return self.learned

    def _denoised(self, problem: Problem) -> "_Denoised":
        learned, task = self._learned(problem), problem.task
        kinds, classes = kinds_of(task, problem.labels, 2)
        shares = shares_of(kinds, classes)
        basis = _Basis(Coordinates.of_learned(task, learned), learned["directions"], learned["centres"])
        features, outside = basis.features(problem.updates, shares)
        observed = (features - shares @ learned["offsets"]) @ learned["observe"]
        low, high = learned["levels"].tolist()
        layers = [value for name, value in learned.items() if name.startswith("layer")]
        denoiser = Denoiser(learned["profile"], (low, high), layers)
        if problem.threat.adaptive:
            levels = torch.ones_like(outside)
            slopes, spreads = (learned[name].expand_as(observed) for name in ("slopes", "spreads"))
        else:
            width, count = basis.directions.shape
            levels = ((outside - learned["outside"]).clamp_min(0) / max(1, width - count)).sqrt()
            slopes, spreads = self._reliability(denoiser, levels)
        found, mix, rotation = (
            denoiser.reverse(observed, levels, shares, self.steps),
            learned["mix"],
            learned["rotation"],
        )
        features = found / slopes @ mix @ rotation
        variances = spreads / slopes.square() @ (mix @ rotation).square()
        return _Denoised(basis, found, levels, features, variances, shares @ basis.centres)

    def _reliability(self, denoiser: Denoiser, levels: Tensor) -> tuple[Tensor, Tensor]:
        """How the denoised coordinates of held-out clients depend on the true ones, at the level of each victim."""
        assert self.learned is not None
        clean, shares, seed = self.learned["held"], self.learned["held shares"], int(self.learned["seed"])
        pairs = []
        for level in levels:
            noisy = _made_noisy(denoiser.profile, clean, shares, level.expand(HELD_DRAWS * len(clean)), seed)
            found = denoiser.reverse(noisy.observed, noisy.levels, noisy.shares, self.steps)
            pairs.append(calibration(found, noisy.clean))
        slopes, spreads = (torch.stack(values) for values in zip(*pairs, strict=True))
        return slopes, spreads


@dataclass(frozen=True, eq=False)
class _Basis:
    """The class means ``[classes, width]`` of undefended updates, and their principal directions ``[width, count]``."""

    coordinates: Coordinates
    directions: Tensor
    centres: Tensor

    def features(self, updates: Gradients, shares: Tensor) -> tuple[Tensor, Tensor]:
        """The centred features ``[clients, count]`` of updates, and the energy ``[clients]`` that they leave out."""
        rows = self.coordinates.rows(updates) - shares @ self.centres
        features = rows @ self.directions
        return features, (rows.square().sum(1) - features.square().sum(1)).clamp_min(0)


@dataclass(frozen=True, eq=False)
class _Denoised:
    """What is left of updates without the noise.

    Args:
        basis: where the coordinates are.
        coordinates: ``[victims, count]``.
        levels: ``[victims]``, the noise level at which the chain was entered.
        features: ``[victims, count]``, the rotated features without what denoising takes from the truth on average.
        variances: ``[victims, count]``, those of their errors, which the rotation makes uncorrelated.
        centres: ``[victims, width]``, the class means.
    """

    basis: _Basis
    coordinates: Tensor
    levels: Tensor
    features: Tensor
    variances: Tensor
    centres: Tensor


def _features(
    clients: SimulatedClients,
    basis: _Basis,
    draws: int,
    learning: Learning,
    steps: Steps,
    whose: str,
    groups: Tensor,
    shares: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Undefended features, those of several draws of the defense, and the energy that the undefended ones leave out."""
    clean = torch.empty(len(groups), basis.directions.shape[1], device=groups.device)
    received, outside = clean.new_empty(draws, *clean.shape), clean.new_empty(len(groups))

    def simulate(part: Tensor, of: Tensor) -> dict[str, Tensor]:
        honest = clients.undefended(part, draw_seeds(1, len(part), learning.generator))
        features, left_out = basis.features(honest, of)
        drawn = clients.draws(part, draw_seeds(draws, len(part), learning.generator))
        defended = [basis.features(updates, of)[0] for updates in drawn]
        return {
            "clean": features,
            "outside": left_out,
            "received": torch.stack(defended) if defended else features.new_empty(0, *features.shape),
        }

    done = 0
    for part in torch.split(groups, clients.chunk(groups.shape[1])):
        here = slice(done, done + len(part))
        found = learning.once(f"{whose}-{done}", partial(simulate, part, shares[here]))
        clean[here], outside[here], received[:, here] = found["clean"], found["outside"], found["received"]
        steps.add((1 + draws) * len(part))
        done += len(part)
    return clean, received, outside


def _regression(learning: tuple[Tensor, Tensor, Tensor], held: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The regression ``[features, features]`` of clean features on received ones.

    Args:
        learning: received features ``[draws, clients, features]``, shares and clean features, all centred.
        held: those by which the regularisation is chosen.
    """
    scale = learning[0].square().mean((0, 1)).sqrt().clamp_min(torch.finfo(learning[0].dtype).tiny)
    examples = [
        Examples(
            received / scale,
            shares,
            torch.zeros_like(clean)[:, None],
            torch.arange(len(clean), device=clean.device)[:, None],
            clean,
        )
        for received, shares, clean in (learning, held)
    ]
    weights, _ = fit_linear(*examples)
    return weights / scale[:, None]


def _uncorrelated(variances: Tensor, mix: Tensor) -> Tensor:
    """The rotation ``[features, features]`` of features in which errors of the coordinates are uncorrelated."""
    errors = mix.double().T @ (variances.double()[:, None] * mix.double())
    rotation: Tensor = torch.linalg.eigh(errors)[1]
    return rotation.to(mix)


def _made_noisy(profile: Tensor, clean: Tensor, shares: Tensor, levels: Tensor, seed: int) -> Noisy:
    """Clients with noise of these levels, one for each of several copies of them; always the same noise."""
    copies = len(levels) // len(clean)
    repeated = clean.repeat(copies, 1)
    noise = torch.randn(repeated.shape, generator=derived_generator(seed, "held-out noise")).to(clean)
    return Noisy(repeated, repeated + levels[:, None] * profile * noise, levels, shares.repeat(copies, 1))
