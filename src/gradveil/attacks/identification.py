"""Identification: which of some candidates did the client train on?"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from gradveil.attacks._adaptive import expectation
from gradveil.attacks._candidates import CandidateClients, ChosenValues, with_fixed_norms
from gradveil.attacks._ridge import DualRidge, Fit, WeightedGrams, weighted_gram, weighted_products
from gradveil.attacks._simulation import Steps
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Identification
from gradveil.attacks.problem import Problem, granted_public
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import ThreatModelError
from gradveil.core.parameters import choice, flag, integer
from gradveil.defenses.knowledge import Evidence, Knowledge
from gradveil.task import Gradients, Task
from gradveil.task.sensitivity import chunk_size
from gradveil.update import total_weight

FORMS = ("ridge", "matched-filter", "likelihood")
PLACES = {"start": 0.0, "midpoint": 0.5}
PATHS = ("evidence", *PLACES)

_EXPECTED_FROM = 64
"""Of a model with more values than a row has, the fitted update is computed from this many candidates, and from their
mean: those with the largest coefficients."""


@ATTACKS.register("identification")
@dataclass(frozen=True, repr=False)
class CandidateIdentification(Attack):
    r"""Say which of N candidates a client trained on: regress the update on the candidates' gradients.

    .. math:: u \approx \beta \bar g + \sum_i c_i (g_i - \bar g), \qquad
        \ell_i = \log \frac{p(u \mid c_i = share)}{p(u \mid c_i = 0)}

    There is no search: it costs N gradients and works for any model, batch size, kind of norm, number of local steps
    and modality. Labels are not inferred, because candidates have labels.

    ``form=ridge`` scores a candidate by its likelihood ratio :math:`\ell_i` under a Gaussian model whose covariance is
    that of ridge regression, in the dual (see `_ridge.DualRidge`). Both variances are chosen for every update by its
    marginal likelihood; the noise is at least as large as the defense's known noise. The mean of all candidates is a
    free component. It stands for examples that are not among the candidates; public data that the threat model grants
    are rows of the regression, too, and say what such examples look like.

    Measured on CIFAR-10 with a trained and an untrained LeNet, one image of a batch of 64 among 200 candidates, 20
    games: ratios have an AUC of .90 and .92, coefficients .87 and .89; with 800 public images, .98 (40 games).
    Generalised cross-validation is as good without noise and at most .01 worse with it. A free mean changes little
    without noise and gains up to .05 under it; one for each class loses in most cases. Weighting values by the
    inverse of their variance gains at most .02 and loses up to .2 under noise.

    ``form=matched-filter`` is the cosine with the deviation from the mean: what a simpler attacker would do.
    ``form=likelihood`` is exact for one example under equal noise, :math:`-|u - g_i|^2`.

    An adaptive attacker uses the defense's `Knowledge`. What is expected of a gradient (clipping) is applied to each
    candidate, or not, whichever makes the update more likely. What the update reveals (`Evidence`: what arrived, how
    much each value counts) is read with the current fit, fitted again, and so on, `passes` times. A defense that
    declares nothing, or only how to repair inputs that were found (``ats``, ``refiner``), is run on each candidate, and
    the mean of the draws is its row (`simulate`). Several observed rounds are one long update.

    With local steps, gradients are taken at the weights that were sent, or half way to those that came back, which the
    update itself reveals. With batch statistics, an update of one example is exact. For larger batches, candidates'
    gradients are taken with fixed statistics, those of batches of candidates, which leaves out what the statistics add
    to the gradient (resnet18 at initial weights, a batch of 16 among 200 candidates: AUC .89 in 10 games).

    Args:
        form: ``"ridge"``, ``"matched-filter"`` or, for one example, ``"likelihood"``.
        coordinates: the most values of an update that are compared; of larger models, a random subset.
        passes: how often an adaptive attacker reads the update again, with what it has fitted.
        path: where on the path of local steps gradients are taken: ``"start"``, ``"midpoint"``, or ``"evidence"``:
            whichever makes the update more likely, for each victim.
        simulate: whether an adaptive attacker runs the defense on each candidate if that is all it can do; otherwise it
            compares with undefended gradients.

    References:
        Ridge regression with a marginal likelihood: MacKay, Bayesian Interpolation, Neural Computation 1992. Likelihood
        ratios for membership: Carlini et al., Membership Inference Attacks From First Principles, S&P 2022. The
        combination, and its use of knowledge of defenses, is ours.

    Example:
        >>> import gradveil
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> images = torch.rand(12, 1, 4, 4, generator=torch.manual_seed(0))
        >>> labels, members = torch.arange(12) % 3, torch.tensor([2, 7])
        >>> update = gradveil.defense("none").share(task, images[members], labels[members])
        >>> attack, threat = CandidateIdentification(), gradveil.ThreatModel(batch_size=2)
        >>> found = attack.identify(task, update, (images, labels), threat)
        >>> sorted(found.named(2)[0].tolist())
        [2, 7]
    """

    paper = "ours; MacKay, Neural Computation 1992"
    adapts = True
    finds_labels = True
    finds = Identification

    form: str = choice("ridge", FORMS)
    coordinates: int = integer(100_000, low=1)
    passes: int = integer(3, low=1)
    path: str = choice("evidence", PATHS)
    simulate: bool = flag(True)

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Refuse the exact likelihood of more than one example."""
        super().check_threat(task, threat)
        if self.form == "likelihood" and threat.batch_size > 1:
            raise ThreatModelError(
                f"{self.name}: form=likelihood compares the update with single candidates, got batches of "
                f"{threat.batch_size}; use form=ridge"
            )

    @torch.no_grad()
    def run(self, problem: Problem) -> Identification:
        """Score every candidate for every victim."""
        return Identification(_Comparison(self, problem).scores())


class _Comparison:
    """The updates of a problem, compared with its candidates.

    Args:
        attack: says how.
        problem: the updates, the candidates, and what the attacker knows.
    """

    def __init__(self, attack: CandidateIdentification, problem: Problem) -> None:
        assert problem.candidates is not None
        threat, task = problem.threat, problem.task
        self.attack, self.problem, self.knowledge = attack, problem, _usable(problem, attack.simulate)
        self.count = len(problem.candidates[0])
        self.candidates = problem.candidates
        if threat.public is not None:
            # Others of their kind, which say what the rest of a batch looks like; their scores are not returned.
            public = granted_public(attack.name, task, threat)
            self.candidates = torch.cat([self.candidates[0], public[0]]), torch.cat([self.candidates[1], public[1]])
        self.share = total_weight(threat.local, threat.batch_size) / threat.batch_size
        self.chosen = ChosenValues(task, attack.coordinates, problem.generator)
        self.tasks = [round_task for round_task, _ in problem.rounds]
        if task.has_batch_statistics and threat.batch_size > 1:
            self.tasks = [
                with_fixed_norms(round_task, self.candidates[0], threat.batch_size, problem.generator)
                for round_task in self.tasks
            ]

    def scores(self) -> Tensor:
        """The scores ``[victims, candidates]``."""
        variants, victims = self._variants(), self.problem.victims
        tables = sum(victims if variant.by_victim else 1 for variant in variants)
        steps = Steps(self.problem.progress, tables * len(self.candidates[0]) + len(variants) * victims)
        found = [self._scored(variant, steps) for variant in variants]
        best = torch.stack([cost for _, cost in found]).argmin(0)
        return torch.stack([scores for scores, _ in found])[best, torch.arange(victims, device=best.device)]

    def _variants(self) -> list["_Variant"]:
        """What the attacker cannot know beforehand, and chooses for each victim by the marginal likelihood."""
        knowledge, rounds = self.knowledge, len(self.tasks)
        effects = [knowledge]
        if knowledge.expect and rounds == 1 and self.problem.examples > 1:
            # It is declared for the gradient of the batch. Whether it acts on single examples shows in the fit.
            effects.append(replace(knowledge, expect=None))
        paths = ["start", "midpoint"] if self.attack.path == "evidence" else [self.attack.path]
        places = [PLACES[path] for path in (paths if self.problem.threat.local else ["start"])]
        return [
            _Variant(effect, place, bool(place or effect.task or (effect.expect and rounds > 1)))
            for effect in effects
            for place in places
        ]

    def _scored(self, variant: "_Variant", steps: Steps) -> tuple[Tensor, Tensor]:
        """The scores of all victims, and what the fit costs each."""
        knowledge, victims = variant.knowledge, range(self.problem.victims)
        parts = []
        fits: Fit | None = None
        for group in [[victim] for victim in victims] if variant.by_victim else [list(victims)]:
            updates = [self._updates(victim) for victim in group]
            clients = self._clients(variant, updates[0])
            rows = clients.table(self.chosen, steps.add)
            targets = torch.stack([self._row(rounds) for rounds in updates])
            if (offset := clients.offset()) is not None:
                targets = targets - self._row(offset)
            noise = torch.tensor([_noise(knowledge, rounds) for rounds in updates], dtype=torch.float64).to(rows.device)
            model = _Model(rows, self.share, weighted_gram(rows))
            if fits is None:
                fits = model.fit(targets, noise)
            else:  # one victim after another, each with a table of its own: the last one's penalty is a good guess
                fits = model.fit_near(targets, noise, fits, refine=knowledge.read is None)
            if knowledge.read is None:
                parts.append((model.scores(self.attack.form, targets, fits), fits.cost))
                steps.add(len(group))
                continue
            grams = WeightedGrams(rows, model.gram)
            for place, rounds in enumerate(updates):
                fit = _one(fits, place)
                parts.append(self._read(knowledge, clients, grams, rounds, fit, noise[place : place + 1]))
                steps.add(1)
        scores = torch.cat([scores for scores, _ in parts])[:, : self.count]
        return scores, torch.cat([cost for _, cost in parts])

    def _read(
        self,
        knowledge: Knowledge,
        clients: CandidateClients,
        grams: WeightedGrams,
        rounds: Sequence[Gradients],
        fit: Fit,
        noise: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Read what the update says, given what is fitted; fit that, and read again."""
        assert knowledge.read is not None
        offset, rows = clients.offset(), grams.rows
        model, previous = None, torch.empty(0)
        for number in range(1, self.attack.passes + 1):
            expected = self._fitted(clients, rows, fit)
            if offset is not None:
                expected = [{n: e[n] + zero[n] for n in e} for e, zero in zip(expected, offset, strict=True)]
            evidence = [_completed(knowledge.read(e, u), e) for e, u in zip(expected, rounds, strict=True)]
            targets = self._row([values for values, _ in evidence])[None]
            if offset is not None:
                targets = targets - self._row(offset)
            weights = self._row([weights for _, weights in evidence])
            said, used = torch.cat([targets[0] * weights, weights]), weights > 0
            settled = torch.equal(said, previous)
            if model is None or not settled:
                model, previous = _Model(rows[:, used], self.share, grams.under(weights), weights[used]), said
            if settled or number == self.attack.passes:
                break
            fit = model.fit_near(targets[:, used], noise, fit, refine=False)
        assert model is not None
        fit = model.fit_near(targets[:, used], noise, fit, refine=True)
        return model.scores(self.attack.form, targets[:, used], fit), fit.cost

    def _fitted(self, clients: CandidateClients, rows: Tensor, fit: Fit) -> list[Gradients]:
        """What the fit says that was sent in each round, before the defense's randomness."""
        coefficients = (fit.coefficients + fit.of_mean[:, None] / len(rows))[0].to(rows)
        if self.chosen.all:
            return [self.chosen.update(part) for part in (coefficients @ rows).chunk(len(self.tasks))]
        places = coefficients.abs().topk(min(_EXPECTED_FROM, len(rows))).indices
        total: list[Gradients] = []
        for part in torch.split(places, chunk_size(self.tasks[0], len(self.tasks))):
            sums = [
                {name: torch.tensordot(coefficients[part], value, 1) for name, value in sent.items()}
                for sent in clients.sent(part)
            ]
            total = [{n: a[n] + b[n] for n in a} for a, b in zip(total, sums, strict=True)] if total else sums
        return total

    def _updates(self, victim: int) -> list[Gradients]:
        return [{name: value[victim] for name, value in updates.items()} for _, updates in self.problem.rounds]

    def _row(self, rounds: Sequence[Gradients]) -> Tensor:
        return torch.cat([self.chosen.rows({n: v[None] for n, v in update.items()})[0] for update in rounds])

    def _clients(self, variant: "_Variant", rounds: Sequence[Gradients]) -> CandidateClients:
        """The clients to compare a victim with, of which these updates were seen."""
        knowledge, tasks, local = variant.knowledge, self.tasks, self.problem.threat.local
        if knowledge.task:
            tasks = [knowledge.task(task, update) for task, update in zip(tasks, rounds, strict=True)]
        if local is not None and variant.place:
            step = variant.place * local.lr
            tasks = [
                task.with_parameters({n: value - step * update[n] for n, value in task.parameters.items()})
                for task, update in zip(tasks, rounds, strict=True)
            ]
        weight = total_weight(local, 1)
        return CandidateClients(tasks, self.candidates, knowledge.expect, knowledge.draw, rounds, weight)


@dataclass(frozen=True, eq=False)
class _Variant:
    """One way to compare updates with candidates.

    Args:
        knowledge: what the defense does.
        place: where on the client's path of local steps gradients are taken, from 0 (its start) to 1 (its end).
        by_victim: whether the candidates' gradients depend on what was seen of a victim.
    """

    knowledge: Knowledge
    place: float
    by_victim: bool


class _Model:
    """Updates as sums of rows.

    Args:
        rows: ``[candidates, values]``.
        share: the weight with which a member is part of the update.
        gram: ``[candidates, candidates]``, the inner products of the rows.
        weights: ``[values]``, how much each value counts; None: all count alike.
    """

    def __init__(self, rows: Tensor, share: float, gram: Tensor, weights: Tensor | None = None) -> None:
        self.rows, self.share, self.gram, self.weights = rows, share, gram, weights
        self.ridge = DualRidge(gram, rows.shape[1])

    def fit(self, targets: Tensor, noise: Tensor) -> Fit:
        """Fit updates ``[updates, values]`` with known variances of noise ``[updates]``."""
        return self.ridge.fit(*self._products(targets), share=self.share, least_noise=noise)

    def fit_near(self, targets: Tensor, noise: Tensor, fit: Fit, *, refine: bool) -> Fit:
        """Fit one update that is similar to one that was fitted, see `DualRidge.near`."""
        products, squares = self._products(targets)
        return self.ridge.near(products, squares, fit.penalty, share=self.share, least_noise=noise, refine=refine)

    def _products(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        squares = targets.double().square()
        squares = (squares if self.weights is None else squares * self.weights).sum(1)
        return weighted_products(self.rows, targets, self.weights), squares

    def scores(self, form: str, targets: Tensor, fit: Fit) -> Tensor:
        """The scores ``[updates, candidates]`` of one of the `FORMS`."""
        if form == "ridge":
            return fit.ratios
        products, squares = weighted_products(self.rows, targets, self.weights), self.gram.diagonal()
        if form == "likelihood":
            return self.share * products - self.share**2 / 2 * squares
        return self.ridge.matched(products, squares)


def _usable(problem: Problem, simulate: bool) -> Knowledge:
    """What the attacker knows about the defense, as far as it says something about candidates."""
    knowledge, threat = problem.knowledge, problem.threat
    if knowledge is None:
        return Knowledge("the plain attack")
    # Some forms only say how to undo the defense in inputs that were found; candidates can go through it instead.
    if knowledge.draw or (knowledge.after and not knowledge.changes_matching):
        assert threat.defense is not None
        return expectation(threat.defense, threat.local) if simulate else replace(knowledge, draw=None)
    return knowledge


def _noise(knowledge: Knowledge, rounds: Sequence[Gradients]) -> float:
    """The known variance of the noise in a victim's rounds, the least of them."""
    variance = knowledge.variance
    return min(float(variance(update)) if callable(variance) else variance for update in rounds)


def _completed(evidence: Evidence, expected: Gradients) -> tuple[Gradients, Gradients]:
    """Values and weights; a value that was held back counts if the fit is outside what is allowed for it."""
    weights = evidence.weights or {name: torch.ones_like(value) for name, value in evidence.values.items()}
    if evidence.allowed is None:
        return evidence.values, weights
    held_back = {name: weight == 0 for name, weight in weights.items()}
    values = {n: torch.where(held, evidence.allowed[n], evidence.values[n]) for n, held in held_back.items()}
    outside = {n: held & (evidence.allowed[n] != expected[n]) for n, held in held_back.items()}
    return values, {name: torch.where(outside[name], 1.0, weight) for name, weight in weights.items()}


def _one(fits: Fit, place: int) -> Fit:
    """The fit of one update out of several."""
    return Fit(*(getattr(fits, field.name)[place : place + 1] for field in fields(Fit)))
