"""Membership: was this example in the data that a client trained on?"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from gradveil.attacks._simulation import Steps
from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.findings import Membership
from gradveil.attacks.identification import CandidateIdentification
from gradveil.attacks.problem import Problem, known_members
from gradveil.core.parameters import choice, flag, integer
from gradveil.defenses.base import Batch
from gradveil.models.vectors import fit_logistic
from gradveil.task.sensitivity import chunk_size

FORMS = ("ratio", "learned", "cosine", "loss")

_PENALTY = 1e-3
"""Weight of the squared weights of the learned score; it has four weights, so this only keeps them finite."""


@ATTACKS.register("membership")
@dataclass(frozen=True, repr=False)
class MembershipInference(Attack):
    r"""Say whether an example was in the data that a client trained on, from all rounds that were seen of the client.

    .. math::
        s_{loss}(x) = -L(x; w_T), \qquad
        s_{cosine}(x) = \frac1T \sum_t \frac{\langle g_t(x), u_t \rangle}{|g_t(x)| |u_t|}, \qquad
        s_{ratio}(x) = \sum_t \log \frac{1 + e^{\ell_t(x)}}{2}

    ``form=loss`` looks at the weights of the last observed round only: examples that were trained on have a lower loss.
    It says that an example was in the training, not whose it was, and no defense of single updates changes it directly.
    ``form=cosine`` is the cosine of the example's gradient with the update, both without their parts along the
    candidates' mean, averaged over the rounds. ``form=ratio`` adds up the likelihood ratios :math:`\ell_t` of
    `identification`'s ridge regression, round by round; a client may draw other examples for every round, so in each
    round a member counts as part of the batch with probability 1/2. ``form=learned`` is a logistic regression on the
    normal scores of these three and of how far the loss fell from the first round to the last; it is fitted to examples
    whose membership the attacker knows (``ThreatModel(known_members=...)``), those of all victims together.

    An adaptive attacker uses the defense's `Knowledge` as `identification` does: candidates are clipped as the client
    clips, only what arrived is compared, known noise counts; a defense that declares nothing about gradients is run on
    each candidate (`simulate`). Each round is read by itself: what error feedback holds back from earlier rounds counts
    as noise. Candidates, and known members, are also the rows that say what the rest of a batch looks like.

    It costs a gradient per candidate and round, twice that for ``form=learned``.

    Args:
        form: ``"ratio"``, ``"learned"``, ``"cosine"`` or ``"loss"``.
        coordinates: the most values of an update that are compared; of larger models, a random subset.
        simulate: whether an adaptive attacker runs the defense on each candidate if that is all it can do.

    References:
        Loss: Yeom et al., Privacy Risk in Machine Learning, CSF 2018. Gradients over rounds: Nasr, Shokri and
        Houmansadr, Comprehensive Privacy Analysis of Deep Learning, S&P 2019. Cosine: Li, Li and Ribeiro, Effective
        Passive Membership Inference Attacks in Federated Learning, 2022. Ratios over rounds are ours.

    Example:
        >>> import gradveil
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
        >>> images = torch.rand(12, 1, 4, 4, generator=torch.manual_seed(0))
        >>> labels, members = torch.arange(12) % 3, torch.tensor([2, 7, 9, 10])
        >>> seen = []
        >>> for batch in (members[:2], members[2:]):  # another half of the client's data in every round
        ...     update = gradveil.defense("none").share(task, images[batch], labels[batch])
        ...     seen.append((task, update))
        >>> attack, threat = MembershipInference(), gradveil.ThreatModel(batch_size=2, rounds=2)
        >>> found = attack.find_members(task, gradveil.Rounds(seen), (images, labels), threat)
        >>> sorted(found.scores[0].topk(4).indices.tolist())
        [2, 7, 9, 10]
    """

    paper = "ours; Nasr et al., S&P 2019"
    adapts = True
    finds_labels = True
    finds = Membership

    form: str = choice("ratio", FORMS)
    coordinates: int = integer(100_000, low=1)
    simulate: bool = flag(True)

    @torch.no_grad()
    def run(self, problem: Problem) -> Membership:
        """Score every candidate for every victim."""
        assert problem.candidates is not None
        count = len(problem.candidates[0])
        if self.form != "learned":
            return Membership(self._scores([self.form], problem)[0])
        inputs, labels, members = known_members(self.name, problem.task, problem.threat, problem.victims)
        everyone = torch.cat([problem.candidates[0], inputs]), torch.cat([problem.candidates[1], labels])
        scores = self._scores(["loss", "fall", "cosine", "ratio"], replace(problem, candidates=everyone))
        features = torch.stack([torch.stack([normal_scores(row) for row in each]) for each in scores], -1)
        targets = functional.one_hot(members.long().flatten(), 2).double()
        # Members and others count alike, however few members are known.
        learned = fit_logistic(*_balanced(features[:, count:].flatten(0, 1), targets), penalty=_PENALTY)
        logits = learned(features[:, :count].flatten(0, 1)).view(problem.victims, count, 2)
        return Membership(logits[..., 1] - logits[..., 0])

    def _scores(self, forms: list[str], problem: Problem) -> list[Tensor]:
        """The scores ``[victims, candidates]`` of each form, in double precision."""
        compared = [form for form in forms if form in ("cosine", "ratio")]
        steps = Steps(problem.progress, max(1, len(compared) * len(problem.rounds)))
        found = {form: self._compared(form, problem, steps) for form in compared}
        if set(forms) & {"loss", "fall"}:
            assert problem.candidates is not None
            losses = losses_by_round(problem, problem.candidates)
            found["loss"] = -losses[-1].expand(problem.victims, -1)
            found["fall"] = (losses[0] - losses[-1]).expand(problem.victims, -1)
        steps.finish()
        return [found[form] for form in forms]

    def _compared(self, form: str, problem: Problem, steps: Steps) -> Tensor:
        """The mean cosines with the updates, or the sums of the log ratios, over the rounds."""
        name = "ridge" if form == "ratio" else "matched-filter"
        compare = CandidateIdentification(form=name, coordinates=self.coordinates, simulate=self.simulate)
        total: Tensor | None = None
        for task, updates in problem.rounds:
            scores = compare.run(replace(problem, rounds=[(task, updates)], progress=None)).scores.double()
            if form == "ratio":
                part = functional.softplus(scores) - torch.tensor(2.0).log()
            else:
                squares = torch.stack([value.flatten(1).double().square().sum(1) for value in updates.values()])
                lengths = squares.sum(0).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
                part = scores / lengths[:, None] / len(problem.rounds)
            total = part if total is None else total + part
            steps.add(1)
        assert total is not None
        return total


def losses_by_round(problem: Problem, examples: Batch) -> Tensor:
    """The loss of each example at the weights of each round, ``[rounds, examples]``, in double precision."""
    inputs, labels = examples
    rounds = []
    for task, _ in problem.rounds:
        parameters = task.parameters
        parts = []
        for places in torch.split(torch.arange(len(inputs), device=inputs.device), chunk_size(task, 1)):
            batch = inputs[places], labels[places]
            parts.append(vmap(lambda x, y, t=task, p=parameters: t.loss(p, x[None], y[None]))(*batch))
        rounds.append(torch.cat(parts).double())
    return torch.stack(rounds)


def normal_scores(values: Tensor) -> Tensor:
    """The values replaced by normal quantiles of their ranks; equal values share their mean rank.

    >>> normal_scores(torch.tensor([5.0, 1.0, 900.0]))
    tensor([ 0.0000, -0.9674,  0.9674], dtype=torch.float64)
    """
    _, distinct, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2
    quantiles: Tensor = torch.special.ndtri((ranks[distinct] - 0.5) / len(values))
    return quantiles


def _balanced(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As many rows of either class: those of the smaller one are repeated, as often as that is possible."""
    kinds = targets.argmax(1)
    counts = kinds.bincount(minlength=2)
    repeats = (counts.max() // counts)[kinds]
    return features.repeat_interleave(repeats, 0), targets.repeat_interleave(repeats, 0)
