"""Identification: which of some candidates did the client train on?"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gradveil.attacks._adaptive import expectation
from gradveil.attacks._candidates import CandidateClients, ChosenValues, with_fixed_norms
from gradveil.attacks._ridge import (
    COARSE,
    FINAL,
    FINE,
    DualRidge,
    Fit,
    WeightedGrams,
    weighted_gram,
    weighted_products,
)
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
PATHS = ("evidence", "start", "shared", "midpoint")

_EXPECTED_FROM = 64
"""Of a model with more values than a row has, the fitted update is computed from this many candidates, and from their
mean: those with the largest coefficients."""
_CHANGE_FROM = 128
"""How the fitted update changes along a client's path is computed from this many candidates: half of them are those
with the largest coefficients, the other half stand for the rest."""


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
    update itself reveals. That takes all candidates' gradients for each update; ``path=shared`` takes them once,
    half way to the mean of what came back, and subtracts how the fitted update changes from there to the middle of a
    client's own path, if that makes the update more likely: an eighth of the cost. That is as good where a client moves
    little (LeNet with uniform weights, five steps at .002, one image of batches of 64 among 1,000 candidates: AUC .980,
    and .985 by default; 24 games), and worse where it moves far (trained, at .05, batches of 16: .897 and .976; 16
    games).

    With batch statistics, an update of one example is exact. For larger batches, candidates'
    gradients are taken with fixed statistics, those of batches of candidates, which leaves out what the statistics add
    to the gradient (resnet18 at initial weights, a batch of 16 among 200 candidates: AUC .89 in 10 games).

    Args:
        form: ``"ridge"``, ``"matched-filter"`` or, for one example, ``"likelihood"``.
        coordinates: the most values of an update that are compared; of larger models, a random subset.
        passes: how often an adaptive attacker reads the update again, with what it has fitted.
        path: where on the path of local steps gradients are taken: at its ``"start"``, at its ``"midpoint"``, or
            ``"evidence"``: whichever makes the update more likely, for each victim. ``"shared"`` chooses between the
            start and the middle of all paths.
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
    takes_questions = True

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
            if problem.among is not None:
                raise ThreatModelError(
                    f"{attack.name}: fixes batch statistics by all candidates, so it takes no questions about some of "
                    "them here; leave out among="
                )
            self.tasks = [
                with_fixed_norms(round_task, self.candidates[0], threat.batch_size, problem.generator)
                for round_task in self.tasks
            ]

    def scores(self) -> Tensor:
        """The scores ``[victims, candidates]``, or of each question, see `Identification`."""
        variants = [(effect, path) for effect in self._effects() for path in self._paths()]
        victims, count = self.problem.victims, len(self.candidates[0])
        tables = sum(victims if self._by_victim(*variant) else 1 for variant in variants)
        steps = Steps(self.problem.progress, tables * count + len(variants) * victims)
        found = [self._scored(*variant, steps) for variant in variants]
        best = torch.stack([cost for _, cost in found]).argmin(0)
        scores = torch.stack([scores for scores, _ in found])[best, torch.arange(len(best), device=best.device)]
        return scores if self.problem.among is None else scores.view(self.problem.among.shape)

    def _effects(self) -> list[Knowledge]:
        """What the defense may do; which of it is the case is chosen for each victim by the marginal likelihood."""
        knowledge = self.knowledge
        if knowledge.expect and len(self.tasks) == 1 and self.problem.examples > 1:
            # It is declared for the gradient of the batch. Whether it acts on single examples shows in the fit.
            return [knowledge, replace(knowledge, expect=None)]
        return [knowledge]

    def _paths(self) -> list[str]:
        """Where gradients are taken, chosen in the same way; a simulated client takes its local steps itself."""
        if self.problem.threat.local is None or self.knowledge.draw:
            return ["start"]
        several = {"evidence": ["start", "midpoint"], "shared": ["start", "shared"]}
        return several.get(self.attack.path, [self.attack.path])

    def _by_victim(self, effect: Knowledge, path: str) -> bool:
        """Whether the candidates' gradients depend on what was seen of a victim."""
        return bool(path == "midpoint" or effect.task or (effect.expect and len(self.tasks) > 1))

    def _scored(self, effect: Knowledge, path: str, steps: Steps) -> tuple[Tensor, Tensor]:
        """The scores of all victims, question by question, and what each fit costs."""
        victims, last = list(range(self.problem.victims)), dict[int, _Compared]()
        parts: list[tuple[Tensor, Tensor]] = []
        for group in [[victim] for victim in victims] if self._by_victim(effect, path) else [victims]:
            updates = [self._updates(victim) for victim in group]
            table = self._table(effect, path, updates, steps)
            for places, question, asked in self._questions(group):
                seen = [updates[place] for place in places]
                last[question] = self._compared(effect, path, table.of(places), asked, seen, last.get(question))
                parts.append(self._read(effect, last[question], seen))
            steps.add(len(group))
        scores, costs = (torch.cat([part[number] for part in parts]) for number in (0, 1))
        return scores[:, : self.count], costs

    def _questions(self, group: list[int]) -> Iterator[tuple[list[int], int, Tensor | None]]:
        """Places in a group of victims, the number of a question about them, and which rows it is about (None: all)."""
        if self.problem.among is None:
            yield list(range(len(group))), 0, None
            return
        for place, victim in enumerate(group):
            for question, among in enumerate(self.problem.among[victim].to(self.candidates[0].device)):
                public = torch.arange(self.count, len(self.candidates[0]), device=among.device)
                yield [place], question, torch.cat([among.nonzero().flatten(), public])

    def _table(self, effect: Knowledge, path: str, updates: Sequence[Sequence[Gradients]], steps: Steps) -> "_Table":
        """The gradients that the updates of some victims are compared with.

        Args:
            effect: what the defense does.
            path: where on the paths of local steps gradients are taken.
            updates: what was seen of each victim, round by round.
            steps: counts candidates.
        """
        mean = [
            {name: torch.stack([each[name] for each in seen]).mean(0) for name in seen[0]}
            for seen in zip(*updates, strict=True)
        ]
        clients = self._clients(effect, self.tasks if path == "start" else self._half_way(mean), updates[0])
        rows = clients.table(self.chosen, steps.add)
        targets = torch.stack([self._row(rounds) for rounds in updates])
        offset = clients.offset()
        shifts = torch.zeros_like(targets) if offset is None else self._row(offset).expand_as(targets)
        noise = torch.tensor([_noise(effect, rounds) for rounds in updates], dtype=torch.float64).to(rows.device)
        # Gradients at the middle of a path stand for those along it, an error far above that of single precision.
        grams = WeightedGrams(rows, weighted_gram(rows, exact=path != "midpoint"))
        return _Table(clients, grams, targets, shifts, noise)

    def _compared(
        self,
        effect: Knowledge,
        path: str,
        table: "_Table",
        asked: Tensor | None,
        updates: Sequence[Sequence[Gradients]],
        similar: "_Compared | None",
    ) -> "_Compared":
        """The updates of some victims, compared with rows of a table.

        Args:
            effect: what the defense does.
            path: where on the paths of local steps gradients are taken.
            table: the rows, and the updates as rows.
            asked: the places of the rows; None: all.
            updates: what was seen of each victim, round by round.
            similar: what another victim was compared with; its penalty is a good guess.
        """
        model = _Model(table.grams.rows, self.share, table.grams.whole, asked=asked)
        targets = table.targets - table.shifts
        if similar is None:
            fits = model.fit(targets, table.noise)
        else:
            search = COARSE if effect.read else FINE
            fits = model.fit_near(targets, table.noise, similar.fits, steps=search, final=not effect.read)
        compared = _Compared(table, model, fits)
        if path == "shared" and self.problem.victims > 1 and effect.expect is None:
            return self._on_own_paths(compared, updates)
        return compared

    def _on_own_paths(self, compared: "_Compared", updates: Sequence[Sequence[Gradients]]) -> "_Compared":
        """Take from each update how the fitted one changes from the shared weights to the middle of its own path.

        It is done again with the new fit, and each time only for the updates that become more likely by it.
        """
        rows, clients, without = compared.model.rows, compared.table.clients, compared.table.shifts
        changing = list(range(len(updates)))
        for _ in range(self.attack.passes):
            changes = []
            for sums, victim in zip(compared.model.sums(compared.fits.of(changing)).to(rows), changing, strict=True):
                places, weights = _representatives(sums, compared.model.asked)
                there = replace(clients, tasks=self._half_way(updates[victim])).weighted_sum(places, weights)
                changes.append(self._row(there) - weights @ rows[places])
            tried = compared.of(changing)
            table = replace(tried.table, shifts=without[changing] + torch.stack(changes))
            tried = replace(tried, table=table, fits=compared.model.fit(table.targets - table.shifts, table.noise))
            compared, changing = compared.improved(tried, changing)
            if not changing:
                break
        return compared

    def _read(
        self, effect: Knowledge, compared: "_Compared", updates: Sequence[Sequence[Gradients]]
    ) -> tuple[Tensor, Tensor]:
        """Score candidates by what the updates say, given what is fitted; fit that, and read again."""
        table, model, fits = compared.table, compared.model, compared.fits
        targets = table.targets - table.shifts
        for _ in range(self.attack.passes if effect.read else 0):
            readings = list(map(partial(self._reading, effect, compared), model.sums(fits), table.shifts, updates))
            if any(weights is not None for _, weights in readings):
                alone: list[tuple[Tensor, Fit]] = []
                for place, reading in enumerate(readings):
                    similar = alone[-1][1] if alone else None
                    one = compared.of([place])
                    alone.append(self._read_alone(effect, one, updates[place], reading, similar))
                return torch.cat([scores for scores, _ in alone]), torch.cat([fit.cost for _, fit in alone])
            targets = torch.stack([values for values, _ in readings]) - table.shifts
            fits = model.fit(targets, table.noise)
        return model.scores(self.attack.form, targets, fits), fits.cost

    def _read_alone(
        self,
        effect: Knowledge,
        compared: "_Compared",
        rounds: Sequence[Gradients],
        reading: "_Reading",
        similar: Fit | None,
    ) -> tuple[Tensor, Fit]:
        """The scores and the fit of one victim, whose values count differently.

        Args:
            effect: what the defense does.
            compared: the comparison of this victim.
            rounds: what was seen of the victim.
            reading: what the update says, given the first fit.
            similar: the last fit of another victim; its penalty is a good guess.
        """
        table, asked = compared.table, compared.model.asked
        fit, model, previous = similar or compared.fits, None, torch.empty(0)
        for number in range(1, self.attack.passes + 1):
            values, weights = reading
            weights = torch.ones_like(values) if weights is None else weights
            targets = (values - table.shifts[0])[None]
            said = torch.cat([targets[0] * weights, weights])
            settled = torch.equal(said, previous)
            if model is None or not settled:
                gram = table.grams.under(weights)
                model, previous = _Model(table.grams.rows, self.share, gram, weights, asked), said
            if settled or number == self.attack.passes:
                break
            search = () if similar else COARSE
            fit = model.fit_near(targets, table.noise, fit, steps=search, final=False)
            reading = self._reading(effect, compared, model.sums(fit)[0], table.shifts[0], rounds)
        assert model is not None
        fit = model.fit_near(targets, table.noise, fit, steps=FINAL if similar else FINE)
        return model.scores(self.attack.form, targets, fit), fit

    def _reading(
        self, effect: Knowledge, compared: "_Compared", sums: Tensor, shift: Tensor, rounds: Sequence[Gradients]
    ) -> "_Reading":
        """What a victim's update says, given the sum of candidates that is fitted to it."""
        assert effect.read is not None
        expected = self._expected(compared.table.clients, compared.model.rows, sums, shift)
        evidence = [effect.read(e, u) for e, u in zip(expected, rounds, strict=True)]
        if all(each.weights is None for each in evidence):
            return self._row([each.values for each in evidence]), None
        completed = [_completed(*each) for each in zip(evidence, expected, strict=True)]
        return self._row([values for values, _ in completed]), self._row([weights for _, weights in completed])

    def _expected(self, clients: CandidateClients, rows: Tensor, sums: Tensor, shift: Tensor) -> list[Gradients]:
        """What the fit says that was sent in each round, before the defense's randomness."""
        coefficients = sums.to(rows)
        if self.chosen.all:
            return [self.chosen.update(part) for part in (coefficients @ rows + shift).chunk(len(self.tasks))]
        places = coefficients.abs().topk(min(_EXPECTED_FROM, len(rows))).indices
        total = clients.offset() or []
        for part in torch.split(places, chunk_size(self.tasks[0], len(self.tasks))):
            found = [
                {name: torch.tensordot(coefficients[part], value, 1) for name, value in sent.items()}
                for sent in clients.sent(part)
            ]
            total = [{n: a[n] + b[n] for n in a} for a, b in zip(total, found, strict=True)] if total else found
        return total

    def _updates(self, victim: int) -> list[Gradients]:
        return [{name: value[victim] for name, value in updates.items()} for _, updates in self.problem.rounds]

    def _row(self, rounds: Sequence[Gradients]) -> Tensor:
        return torch.cat([self.chosen.rows({n: v[None] for n, v in update.items()})[0] for update in rounds])

    def _half_way(self, rounds: Sequence[Gradients]) -> list[Task]:
        """The model in each round, half way from the weights that were sent to those that came back."""
        local = self.problem.threat.local
        assert local is not None
        return [
            task.with_parameters({n: value - local.lr / 2 * update[n] for n, value in task.parameters.items()})
            for task, update in zip(self.tasks, rounds, strict=True)
        ]

    def _clients(self, effect: Knowledge, tasks: Sequence[Task], rounds: Sequence[Gradients]) -> CandidateClients:
        """The clients to compare victims with, of which these updates were seen."""
        if effect.task:
            tasks = [effect.task(task, update) for task, update in zip(tasks, rounds, strict=True)]
        weight = total_weight(self.problem.threat.local, 1)
        return CandidateClients(tasks, self.candidates, effect.expect, effect.draw, rounds, weight)


_Reading = tuple[Tensor, Tensor | None]
"""The values of an update as far as it determines them, and how much each counts; None: all count alike."""


@dataclass(frozen=True, eq=False)
class _Table:
    """The updates of some victims and a table of gradients to compare them with.

    Args:
        clients: the table's clients.
        grams: the table's rows, and their inner products.
        targets: ``[victims, values]``, the updates.
        shifts: ``[victims, values]``, what is taken from them before they are fitted.
        noise: ``[victims]``, the known variance of their noise.
    """

    clients: CandidateClients
    grams: WeightedGrams
    targets: Tensor
    shifts: Tensor
    noise: Tensor

    def of(self, places: list[int]) -> "_Table":
        """The table for some of the victims."""
        return _Table(self.clients, self.grams, self.targets[places], self.shifts[places], self.noise[places])


@dataclass(frozen=True, eq=False)
class _Compared:
    """The updates of some victims, fitted.

    Args:
        table: what they are compared with.
        model: the updates as sums of the table's rows.
        fits: what they are fitted by.
    """

    table: _Table
    model: "_Model"
    fits: Fit

    def improved(self, tried: "_Compared", places: list[int]) -> tuple["_Compared", list[int]]:
        """The comparison with another one of some victims, where that makes the updates more likely; and where."""
        shifts = self.table.shifts.clone()
        better = (tried.fits.cost < self.fits.cost[places]).nonzero().flatten().tolist()
        chosen = [places[place] for place in better]
        shifts[chosen] = tried.table.shifts[better]
        fits = self.fits.with_those(chosen, tried.fits.of(better))
        return replace(self, table=replace(self.table, shifts=shifts), fits=fits), chosen

    def of(self, places: list[int]) -> "_Compared":
        """The comparison of some of the victims."""
        return _Compared(self.table.of(places), self.model, self.fits.of(places))


class _Model:
    """Updates as sums of rows.

    Args:
        rows: ``[candidates, values]``.
        share: the weight with which a member is part of the update.
        gram: ``[candidates, candidates]``, the inner products of the rows.
        weights: ``[values]``, how much each value counts; None: all count alike.
        asked: the places of the rows that may be in the sums; None: all.
    """

    def __init__(
        self, rows: Tensor, share: float, gram: Tensor, weights: Tensor | None = None, asked: Tensor | None = None
    ) -> None:
        self.rows, self.share, self.weights, self.asked = rows, share, weights, asked
        self.gram = gram if asked is None else gram[asked][:, asked]
        self.ridge = DualRidge(self.gram, rows.shape[1] if weights is None else int((weights > 0).sum()))

    def fit(self, targets: Tensor, noise: Tensor) -> Fit:
        """Fit updates ``[updates, values]`` with known variances of noise ``[updates]``."""
        return self.ridge.fit(*self._products(targets), share=self.share, least_noise=noise)

    def fit_near(self, targets: Tensor, noise: Tensor, fit: Fit, *, steps: Sequence[float], final: bool = True) -> Fit:
        """Fit one update that is similar to one that was fitted, see `DualRidge.near`."""
        products, squares = self._products(targets)
        return self.ridge.near(
            products, squares, fit.penalty, share=self.share, least_noise=noise, steps=steps, final=final
        )

    def _products(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        squares = targets.double().square()
        squares = (squares if self.weights is None else squares * self.weights).sum(1)
        return self._with_rows(targets), squares

    def _with_rows(self, targets: Tensor) -> Tensor:
        products = weighted_products(self.rows, targets, self.weights)
        return products if self.asked is None else products[:, self.asked]

    def _of_all(self, values: Tensor, others: float) -> Tensor:
        """Values of the rows that may be in the sums as values of all rows."""
        if self.asked is None:
            return values
        spread = values.new_full((len(values), len(self.rows)), others)
        spread[:, self.asked] = values
        return spread

    def sums(self, fit: Fit) -> Tensor:
        """The fitted updates as sums of candidates, ``[updates, candidates]``."""
        return self._of_all(fit.coefficients + fit.of_mean[:, None] / len(self.gram), 0.0)

    def scores(self, form: str, targets: Tensor, fit: Fit) -> Tensor:
        """The scores ``[updates, candidates]`` of one of the `FORMS`."""
        return self._of_all(self._scores(form, targets, fit), -math.inf)

    def _scores(self, form: str, targets: Tensor, fit: Fit) -> Tensor:
        if form == "ridge":
            return fit.ratios
        products, squares = self._with_rows(targets), self.gram.diagonal()
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


def _representatives(coefficients: Tensor, asked: Tensor | None) -> tuple[Tensor, Tensor]:
    """Candidates and weights whose sum of gradients stands for that of all candidates with these coefficients.

    Those with the largest coefficients have their own; some of the others share equally what remains.

    Args:
        coefficients: of all candidates.
        asked: the places of those that are not zero; None: all.
    """
    if asked is not None:
        places, weights = _representatives(coefficients[asked], None)
        return asked[places], weights
    order = coefficients.abs().argsort(descending=True)
    own, others = order[: _CHANGE_FROM // 2], order[_CHANGE_FROM // 2 :]
    some = others[:: max(1, len(others) // (_CHANGE_FROM // 2))]
    weights = coefficients[others].sum() / max(1, len(some))
    return torch.cat([own, some]), torch.cat([coefficients[own], weights.expand(len(some))])
