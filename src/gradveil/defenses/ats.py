"""ATS: train on images transformed by policies that were searched for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.core.parameters import integer, state, text
from gradveil.core.randomness import Source, source_of
from gradveil.defenses import _transforms as transforms
from gradveil.defenses.base import DEFENSES, Batch, Defense, Prepared
from gradveil.defenses.knowledge import Knowledge
from gradveil.task import Gradients, Task
from gradveil.update import ClientRound, LocalSteps, Update

SEARCH = "search"
JOINT = "|"
POINTS = 10
"""Places between noise and image at which `privacy_score` compares gradients."""


@DEFENSES.register("ats")
@dataclass(frozen=True, repr=False)
class ATS(Defense):
    r"""Automatic transformation search: share the gradients of transformed images.

    Every image goes through one of a few policies (drawn anew each round), each a sequence of image transforms
    (45 of them in 15 kinds). Labels stay. The gradient is an honest one, of the transformed image: **that** image
    is recovered as well as ever; what is protected is its likeness to the original.
    ``memory["trained_on"]`` holds it for audits.

    `prepare` searches: of `candidates` random policies of three transforms, the half with the better accuracy score
    stays, and of these the `kept` with the lowest (best) privacy score are used. Both scores are the paper's:

    .. math:: S_{pri}(T) = mean_{x, t} \cos(\nabla L(x_t), \nabla L(T x)), \quad x_t = (1 - t) noise + t\, T x, \quad
              S_{acc}(T) = - mean_n (\log(\sigma_n + \epsilon) + 1 / (\sigma_n + \epsilon))

    with t = 0, .1, ..., .9, and sigma the eigenvalues of the correlation matrix of the input gradients of the summed
    logits of the transformed images. The search uses at most `samples` public images and the weights the task has.

    What was found is the text `policy` of the defense after `prepare`; ``gradveil.defense("ats", policy=text)`` uses it
    again without a search, and a client or a file can hold it.

    Corrections and choices: the paper prints S_acc without the minus sign, with which larger is better; its threshold
    is a number for one network and data set, ours the median of the candidates; it scores privacy on a half-trained
    network, we on the task as given; its budget is 1,500 candidates. Under FedAvg the images are transformed once a
    round, before the local steps.

    Args:
        policy: ``"search"``, or policies separated by ``|``, such as ``rotate@15>invert>flip|equalize``.
        candidates: policies tried in a search.
        kept: policies used afterwards.
        samples: public images a search uses.

    References:
        Gao et al., Privacy-preserving Collaborative Learning with Automatic Transformation Search, CVPR 2021.

    Example:
        >>> import gradveil
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> task, memory = gradveil.Task(model, input_shape=(1, 2, 2), classes=3), {}
        >>> update = ATS(policy="invert").share(task, torch.zeros(1, 1, 2, 2), torch.tensor([1]), memory=memory)
        >>> memory["trained_on"].flatten().tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    paper = "Gao et al., CVPR 2021"
    has_adaptive_attacker = True
    needs_preparing = True

    policy: str = text(SEARCH)
    candidates: int = integer(30, low=2)
    kept: int = integer(3, low=1)
    samples: int = integer(16, low=2)
    found: str | None = state()  # the policies, once searched for

    def check(self) -> None:
        """Half of the candidates are kept for their accuracy, and `kept` of those."""
        checks.integer(self.name, "candidates", self.candidates, low=2 * self.kept)
        if self.policy != SEARCH:
            for policy in self.policy.split(JOINT):
                transforms.parse_policy(policy)

    @property
    def policies(self) -> list[str]:
        """The policies in use: those given, or those that `prepare` found."""
        policies = self.found if self.policy == SEARCH else self.policy
        if policies is None:
            raise InputError(f"{self.name}: no policy was searched for yet; call prepare(task, public=...) first")
        return policies.split(JOINT)

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Prepared:
        """Search for policies unless they are given; the task stays as it is."""
        if self.policy != SEARCH:
            return Prepared(self, task)
        if public is None:
            raise InputError(f"{self.name}: the search needs public=(images, labels), or give policy=")
        images, labels = (part[: self.samples] for part in public)
        found = JOINT.join(self.search(task, images, labels, source_of(generator)))
        return Prepared(replace(self, found=found), task)

    def search(self, task: Task, images: Tensor, labels: Tensor, source: Source) -> list[str]:
        """The `kept` best of `candidates` random policies."""
        tried = random_policies(self.candidates, source)
        changed = {policy: transforms.apply_policy(policy, images) for policy in tried}
        accurate = sorted(tried, key=lambda policy: -accuracy_score(task, changed[policy]))[: (len(tried) + 1) // 2]
        noise = source.uniform(images)
        return sorted(accurate, key=lambda policy: privacy_score(task, changed[policy], labels, noise))[: self.kept]

    def make_update(self, client: ClientRound) -> Update:
        """The update of the transformed images."""
        client.task.check(client.inputs, client.targets)
        used = self.transformed(client.inputs, client.source)
        if client.memory is not None:
            client.memory["trained_on"] = used
        return replace(client, inputs=used).update()

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """The policies are known: each image found is taken back through the one that explains it best."""

        def undo(images: Tensor) -> Tensor:
            return torch.stack([self._undone(image) for image in images])

        return {"invert": Knowledge("inverts the policy that explains the image found best", after=undo)}

    def _undone(self, image: Tensor) -> Tensor:
        """What the image was before, under the policy that turns it into the same image again most exactly.

        Compared are means of 2 x 2 pixels: where a policy rounds, an inexact image jumps, and that averages out.
        """
        origins = [transforms.undo_policy(policy, image[None]) for policy in self.policies]
        misfits = [
            float(F.avg_pool2d(transforms.apply_policy(policy, origin) - image.clamp(0, 1), 2).square().mean())
            for policy, origin in zip(self.policies, origins, strict=True)
        ]
        return origins[misfits.index(min(misfits))][0]

    def transformed(self, inputs: Tensor, source: Source) -> Tensor:
        """Each image after a policy drawn for it."""
        policies = self.policies
        drawn = source.integers(len(policies), len(inputs))
        return torch.cat(
            [transforms.apply_policy(policies[place], image[None]) for place, image in zip(drawn, inputs, strict=True)]
        )


def random_policies(count: int, source: Source, *, length: int = 3) -> list[str]:
    """Different random policies of `length` transforms."""
    known = transforms.names()
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[transforms.SEPARATOR.join(known[place] for place in source.integers(len(known), length))] = None
    return list(drawn)


@torch.no_grad()
def privacy_score(task: Task, images: Tensor, labels: Tensor, noise: Tensor) -> float:
    """Mean cosine of the images' gradients with those on the way to them from noise; the lower, the more private."""
    parameters = task.parameters
    steps = torch.arange(POINTS, dtype=images.dtype, device=images.device) / POINTS

    def gradient(image: Tensor, label: Tensor) -> Gradients:
        return task.gradient(parameters, image[None], label[None])

    total = 0.0
    for image, label, start in zip(images, labels, noise, strict=True):
        way = torch.stack([*(start + step * (image - start) for step in steps), image])
        found = vmap(gradient, in_dims=(0, None), randomness="error")(way, label)
        vectors = torch.cat([value.flatten(1) for value in found.values()], dim=1)
        total += float(torch.cosine_similarity(vectors[:-1], vectors[-1:]).mean())
    return total / len(images)


def accuracy_score(task: Task, images: Tensor, *, epsilon: float = 1e-5) -> float:
    """How differently the untrained model sees the images (Mellor et al.); the higher, the better, at most -1."""
    parameters = task.parameters
    watched = images.detach().clone().requires_grad_()
    with torch.enable_grad():
        [slopes] = torch.autograd.grad(task.outputs(parameters, watched).sum(), watched)
    correlations = torch.corrcoef(slopes.flatten(1).double()).nan_to_num()
    eigenvalues = torch.linalg.eigvalsh(correlations).clamp_min(0) + epsilon
    return -float((eigenvalues.log() + 1 / eigenvalues).mean())
