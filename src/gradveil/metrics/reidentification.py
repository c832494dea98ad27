"""Re-identification: whether a face recognition network finds the person that a reconstructed face shows."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.core.extras import OptionalModule
from gradveil.metrics.images import check_images, check_pair

stats = OptionalModule("scipy.stats", "a confidence interval")  # takes a second to import

LEVEL = 0.95


@dataclass(frozen=True, eq=False)
class Gallery:
    """Photographs of known people, in which the person of a reconstructed face is looked up.

    Args:
        images: float images [N, C, H, W] in [0, 1].
        people: who each of them shows, as whole numbers [N].

    Example:
        >>> Gallery(torch.rand(6, 1, 8, 8), torch.tensor([0, 0, 0, 7, 7, 7])).chance
        0.5
    """

    images: Tensor
    people: Tensor

    def __post_init__(self) -> None:
        check_images("gallery", "images", self.images)
        if self.people.shape != self.images.shape[:1] or not len(self.people):
            raise InputError(
                f"gallery: people must be one number per image, at least one, got {list(self.people.shape)} for "
                f"{len(self.images)} images"
            )

    @property
    def chance(self) -> float:
        """How often a person who is drawn at random is the right one."""
        return 1 / len(torch.unique(self.people))


@dataclass(frozen=True)
class Reidentification:
    """Whose face the reconstructions show, by their nearest photographs in a gallery.

    Args:
        right: of each face, whether its nearest photograph shows the right person.
        distances: of each face, the distance to the nearest photograph of the right person.
        low: the lower end of the Clopper-Pearson interval of the share of right ones.
        high: its upper end.
        chance: the share expected if nothing is known.

    Example:
        >>> Reidentification((True, False, True, True), (0.2, 0.9, 0.3, 0.4), low=0.19, high=0.99, chance=0.025).rate
        0.75
    """

    right: tuple[bool, ...]
    distances: tuple[float, ...]
    low: float
    high: float
    chance: float

    @property
    def rate(self) -> float:
        """The share of faces that are re-identified."""
        return fmean(self.right)

    @property
    def mean_distance(self) -> float:
        """The mean distance to the right person."""
        return fmean(self.distances)


def reidentification_rate(
    originals: Tensor,
    found: Tensor,
    people: Tensor,
    gallery: Gallery,
    embed: Callable[[Tensor], Tensor],
    *,
    level: float = LEVEL,
) -> Reidentification:
    """How many reconstructed faces are nearest to a photograph of the right person.

    The gallery holds other photographs of the same people, never an original: a reconstruction that resembles the
    original is to resemble the person. The rate judges the picture alone; whether the label gives the person away is
    another question, and if the classes of the task are people, it does.

    Args:
        originals: float images [N, C, H, W] in [0, 1]; a gallery that holds one of them is refused.
        found: their reconstructions, of the same shape and range.
        people: who the originals show, as whole numbers [N]; all of them must be in the gallery.
        gallery: the photographs of known people.
        embed: turns images into vectors whose Euclidean distances say who is who, such as
            `gradveil.models.face_embedding.load().embed`.
        level: the probability with which the interval should hold the true rate.

    References:
        Clopper & Pearson, The use of confidence or fiducial limits illustrated in the case of the binomial, 1934.

    Example:
        With the mean brightness as a made-up embedding, the second face is taken for the wrong person:

        >>> def faces(*brightness):
        ...     return torch.tensor(brightness).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
        >>> gallery = Gallery(faces(0.1, 0.2, 0.8), torch.tensor([0, 0, 1]))
        >>> result = reidentification_rate(
        ...     faces(0.15, 0.25), faces(0.22, 0.7), torch.tensor([0, 0]), gallery, lambda images: images.mean((2, 3))
        ... )
        >>> result.right, round(result.mean_distance, 2), (round(result.low, 2), round(result.high, 2)), result.chance
        ((True, False), 0.26, (0.01, 0.99), 0.5)
    """
    owner = "reidentification_rate"
    level = checks.number(owner, "level", level, above=0, below=1)
    check_pair(owner, originals, found)
    if people.shape != originals.shape[:1] or not len(people):
        raise InputError(f"{owner}: people must be one number per face, at least one, got {list(people.shape)}")
    if originals.shape[1:] == gallery.images.shape[1:]:
        for number, original in enumerate(originals):
            if (gallery.images == original).flatten(1).all(1).any():
                raise InputError(
                    f"{owner}: the gallery must hold other photographs than the originals, got original {number}; "
                    "take it out"
                )
    same = people[:, None] == gallery.people
    if not same.any(1).all():
        stranger = people[~same.any(1)][0]
        raise InputError(f"{owner}: the gallery must show every person, got no photograph of {stranger}; add some")
    distances = torch.cdist(embed(found).double(), embed(gallery.images).double())
    right = same.gather(1, distances.argmin(1, keepdim=True))[:, 0].tolist()
    own = distances.masked_fill(~same, torch.inf).amin(1).tolist()
    return Reidentification(tuple(right), tuple(own), *_interval(sum(right), len(right), level), gallery.chance)


def _interval(found: int, trials: int, level: float) -> tuple[float, float]:
    """The Clopper-Pearson interval of a share."""
    outside = (1 - level) / 2
    low = float(stats.beta.ppf(outside, found, trials - found + 1)) if found else 0.0
    high = float(stats.beta.ppf(1 - outside, found + 1, trials - found)) if found < trials else 1.0
    return low, high
