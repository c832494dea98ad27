"""The re-identification rate with made-up embeddings: who is nearest, the interval, and galleries that would cheat."""

import pytest
import torch
from scipy.stats import binom

from gradveil.core.errors import InputError, ParameterError
from gradveil.metrics import Gallery, reidentification_rate


def first_pixels(images):
    return images.flatten(1)[:, :2]


def faces(*points):
    """Images whose first two pixels are a point."""
    images = torch.zeros(len(points), 1, 2, 2)
    images.view(-1, 4)[:, :2] = torch.tensor(points)
    return images


@pytest.fixture
def gallery():
    return Gallery(faces((0.0, 0.0), (0.0, 0.2), (1.0, 0.0), (1.0, 0.2)), torch.tensor([5, 5, 9, 9]))


def rate(found, people, gallery, **options):
    originals = torch.full_like(found, 0.5)
    return reidentification_rate(originals, found, torch.tensor(people), gallery, first_pixels, **options)


def test_the_nearest_photograph_decides(gallery):
    result = rate(faces((0.3, 0.2), (0.6, 0.0), (0.7, 0.2)), [5, 5, 9], gallery)
    assert result.right == (True, False, True)
    assert result.rate == pytest.approx(2 / 3)
    assert result.distances == pytest.approx((0.3, 0.6, 0.3))
    assert result.mean_distance == pytest.approx(0.4)
    assert result.chance == 0.5


def test_it_agrees_with_a_loop(generator):
    gallery = Gallery(torch.rand(30, 1, 2, 2, generator=generator), torch.arange(30) % 7)
    found, people = torch.rand(20, 1, 2, 2, generator=generator), [int(n) % 7 for n in range(20)]
    result = rate(found, people, gallery)
    for place, (face, person) in enumerate(zip(found, people, strict=True)):
        distances = [float((first_pixels(face[None]) - first_pixels(photo[None])).norm()) for photo in gallery.images]
        nearest = min(range(30), key=lambda number: distances[number])
        assert result.right[place] == (nearest % 7 == person)
        own = min(distance for number, distance in enumerate(distances) if number % 7 == person)
        assert result.distances[place] == pytest.approx(own, abs=1e-6)


@pytest.mark.parametrize("right", [0, 1, 8, 15, 16])
def test_the_interval_holds_the_rates_that_the_count_does_not_contradict(gallery, right):
    result = rate(faces(*[(0.0, 0.1)] * right, *[(1.0, 0.1)] * (16 - right)), [5] * 16, gallery)
    assert result.low <= result.rate <= result.high
    if right:  # at the lower end, so many or more are as improbable as the level allows
        assert binom.sf(right - 1, 16, result.low) == pytest.approx(0.025)
    else:
        assert result.low == 0
    if right < 16:
        assert binom.cdf(right, 16, result.high) == pytest.approx(0.025)
    else:
        assert result.high == 1
    wider = rate(faces((0.0, 0.1)), [5], gallery, level=0.99)
    assert wider.low < rate(faces((0.0, 0.1)), [5], gallery).low


def test_a_gallery_with_an_original_is_refused(gallery):
    originals = faces((0.5, 0.5), (1.0, 0.0))
    with pytest.raises(InputError, match="must hold other photographs than the originals, got original 1; take it out"):
        reidentification_rate(originals, originals, torch.tensor([5, 9]), gallery, first_pixels)


def test_what_does_not_fit_is_refused(gallery):
    with pytest.raises(InputError, match="must show every person, got no photograph of 7"):
        rate(faces((0.0, 0.0), (0.0, 0.0)), [5, 7], gallery)
    with pytest.raises(InputError, match=r"people must be one number per face, at least one, got \[1\]"):
        rate(faces((0.0, 0.0), (0.0, 0.0)), [5], gallery)
    with pytest.raises(InputError, match=r"at least one, got \[0\]"):
        rate(faces((0.0, 0.0))[:0], [], gallery)
    with pytest.raises(InputError, match="reconstructions must lie in"):
        rate(faces((0.0, 2.0)), [5], gallery)
    with pytest.raises(ParameterError, match="level must be a number"):
        rate(faces((0.0, 0.0)), [5], gallery, level=1)
    with pytest.raises(InputError, match=r"gallery: people must be one number per image, .*got \[3\] for 4 images"):
        Gallery(gallery.images, torch.tensor([1, 2, 3]))
    with pytest.raises(InputError, match="gallery: images must lie in"):
        Gallery(gallery.images - 1, gallery.people)
