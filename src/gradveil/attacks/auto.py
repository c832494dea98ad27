"""Auto: one attack that needs no tuning. It tries a portfolio on clients of its own and uses what worked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor

from gradveil.attacks._learned import Learning, packed, unpacked
from gradveil.attacks._portfolio import (
    CLIENTS,
    PORTFOLIO,
    Calibration,
    Member,
    Price,
    Trial,
    as_seen_by,
    best_policy,
    distances,
    from_spec,
    second_opinions,
)
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Reconstruction
from gradveil.attacks.problem import Observed, Problem, Progress
from gradveil.attacks.threat import ThreatModel
from gradveil.core.errors import GradveilError, ThreatModelError
from gradveil.core.parameters import has_all_state, number, state
from gradveil.core.randomness import fresh_generator
from gradveil.core.tensors import Tensors
from gradveil.metrics import METRICS
from gradveil.task import Task
from gradveil.update import Rounds

LEAST_TRIED = 20
"""Iterations that a search is given at least when it is tried, whatever they cost: fewer tell nothing."""
LEAST = 100
"""The same when it attacks."""
SURPRISING = 5
"""How many times larger a victim's distance may be than any simulated client's before the next member is tried too."""
EXACT = 1e-4
"""Distance below which a closed form explains an update; if it does so for every client, nothing else is tried."""
LEARNING = 8
"""An attack that learns may take as long as attacking so many victims; else it learns from less, or is left out."""


@ATTACKS.register("auto")
@dataclass(frozen=True, repr=False)
class Auto(Attack):
    r"""Try every attack that fits on simulated clients, then attack with what worked best there.

    The attacker simulates a few clients with public data (without any, with random inputs of the modality): undefended
    if it does not know the defense, else defended. As it knows what these clients hold, it can see which attacks of a
    portfolio work on this model, at these weights, with batches and local steps like these, and against this defense:
    closed forms, gradient matching by L-BFGS and by Adam with weak and strong priors, and learning. A policy is one
    member, or two between which each victim's own distance decides,

    .. math:: d(x) = |u - \nabla L(x)| \, / \, |u|,

    the relative distance between what was seen of the victim and what a client with the examples found would have sent.
    The policy with the best median over the simulated clients attacks the victims. What the victims really hold is
    never used. A member that cannot handle the task or the threat model is left out, one that refuses an update is
    replaced by the next best, and if a victim's distance is five times larger than any simulated client's, as it is for
    an attacker who does not know that there is a defense, the next best member is tried as well, unless deciding by the
    distance made it worse on the simulated clients (a search comes nearer to an update than learning does, whatever it
    finds).

    The budget is counted, not timed (see `gradveil.core.work.nominal_seconds`), so that the same call finds the same on
    every machine, however busy. Trying the portfolio costs as much as attacking four victims. If what leads then is no
    search, the best search is tried again with all the iterations that it would attack with, at the same cost. No
    search is cut to fewer than 100 iterations, 20 while it is tried, so on large networks it takes longer than the
    budget says.

    Args:
        seconds: nominal seconds of one core for each victim.

    References:
        Croce and Hein, Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
        attacks, ICML 2020, for the idea.

    Example:
        >>> import gradveil
        >>> from gradveil import metrics, models
        >>> model = models.create("mlp", input_shape=(1, 4, 4), classes=3)
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> image, label = torch.rand(1, 1, 4, 4, generator=torch.manual_seed(1)), torch.tensor([2])
        >>> update = gradveil.defense("none").share(task, image, label)
        >>> attack = Auto(seconds=0.01).fit(task, ThreatModel(), generator=torch.manual_seed(0))
        >>> found = attack.reconstruct(task, update, ThreatModel(), generator=torch.manual_seed(0))
        >>> bool(metrics.psnr(image, found.inputs[0].clamp(0, 1)) > 40), attack.chosen["members"] == [found.found_by[0]]
        (True, True)
    """

    paper = "ours; after Croce & Hein, ICML 2020"

    adapts = True
    finds_labels = True  # each member finds them in its own way
    simulates = True  # each member gets raw updates and looks up what it may know itself
    uses_public = True

    seconds: float = number(5.0, above=0)
    chosen: Mapping[str, Any] | None = state()
    learned: Tensors | None = state()

    def budgeted(self, victims: int) -> tuple[float, float]:
        """As `Attack.budgeted`: all searches together are tried for as long as the simulated clients may take."""
        return (CLIENTS + LEARNING) * self.seconds, victims * self.seconds

    def check_threat(self, task: Task, threat: ThreatModel) -> None:
        """Refuse what no member can attack, with their reasons."""
        super().check_threat(task, threat)
        reasons = []
        for attack in (member.attack() for member in PORTFOLIO):
            try:
                attack.check_threat(task, as_seen_by(attack, threat))
            except GradveilError as error:
                reasons.append(str(error))
            else:
                return
        raise ThreatModelError(f"{self.name}: no attack of its portfolio applies here: {'; '.join(reasons)}")

    def reconstruct(
        self,
        task: Task,
        updates: Observed,
        threat: ThreatModel,
        *,
        generator: torch.Generator | None = None,
        progress: Progress = None,
        execution: str = "auto",
    ) -> Reconstruction:
        """As `Attack.reconstruct`; if it was not fitted, it first is."""
        generator = generator or fresh_generator(task.device)
        fitted = self if has_all_state(self) else self.fit(task, threat, generator=generator, progress=progress)
        return Attack.reconstruct(
            fitted, task, updates, threat, generator=generator, progress=progress, execution=execution
        )

    def learn(self, task: Task, threat: ThreatModel, learning: Learning) -> Self:
        """Simulate clients, try every member of the portfolio on them, and choose."""
        calibration = Calibration.of(task, threat, learning)
        refused: dict[str, str] = {}
        trials = self._trials(calibration, learning, refused)
        if not trials:
            raise ThreatModelError(f"{self.name}: every attack of its portfolio refused: {'; '.join(refused.values())}")
        noticeable = METRICS.get(task.modality.primary).noticeable
        policy = best_policy(trials, noticeable)
        others = sorted((trial for trial in trials if trial not in policy), key=lambda trial: -trial.median)
        opinions = second_opinions(policy, others, noticeable)
        ranked = policy + others
        armed = [self._armed(trial, len(policy) if trial in policy else 1) for trial in ranked]
        tensors: dict[str, Tensor] = {}
        about = {}
        for attack in armed:
            values, about[str(attack)] = packed(attack)
            tensors |= {f"{attack}/{name}": value for name, value in values.items()}
        chosen = {
            "members": [str(attack) for attack in armed[: len(policy)]],
            "substitutes": [str(attack) for attack in armed[len(policy) :]],
            "second opinions": [str(attack) for trial, attack in zip(ranked, armed, strict=True) if trial in opinions],
            "learned": about,
            "expected": max(distance for trial in policy for distance in trial.distances),
            "closeness": {trial.member.spec: list(trial.closeness) for trial in trials},
            "refused": refused,
        }
        return replace(self, chosen=chosen, learned=Tensors(tensors))

    def _trials(self, calibration: Calibration, learning: Learning, refused: dict[str, str]) -> list[Trial]:
        """Try every member; those that refuse are noted with their reasons."""
        trials: list[Trial] = []
        prices: dict[Member, Price] = {}
        for member in PORTFOLIO:
            if member.unless in {better.spec for better in prices}:
                continue
            try:
                prices[member] = calibration.price(member)
                if member.is_closed_form:
                    trials.append(calibration.trial(member, prices[member], member.attack(), 0.0, None))
            except GradveilError as error:
                refused[member.spec] = str(error)
                prices.pop(member, None)
            if trials and max(trials[-1].distances) < EXACT:
                return trials[-1:]
        share = self.seconds / max(1, len(prices) - len(trials))
        rest = [member for member in prices if not member.is_closed_form]
        costs = [LEARNING * self.seconds if one.attack().needs_public else CLIENTS * share for one in rest]
        for place, member in enumerate(rest):
            attack = member.within(share, prices[member], LEAST_TRIED)
            part = _part(learning.progress, sum(costs[:place]) / sum(costs), costs[place] / sum(costs))
            try:
                trials.append(calibration.trial(member, prices[member], attack, LEARNING * self.seconds, part))
            except GradveilError as error:
                refused[member.spec] = str(error)
        return self._with_a_fair_search(trials, calibration, refused)

    def _with_a_fair_search(
        self, trials: list[Trial], calibration: Calibration, refused: dict[str, str]
    ) -> list[Trial]:
        """Try the best search again as it would attack, if what leads was not cut short as all searches were."""
        searches = [trial for trial in trials if trial.member.steps is not None]
        if not searches or max(trials, key=lambda trial: trial.median) in searches:
            return trials
        best = max(searches, key=lambda trial: trial.median)
        attack = self._armed(best, sharing=1)
        if attack == best.attack:
            return trials
        try:
            again = calibration.trial(best.member, best.price, attack, 0.0, None)
        except GradveilError as error:
            refused[best.member.spec] = str(error)
            return [trial for trial in trials if trial is not best]
        return [again if trial is best else trial for trial in trials]

    def _armed(self, trial: Trial, sharing: int) -> Attack:
        """A member with all the iterations that the budget allows if `sharing` members share it."""
        if trial.attack.needs_public:
            return trial.attack
        return trial.member.within(self.seconds / sharing, trial.price, LEAST)

    def run(self, problem: Problem) -> Reconstruction:
        """Attack with the members of the policy, and keep for each victim what is nearest to its update."""
        assert self.chosen is not None
        wanted, substitutes = list(self.chosen["members"]), list(self.chosen["substitutes"])
        opinions = list(self.chosen["second opinions"])
        parts = len(wanted)
        found: list[_Attempt] = []
        while wanted:
            spec = wanted.pop(0)
            try:
                result = self._attack_with(
                    spec, problem, _part(problem.progress, min(len(found), parts - 1) / parts, 1 / parts)
                )
            except GradveilError:
                if substitutes:
                    wanted.append(substitutes.pop(0))
                elif not found:
                    raise
                continue
            found.append(_Attempt(spec, result, distances(problem.task, problem.updates, result, problem.threat)))
            nearest = _nearest(found)
            surprised = bool((nearest.loss > SURPRISING * max(self.chosen["expected"], EXACT)).any())
            asked = [one for one in opinions if one not in {attempt.spec for attempt in found}]
            if surprised and not wanted and asked and len(found) == parts:
                wanted.append(asked[0])
        return nearest

    def _attack_with(self, spec: str, problem: Problem, progress: Progress) -> Reconstruction:
        assert self.chosen is not None
        assert self.learned is not None
        attack = from_spec(spec)
        own = f"{spec}/"
        mine = {name.removeprefix(own): value for name, value in self.learned.items() if name.startswith(own)}
        attack = unpacked(attack, mine, self.chosen["learned"][spec], problem.task.device)
        threat = as_seen_by(attack, problem.threat)
        rounds = problem.rounds if threat.rounds > 1 else problem.rounds[:1]
        observed = [
            Rounds([(task, {name: value[victim] for name, value in updates.items()}) for task, updates in rounds])
            for victim in range(problem.victims)
        ]
        return attack.reconstruct(
            problem.task, observed, threat, generator=problem.generator, progress=progress, execution=problem.execution
        )


@dataclass(frozen=True, eq=False)
class _Attempt:
    """What a member found, and how far that is from each victim's update."""

    spec: str
    found: Reconstruction
    distances: Tensor


def _nearest(attempts: list[_Attempt]) -> Reconstruction:
    """For each victim, the reconstruction whose update is nearest to what was seen."""
    losses, best = torch.stack([attempt.distances for attempt in attempts]).min(0)
    taken = [attempts[number] for number in best.tolist()]

    def of_best(name: str) -> Tensor:
        return torch.stack([getattr(attempt.found, name)[victim] for victim, attempt in enumerate(taken)])

    return Reconstruction(
        inputs=of_best("inputs"),
        labels=of_best("labels"),
        loss=losses,
        iterations=of_best("iterations"),
        history=attempts[0].found.history if len(attempts) == 1 else None,
        execution=attempts[0].found.execution,
        interrupted=any(attempt.found.interrupted for attempt in attempts),
        found_by=tuple(attempt.spec for attempt in taken),
    )


def _part(progress: Progress, before: float, share: float) -> Progress:
    """Reports the progress of a part as that of the whole, of which it is a `share`, after `before` has been done."""
    if progress is None:
        return None
    report, began = progress, perf_counter()

    def note(step: int, steps: int, left: float) -> None:
        whole = (perf_counter() - began + left) / share
        report(round(1000 * (before + share * step / steps)), 1000, left + whole * max(0.0, 1 - before - share))

    return note
