"""Images: range, prior, blind guess, verdict and rendering."""

import io

import numpy as np
import PIL.Image
import pytest
import torch

from gradveil import data, metrics
from gradveil.core.errors import DataError, InputError
from gradveil.modality import IMAGE, MODALITIES, Image
from gradveil.modality.image import total_variation


def test_the_registry_creates_it_by_name():
    assert MODALITIES.create("image") == IMAGE == Image()
    assert (IMAGE.name, IMAGE.unit, IMAGE.primary) == ("image", "image", "psnr")


def test_total_variation_skips_axes_without_neighbours():
    stripes = torch.tensor([0.0, 1.0, 0.0]).expand(1, 1, 3, 3)
    assert float(total_variation(stripes)) == 1.0
    assert float(total_variation(torch.tensor([[0.0, 1.0, 0.0]])[None, None])) == 1.0
    assert float(total_variation(torch.ones(1, 3, 1, 1))) == 0.0


def test_inputs_of_another_shape_have_the_range_but_no_prior():
    assert IMAGE.prior(torch.rand(2, 10)) is None
    assert IMAGE.project(torch.tensor([[-1.0, 2.0]])).tolist() == [[0.0, 1.0]]


def test_nan_is_shown_as_grey():
    found = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.25]).view(1, 1, 2, 2)
    assert IMAGE.repaired(found).flatten().tolist() == [0.5, 1.0, 0.0, 0.25]


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_the_picture_is_a_strip(channels, mode):
    examples = torch.rand(3, channels, 4, 5, generator=torch.manual_seed(0))
    with PIL.Image.open(io.BytesIO(IMAGE.render(examples))) as picture:
        assert (picture.mode, picture.size) == (mode, IMAGE.rendered_size((channels, 4, 5), 3)) == (mode, (15, 4))
        strip = np.asarray(picture).reshape(4, 3, 5, channels)
    assert np.array_equal(strip[:, 2], (examples[2] * 255).round().byte().permute(1, 2, 0).numpy())


class TestBlindGuess:
    def test_is_the_class_mean_for_each_label(self):
        generator = np.random.default_rng(0)
        public = generator.integers(0, 256, (50, 3, 5, 4), dtype=np.uint8)
        public_labels = generator.integers(0, 4, 50)
        labels = torch.tensor([3, 0, 3, 1])
        guess = IMAGE.blind(torch.from_numpy(public), torch.from_numpy(public_labels), labels, classes=4)
        expected = np.stack([(public[public_labels == label] / 255).mean(axis=0) for label in labels.tolist()])
        assert guess.dtype == torch.float32
        np.testing.assert_allclose(guess, expected, atol=1e-6)

    def test_without_classes_is_the_mean_of_all_images(self):
        public = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
        heights = torch.tensor([1.5, 3.0])
        assert IMAGE.blind(public, heights, torch.tensor([2.0, 2.5]), classes=None).flatten().tolist() == [0.5, 0.5]
        masks = torch.zeros(2, 1, 1).long()
        assert IMAGE.blind(public, masks, masks, classes=2).flatten().tolist() == [0.5, 0.5]

    def test_its_range_is_that_of_images(self):
        white = torch.full((7, 1, 12, 12), 255, dtype=torch.uint8)
        guess = IMAGE.blind(white, torch.zeros(7), torch.tensor([0]), classes=1)
        assert guess.eq(1).all()

    @pytest.mark.parametrize(("name", "least", "most"), [("faces-orl", 17, 21), ("mednist", 14, 18)])
    def test_scores_high_if_images_of_a_class_look_alike(self, real_data, name, least, most):
        dataset = data.load(name)
        victims, labels = dataset.test.batch(range(len(dataset.test)))
        guess = IMAGE.blind(dataset.train.inputs, dataset.train.targets, labels, classes=len(dataset.classes))
        assert least < metrics.psnr(victims, guess).mean() < most

    def test_refuses_a_class_without_public_images(self):
        public = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
        with pytest.raises(InputError, match="no public image has label 1"):
            IMAGE.blind(public, torch.tensor([0, 2]), torch.tensor([0, 1]), classes=3)

    @pytest.mark.parametrize(
        ("public_labels", "labels", "message"),
        [
            ([0, 3], [0], "public labels must lie between 0 and 2, got 0 to 3"),
            ([0, 1], [-1], "victims' labels must lie between 0 and 2, got -1 to -1"),
            ([0], [0], "one target per public image, got 1 for 2"),
        ],
    )
    def test_refuses_labels_that_do_not_fit(self, public_labels, labels, message):
        public = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
        with pytest.raises(InputError, match=message):
            IMAGE.blind(public, torch.tensor(public_labels), torch.tensor(labels), classes=3)

    def test_refuses_images_that_are_not_uint8(self):
        with pytest.raises(DataError, match="blind guess: public images must be uint8"):
            IMAGE.blind(torch.zeros(1, 1, 4, 4), torch.tensor([0]), torch.tensor([0]), classes=1)


def scores(psnr, ssim, psnr_blurred=0.0, ssim_blurred=0.0):
    return {"psnr": psnr, "ssim": ssim, "psnr_blurred": psnr_blurred, "ssim_blurred": ssim_blurred}


@pytest.mark.parametrize(
    ("found", "blind", "expected"),
    [
        (scores(15.0, 0.0), scores(5.0, 0.9), "pixels"),  # the PSNR threshold itself counts
        (scores(14.999, 0.499), scores(5.0, 0.9), None),
        (scores(9.0, 0.5), scores(5.0, 0.9), "pixels"),  # the SSIM threshold itself counts
        (scores(30.0, 0.9), scores(28.0, 0.9), "pixels"),  # the margin itself counts
        (scores(30.0, 0.9), scores(28.001, 0.9), None),
        (scores(9.0, 0.9), scores(8.0, 0.8), None),
        (scores(10.0, 0.1), scores(1.0, 0.0), None),  # above the blind guess, yet not recognisable
        (scores(15.0, 0.0), None, "pixels"),  # nothing to beat
        (scores(None, None), scores(5.0, 0.1), None),
        (scores(14.0, 0.4), scores(13.0, 0.15), "structure"),  # all three thresholds themselves count
        (scores(14.0, 0.399), scores(13.0, 0.1), None),
        (scores(14.0, 0.45), scores(13.0, 0.201), None),
        (scores(14.0, 0.45), scores(13.001, 0.1), None),
        (scores(20.0, 0.2, 28.0, 0.7), scores(24.0, 0.6, 25.0, 0.7), "blur"),
        (scores(20.0, 0.2, 28.0, 0.7), scores(24.0, 0.6, 25.001, 0.7), None),
        (scores(20.0, 0.2, 28.0, 0.7), scores(24.0, 0.6, 25.0, 0.701), None),
        (scores(10.0, 0.2, 14.0, 0.499), scores(9.0, 0.1, 10.0, 0.2), None),
    ],
)
def test_verdict(found, blind, expected):
    assert IMAGE.leak_rule(found, blind) == expected
