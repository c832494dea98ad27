import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import gradveil
from gradveil import metrics, models
from gradveil.attacks._recursion import least_squares
from gradveil.core.errors import InputError, ThreatModelError


def attacked(task, images, labels, defense="none", threat=None):
    defended = gradveil.defense(defense)
    updates = [
        defended.share(task, images[i : i + 1], labels[i : i + 1], generator=torch.Generator().manual_seed(i))
        for i in range(len(images))
    ]
    found = gradveil.attack("r-gap").reconstruct(task, updates, threat or gradveil.ThreatModel())
    return found, metrics.psnr(images, found.inputs[:, 0].to(images).nan_to_num(nan=0.5).clamp(0, 1))


def task_of(name, logits, shape, dtype=torch.float32, **parameters):
    model = models.create(name, input_shape=shape, classes=logits, **parameters).to(dtype)
    loss, classes = ("logistic", 2) if logits == 1 else ("cross-entropy", logits)
    return gradveil.Task(model, loss, input_shape=shape, classes=classes)


@given(
    rows=st.integers(1, 6),
    more=st.integers(1, 6),
    columns=st.integers(1, 6),
    rank=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_least_squares_is_the_pseudo_inverse(rows, more, columns, rank, seed):
    """For any rank and many problems at once; the reference is torch's pseudo-inverse."""
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    left = torch.randn(3, rows + more, min(rank, columns), **options)
    matrix = left @ torch.randn(3, min(rank, columns), columns, **options)
    target = torch.randn(3, rows + more, **options)
    first, second = matrix[:, :rows], matrix[:, rows:]
    got = least_squares(
        lambda x: ((first @ x[..., None])[..., 0], (second @ x[..., None])[..., 0]),
        lambda a, b: (a[:, None] @ first + b[:, None] @ second)[:, 0],
        (target[:, :rows], target[:, rows:]),
        (3, columns),
        steps=200,
    )
    expected = torch.linalg.pinv(matrix, rtol=1e-9) @ target[..., None]
    # Nearly singular problems are as ill-posed for the reference as for us.
    assume(bool((torch.linalg.svdvals(matrix)[:, : min(rank, columns, rows + more)].amin(1) > 1e-2).all()))
    torch.testing.assert_close(got, expected[..., 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("logits", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cnn6_is_solved_with_one_and_with_many_logits(logits, dtype, generator):
    task = task_of("cnn6", logits, (3, 10, 10), dtype)
    images = torch.rand(4, 3, 10, 10, generator=generator).to(dtype)
    labels = torch.arange(4) % max(2, logits)
    found, psnr = attacked(task, images, labels)
    assert found.labels[:, 0].tolist() == labels.tolist()
    assert psnr.min() > 60
    assert found.loss.max() < 1e-3


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_mlp_is_exact(activation, generator):
    task = task_of("mlp", 10, (1, 12, 12), activation=activation)
    images, labels = torch.rand(4, 1, 12, 12, generator=generator), torch.tensor([3, 0, 9, 3])
    found, psnr = attacked(task, images, labels)
    assert found.labels[:, 0].tolist() == labels.tolist()
    assert psnr.min() > 90


def test_lenet_with_biases_and_sigmoids_is_solved(generator):
    task = task_of("lenet", 10, (1, 12, 12), torch.float64)
    images = torch.rand(2, 1, 12, 12, generator=generator).double()
    _, psnr = attacked(task, images, torch.tensor([1, 4]))
    assert psnr.min() > 40


def test_normalisation_is_undone(generator):
    model = models.create("cnn6", input_shape=(1, 8, 8), classes=3)
    task = gradveil.Task(model, input_shape=(1, 8, 8), classes=3, mean=[0.4], std=[0.3])
    images = torch.rand(2, 1, 8, 8, generator=generator)
    _, psnr = attacked(task, images, torch.tensor([0, 2]))
    assert psnr.min() > 60


def test_known_labels_are_used(generator):
    task = task_of("cnn6", 1, (1, 8, 8))
    images, labels = torch.rand(2, 1, 8, 8, generator=generator), torch.tensor([1, 0])
    threat = gradveil.ThreatModel(labels="known", known_labels=labels[:, None])
    found, psnr = attacked(task, images, labels, threat=threat)
    assert found.labels[:, 0].tolist() == [1, 0]
    assert psnr.min() > 60


@pytest.mark.parametrize("defense", ["gaussian-noise:std=0.001", "top-k:keep=0.5", "dual-pruning", "gradient-dropout"])
def test_gradient_defenses_break_it(defense, generator):
    task = task_of("cnn6", 1, (3, 10, 10))
    images = torch.rand(4, 3, 10, 10, generator=generator)
    _, psnr = attacked(task, images, torch.tensor([0, 1, 0, 1]), defense)
    assert psnr.median() < 12


def test_an_update_of_zeros_survives():
    task = task_of("cnn6", 3, (1, 8, 8))
    zeros = {name: torch.zeros_like(value) for name, value in task.parameters.items()}
    found = gradveil.attack("r-gap").reconstruct(task, zeros, gradveil.ThreatModel())
    assert found.inputs.shape == (1, 1, 1, 8, 8)
    assert found.loss[0] == torch.inf


def test_what_it_cannot_do_is_refused(generator):
    images, labels = torch.rand(2, 1, 12, 12, generator=generator), torch.tensor([0, 1])
    task = task_of("mlp", 3, (1, 12, 12))
    attack = gradveil.attack("r-gap")
    update = gradveil.defense("none").share(task, images, labels)
    with pytest.raises(ThreatModelError, match="inverts the gradient of one example, got batch_size=2"):
        attack.reconstruct(task, update, gradveil.ThreatModel(batch_size=2))
    own = gradveil.Task(nn.Sequential(nn.Flatten(), nn.Linear(144, 3)), nn.CrossEntropyLoss(label_smoothing=0.1),
                        input_shape=(1, 12, 12), classes=3)  # fmt: skip
    update = gradveil.defense("none").share(own, images[:1], labels[:1])
    with pytest.raises(ThreatModelError, match="must know how to invert the loss"):
        attack.reconstruct(own, update, gradveil.ThreatModel())
    task = task_of("convnet", 3, (1, 12, 12), norm="none")
    update = gradveil.defense("none").share(task, images[:1], labels[:1])
    with pytest.raises(InputError, match=r"cannot pass .* \(MaxPool2d\): a pool keeps fewer values"):
        attack.reconstruct(task, update, gradveil.ThreatModel())


def test_frozen_and_repeated_layers(generator):
    """A frozen classifier bias is a known constant; a layer without a gradient of its own is refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.LeakyReLU(0.2), nn.Linear(12, 3))
    model[3].bias.requires_grad_(False)
    task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
    images = torch.rand(1, 1, 4, 4, generator=generator)
    _, psnr = attacked(task, images.expand(1, 1, 4, 4), torch.tensor([2]))
    assert psnr.min() > 60
    model[1].weight.requires_grad_(False)
    task = gradveil.Task(model, input_shape=(1, 4, 4), classes=3)
    with pytest.raises(InputError, match=r"cannot pass '1' \(Linear\): its weights are not trained"):
        attacked(task, images, torch.tensor([2]))
    twice = nn.Linear(16, 16)
    task = gradveil.Task(nn.Sequential(nn.Flatten(), twice, twice, nn.Linear(16, 3)), input_shape=(1, 4, 4), classes=3)
    with pytest.raises(InputError, match="it runs more than once"):
        attacked(task, images, torch.tensor([2]))
