"""The rank analysis, compared with dense equations and with what the attack recovers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import gradveil
from gradveil import metrics, models
from gradveil.theory import recursion_ranks
from gradveil.theory.rank import gradient_equations, trace


def dense_rank(conv, image, signal, known):
    """The rank of all equations written out as one matrix, from its singular values."""
    inputs = torch.eye(image.numel(), dtype=image.dtype).view(-1, *image.shape[1:])
    forward = F.conv2d(inputs, conv.weight, stride=conv.stride, padding=conv.padding)
    forward = (forward * known).flatten(1).T
    gradient = torch.stack([nn.grad.conv2d_weight(unit[None], conv.weight.shape, signal, conv.stride, conv.padding)
                            .flatten() for unit in inputs]).T  # fmt: skip
    return int(torch.linalg.matrix_rank(torch.cat([forward, gradient]), rtol=1e-6))


@given(
    channels=st.integers(1, 3),
    outputs=st.integers(1, 4),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    size=st.integers(3, 7),
    activation=st.sampled_from([nn.ReLU, nn.LeakyReLU, nn.Sigmoid]),
    seed=st.integers(0, 99),
)
def test_ranks_are_those_of_the_written_out_equations(
    channels, outputs, kernel, stride, padding, size, activation, seed
):
    torch.manual_seed(seed)
    conv = nn.Conv2d(channels, outputs, kernel, stride=stride, padding=padding).double()
    act = activation()
    features = act(conv(torch.zeros(1, channels, size, size, dtype=torch.float64))).numel()
    model = nn.Sequential(conv, act, nn.Flatten(), nn.Linear(features, 3).double())
    task = gradveil.Task(model, input_shape=(channels, size, size), classes=3)
    rank = recursion_ranks(task, generator=torch.Generator().manual_seed(seed))[0]

    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(1, channels, size, size, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        out = conv(image)
    leaf = out.clone().requires_grad_()
    (slope,) = torch.autograd.grad(act(leaf).sum(), leaf)
    known = torch.ones_like(out, dtype=torch.bool) if activation is not nn.ReLU else out > 0
    signal = slope * torch.randn(out.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        assert rank.rank == dense_rank(conv, image, signal, known)
    assert rank.unknowns == image.numel()
    assert rank.forward == int(known.sum())
    assert rank.rank <= min(rank.unknowns, rank.forward + rank.gradient)
    assert rank.recoverable == (rank.rank == rank.unknowns)


def test_gradient_equations_give_the_weight_gradient(generator):
    conv = nn.Conv2d(1, 3, (2, 3), stride=(1, 2), padding=(0, 1)).double()
    image = torch.rand(1, 1, 5, 6, generator=generator, dtype=torch.float64)
    signal = torch.randn(conv(image).shape, generator=generator, dtype=torch.float64)
    (expected,) = torch.autograd.grad((conv(image) * signal).sum(), conv.weight)
    got = gradient_equations(conv, (5, 6), signal) @ image.flatten()
    torch.testing.assert_close(got, expected.flatten())


@pytest.mark.parametrize("stride", [1, 3])
def test_the_ranks_predict_whether_the_attack_succeeds(stride, generator):
    """Two kernels on 8 x 8 pixels are enough at stride 1, but at stride 3 most of the image is undetermined."""
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 2, 3, stride=stride, padding=1)
    model = nn.Sequential(conv, nn.LeakyReLU(0.2), nn.Flatten(), nn.LazyLinear(4)).double()
    image = torch.rand(1, 1, 8, 8, generator=generator, dtype=torch.float64)
    model(image)
    task = gradveil.Task(model, input_shape=(1, 8, 8), classes=4)
    update = gradveil.defense("none").share(task, image, torch.tensor([2]))
    found = gradveil.attack("r-gap").reconstruct(task, update, gradveil.ThreatModel())
    psnr = float(metrics.psnr(image, found.inputs[0].clamp(0, 1)))
    assert [rank.recoverable for rank in recursion_ranks(task)] == [stride == 1, True]
    assert psnr > 80 if stride == 1 else psnr < 25


def test_what_stops_the_recursion_is_named():
    def obstacles(name, **parameters):
        model = models.create(name, input_shape=(1, 12, 12), classes=3, **parameters)
        ranks = recursion_ranks(gradveil.Task(model, input_shape=(1, 12, 12), classes=3))
        return {rank.kind: rank.reason for rank in ranks if not rank.recoverable}

    assert obstacles("mlp") == {}
    assert "a pool keeps fewer values" in obstacles("convnet", norm="none")["MaxPool2d"]
    assert "divides by a statistic" in obstacles("convnet", norm="group")["GroupNorm"]
    assert any("not just the output of the layer before" in reason for reason in obstacles("resnet10").values())
    assert "no equations are known for GELU" in obstacles("lenet", activation="gelu")["GELU"]
    few = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))
    nn.init.ones_(few[0].bias)  # no unit is dead
    reason = recursion_ranks(gradveil.Task(few, input_shape=(1, 8, 8), classes=3))[0].reason
    assert "of 64 input values stay undetermined" in reason
    assert "the weight gradient determines 1 x 18 of 1 x 64" in reason


def test_trace_marks_leaves_whose_input_is_not_the_previous_output(generator):
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(2 * self.first(x.flatten(1)))

    task = gradveil.Task(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), input_shape=(1, 2, 2), classes=2)
    assert all(leaf.follows for leaf in trace(task, torch.rand(1, 1, 2, 2, generator=generator)))
    task = gradveil.Task(Doubled(), input_shape=(1, 2, 2), classes=2)
    assert [leaf.follows for leaf in trace(task, torch.rand(1, 1, 2, 2, generator=generator))] == [False, False]


def test_equations_are_counted_if_the_matrix_is_too_large(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(18, 3))
    task = gradveil.Task(model, input_shape=(1, 8, 8), classes=3)
    measured = recursion_ranks(task)[0]
    monkeypatch.setattr("gradveil.theory.rank.LARGEST_MATRIX", 0)
    counted = recursion_ranks(task)[0]
    assert measured.rank <= counted.rank <= counted.forward + counted.gradient
    assert counted.reason.startswith("at least ")
    wide = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.LeakyReLU(), nn.Flatten(), nn.Linear(1152, 3))
    ranks = recursion_ranks(gradveil.Task(wide, input_shape=(1, 12, 12), classes=3))
    assert ranks[0].reason.startswith("undecided: 144 equations")
    assert not ranks[0].recoverable
