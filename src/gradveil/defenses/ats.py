"""ATS: train on images transformed by policies found in a search."""

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
POLICY_SEPARATOR = "|"
POINTS = 10
"""Number of points between noise and image at which `privacy_score` compares gradients."""


@DEFENSES.register("ats")
@dataclass(frozen=True, repr=False)
class ATS(Defense):
    r"""Automatic transformation search: share the gradients of transformed images.

    Every image goes through one of a few policies (drawn anew each round), each a sequence of image transforms (there
    are 45, of 15 kinds). Labels do not change. The gradient is the true gradient of the transformed image: **that**
    image is recovered as well as ever, and the protection is only that it may differ from the original.
    ``memory["trained_on"]`` holds the transformed images for audits.

    `prepare` runs the search: of `candidates` random policies of three transforms, the half with the better accuracy
    scores remains, and of these the `kept` policies with the lowest (best) privacy scores are used. Both scores are the
    paper's:

    .. math:: S_{pri}(T) = mean_{x, t} \cos(\nabla L(x_t), \nabla L(T x)), \quad x_t = (1 - t) noise + t\, T x, \quad
              S_{acc}(T) = - mean_n (\log(\sigma_n + \epsilon) + 1 / (\sigma_n + \epsilon))

    with t = 0, .1, ..., .9; the sigma are the eigenvalues of the correlation matrix of the input gradients of the
    summed logits of the transformed images. The search uses at most `samples` public images and the task's weights.

    After `prepare`, `policies` lists what was found; joined by ``|``, it can be stored and used again without a search:
    ``gradveil.defense("ats", policy=...)``.

    Corrections and choices: the paper prints S_acc without the minus sign, which makes larger scores better; its
    threshold is a number for one network and data set, ours is the median of the candidates; it scores privacy on a
    half-trained network, we use the task as given; its budget is 1,500 candidates. Under FedAvg the images are
    transformed once per round, before the local steps.

    Args:
        policy: ``"search"``, or policies separated by ``|``, such as ``rotate@15>invert>flip|equalize``.
        candidates: number of policies tried in a search.
        kept: number of policies used afterwards.
        samples: number of public images that a search uses.

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
    found: str | None = state()  # the policies that `prepare` found

    def check(self) -> None:
        """Refuse too few candidates (half of them remain, and `kept` of those are used) and unknown transforms."""
        checks.integer(self.name, "candidates", self.candidates, low=2 * self.kept)
        if self.policy != SEARCH:
            for policy in self.policy.split(POLICY_SEPARATOR):
                transforms.parse_policy(policy)

    @property
    def policies(self) -> list[str]:
        """The policies in use: those given as a parameter, or those that `prepare` found."""
        policies = self.found if self.policy == SEARCH else self.policy
        if policies is None:
            raise InputError(f"{self.name}: no policies have been found yet; call prepare(task, public=...) first")
        return policies.split(POLICY_SEPARATOR)

    def prepare(self, task: Task, *, public: Batch | None = None, generator: torch.Generator | None = None) -> Prepared:
        """Search for policies unless they are given; the task is not changed."""
        if self.policy != SEARCH:
            return Prepared(self, task)
        if public is None:
            raise InputError(f"{self.name}: the search needs public=(images, labels); pass it, or give policy=")
        images, labels = (part[: self.samples] for part in public)
        found = POLICY_SEPARATOR.join(self.search(task, images, labels, source_of(generator)))
        return Prepared(replace(self, found=found), task)

    def search(self, task: Task, images: Tensor, labels: Tensor, source: Source) -> list[str]:
        """The `kept` best of `candidates` random policies."""
        tried = random_policies(self.candidates, source)
        transformed = {policy: transforms.apply_policy(policy, images) for policy in tried}
        by_accuracy = sorted(tried, key=lambda policy: -accuracy_score(task, transformed[policy]))
        accurate = by_accuracy[: (len(tried) + 1) // 2]
        noise = source.uniform(images)
        return sorted(accurate, key=lambda policy: privacy_score(task, transformed[policy], labels, noise))[: self.kept]

    def make_update(self, client: ClientRound) -> Update:
        """The update of the transformed images."""
        client.task.check(client.inputs, client.targets)
        transformed = self.transformed(client.inputs, client.source)
        if client.memory is not None:
            client.memory["trained_on"] = transformed
        return replace(client, inputs=transformed).update()

    def adapt(self, task: Task, *, batch_size: int = 1, local: LocalSteps | None = None) -> Mapping[str, Knowledge]:
        """The policies are public: undo, for each recovered image, the policy that explains it best."""

        def undo(images: Tensor) -> Tensor:
            return torch.stack([self._undo_best_policy(image) for image in images])

        return {"invert": Knowledge("inverts the policy that explains the image found best", after=undo)}

    def _undo_best_policy(self, image: Tensor) -> Tensor:
        """The original under the policy for which undoing and applying it again comes closest to `image`.

        Means of 2 x 2 pixels are compared: where a policy rounds, an inexact image jumps, and that averages out.
        """
        originals = [transforms.undo_policy(policy, image[None]) for policy in self.policies]
        misfits = [
            float(F.avg_pool2d(transforms.apply_policy(policy, original) - image.clamp(0, 1), 2).square().mean())
            for policy, original in zip(self.policies, originals, strict=True)
        ]
        return originals[misfits.index(min(misfits))][0]

    def transformed(self, inputs: Tensor, source: Source) -> Tensor:
        """Each image after a policy drawn for it."""
        policies = self.policies
        drawn = source.integers(len(policies), len(inputs))
        return torch.cat(
            [transforms.apply_policy(policies[index], image[None]) for index, image in zip(drawn, inputs, strict=True)]
        )


def random_policies(count: int, source: Source, *, length: int = 3) -> list[str]:
    """Random policies of `length` transforms, no two the same."""
    names = transforms.names()
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[transforms.SEPARATOR.join(names[index] for index in source.integers(len(names), length))] = None
    return list(drawn)


@torch.no_grad()
def privacy_score(task: Task, images: Tensor, labels: Tensor, noise: Tensor) -> float:
    """Mean cosine of an image's gradient with those of points between noise and the image; lower is more private."""
    parameters = task.parameters
    steps = torch.arange(POINTS, dtype=images.dtype, device=images.device) / POINTS

    def gradient(image: Tensor, label: Tensor) -> Gradients:
        return task.gradient(parameters, image[None], label[None])

    total = 0.0
    for image, label, start in zip(images, labels, noise, strict=True):
        points = torch.stack([*(start + step * (image - start) for step in steps), image])
        gradients = vmap(gradient, in_dims=(0, None), randomness="error")(points, label)
        vectors = torch.cat([value.flatten(1) for value in gradients.values()], dim=1)
        total += float(torch.cosine_similarity(vectors[:-1], vectors[-1:]).mean())
    return total / len(images)


def accuracy_score(task: Task, images: Tensor, *, epsilon: float = 1e-5) -> float:
    """How differently the untrained model sees the images (Mellor et al.); higher is better, and -1 is the most."""
    parameters = task.parameters
    leaf = images.detach().clone().requires_grad_()
    with torch.enable_grad():
        [slopes] = torch.autograd.grad(task.outputs(parameters, leaf).sum(), leaf)
    correlations = torch.corrcoef(slopes.flatten(1).double()).nan_to_num()
    eigenvalues = torch.linalg.eigvalsh(correlations).clamp_min(0) + epsilon
    return -float((eigenvalues.log() + 1 / eigenvalues).mean())
