"""What refiner promises, compared with slow but obvious computations."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradveil
from gradveil import data, metrics, models
from gradveil.core.errors import InputError
from gradveil.defenses import refiner
from gradveil.defenses.refiner import Refiner, layer_numbers, project
from gradveil.models.base import takes_text
from gradveil.models.evaluation import evaluation_network


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return torch.cat([(a[name] - b[name]).double().flatten() for name in a]).norm().item()


@pytest.fixture
def photographs(real_data):
    if not (real_data / "cifar10.npz").exists():
        pytest.skip("cifar10.npz is not in GRADVEIL_DATA")
    return data.load("cifar10").test.batch(range(16))


def photographs_task(**parameters) -> gradveil.Task:
    model = models.create("lenet", input_shape=(3, 32, 32), classes=10, **parameters)
    return gradveil.Task(model, input_shape=(3, 32, 32), classes=10)


def utility(defense, task, own, robust, labels):
    """The utility metric, computed coordinate by coordinate from the formula."""
    gradients, total = task.gradients(robust, labels), 0.0
    layers = {"0.weight": 1, "0.bias": 1, "3.weight": 2, "3.bias": 2}
    for name, parameter in task.parameters.items():
        for g, g_star, theta in zip(
            own[name].flatten().tolist(), gradients[name].flatten().tolist(), parameter.flatten().tolist(), strict=True
        ):
            total += abs(g * theta) * defense.decay ** layers[name] * (g_star - g) ** 2
    return total


class TestProjection:
    @given(
        seed=st.integers(0, 10_000),
        epsilon=st.floats(1e-6, 1e3),
        scale=st.floats(1e-3, 1e3),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def test_never_further_than_epsilon_and_the_nearest_such_point(self, seed, epsilon, scale, dtype):
        generator = seeded(seed)
        own, robust = (
            {name: scale * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes}
            for shapes in [[("w", (4, 3)), ("b", (5,))]] * 2
        )
        shared = project(own, robust, epsilon)
        rounding = 4 * torch.finfo(dtype).eps * (distance(own, {n: torch.zeros_like(v) for n, v in own.items()}) + 1)
        assert distance(shared, own) <= epsilon * (1 + 4 * torch.finfo(dtype).eps) + rounding
        if distance(robust, own) <= epsilon:
            assert all(torch.equal(shared[name], robust[name]) for name in own)
        else:  # it lies on the straight line between the two
            assert distance(shared, own) + distance(shared, robust) == pytest.approx(
                distance(own, robust), rel=1e-4 if dtype == torch.float32 else 1e-9
            )


class TestShare:
    @settings(max_examples=15)
    @given(
        seed=st.integers(0, 1000),
        epsilon=st.floats(1e-8, 10),
        blend=st.floats(0, 1),
        balance=st.floats(0, 1e3),
        iterations=st.integers(1, 3),
    )
    def test_the_shared_gradient_is_within_epsilon(self, seed, epsilon, blend, balance, iterations):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(108, 4)).double()
        task = gradveil.Task(model, input_shape=(1, 6, 6), classes=4)
        inputs, labels = torch.rand(2, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 3])
        defense = Refiner(epsilon=epsilon, blend=blend, balance=balance, iterations=iterations)
        shared = defense.share(task, inputs, labels, generator=seeded(seed))
        assert distance(shared, task.gradients(inputs, labels)) <= epsilon * (1 + 1e-9) + 1e-14

    def test_epsilon_towards_zero_gives_the_gradient(self, tiny_task, tiny_batch):
        own = tiny_task.gradients(*tiny_batch)
        for epsilon in (1e-2, 1e-4, 1e-8):
            shared = Refiner(epsilon=epsilon).share(tiny_task, *tiny_batch, generator=seeded())
            assert distance(shared, own) == pytest.approx(epsilon, rel=1e-6)

    def test_without_a_bound_it_is_the_gradient_of_the_robust_data(self, tiny_task, tiny_batch):
        memory = {}
        shared = Refiner(epsilon=1e9).share(tiny_task, *tiny_batch, generator=seeded(), memory=memory)
        robust = memory["trained_on"]
        assert robust.shape == tiny_batch[0].shape
        assert robust.min() >= 0
        assert robust.max() <= 1
        assert distance(shared, tiny_task.gradients(robust, tiny_batch[1])) == 0

    def test_it_acts_in_every_local_step(self, tiny_task, tiny_batch):
        local = gradveil.LocalSteps(epochs=2, batch_size=3, lr=0.1)
        shared = Refiner(epsilon=1e-3).share(tiny_task, *tiny_batch, generator=seeded(), local=local)
        plain = gradveil.defense("none").share(tiny_task, *tiny_batch, generator=seeded(), local=local)
        assert shared.meta.local == local
        # Two steps of at most epsilon each, and a little because they move the weights.
        assert 0 < distance(shared, plain) < 2.1e-3

    def test_inputs_that_are_not_images_are_refused(self):
        task = gradveil.Task(nn.Linear(4, 2), input_shape=(4,), classes=2)
        with pytest.raises(InputError, match=r"refiner: the evaluation network sees images of 1 or 3 channels.*\[4\]"):
            Refiner().share(task, torch.rand(1, 4), torch.tensor([0]))

    @pytest.mark.parametrize(
        ("name", "channels"),
        [(name, 1) for name in models.names() if not takes_text(name)] + [("lenet", 3), ("vit", 3), ("resnet10", 3)],
    )
    def test_it_works_on_every_model(self, name, channels):
        shape = (channels, 32, 32)
        task = gradveil.Task(models.create(name, input_shape=shape, classes=3), input_shape=shape, classes=3)
        inputs = torch.rand(2, *shape, generator=seeded())
        labels, memory = torch.tensor([0, 2]), {}
        shared = Refiner(epsilon=0.05, iterations=1).share(task, inputs, labels, generator=seeded(), memory=memory)
        assert 0 < distance(shared, task.gradients(inputs, labels)) <= 0.05 * 1.001
        assert not torch.equal(memory["trained_on"], inputs)


class TestSearch:
    def test_the_slope_is_that_of_the_formula(self, tiny_task, tiny_batch):
        """Compare with central differences of an objective computed coordinate by coordinate."""
        inputs, labels = tiny_batch
        defense, network = Refiner(balance=0.3, decay=0.8), evaluation_network(torch.float64)
        own = tiny_task.gradients(inputs, labels)
        robust = torch.rand(inputs.shape, generator=seeded(5), dtype=torch.float64)

        def objective(at):
            return utility(defense, tiny_task, own, at, labels) - 0.3 * network(at).mean().item()

        weights = defense.weights(own, tiny_task.parameters)
        slope = defense._slope(tiny_task, robust, labels, own, weights, network)
        for pixel in [(0, 0, 0, 0), (1, 0, 3, 2), (2, 0, 5, 5)]:
            nudge = torch.zeros_like(robust)
            nudge[pixel] = 1e-5
            expected = (objective(robust + nudge) - objective(robust - nudge)) / 2e-5
            assert slope[pixel].item() == pytest.approx(expected, rel=1e-4, abs=1e-10)

    def test_it_lowers_the_objective(self, tiny_task, tiny_batch):
        inputs, labels = tiny_batch
        own, network = tiny_task.gradients(inputs, labels), evaluation_network(torch.float64)
        start = torch.rand(inputs.shape, generator=seeded(7), dtype=torch.float64)
        for balance in (0.0, 1.0, 1e6):
            defense = Refiner(balance=balance)
            before, after = (
                utility(defense, tiny_task, own, at, labels) - balance * network(at).mean().item()
                for at in (
                    start,
                    defense.refine(tiny_task, own, labels, start, defense.weights(own, tiny_task.parameters), 10),
                )
            )
            assert after < before

    @pytest.mark.parametrize(
        ("parameters", "count"),
        [
            ({"activation": "gelu"}, 1),
            ({"activation": "gelu"}, 8),
            ({"activation": "relu"}, 1),
            ({"activation": "relu"}, 8),
            ({"init": "uniform"}, 1),
        ],
    )
    def test_it_improves_both_terms_over_the_blended_start(self, photographs, parameters, count):
        """With the weights as printed, D alone decides the direction, and the gradient ends further away."""
        task = photographs_task(**parameters)
        nearer, noisier, nearer_as_printed = [], [], []
        for first in range(0, 8, count):
            images, labels = (tensor[first : first + count] for tensor in photographs)
            own = task.gradients(images, labels)
            start = torch.lerp(images, torch.rand(images.shape, generator=seeded(first)), 0.5)
            robust, printed = (
                defense.refine(task, own, labels, start, defense.search_weights(task, own, start, labels), 10)
                for defense in (Refiner(), Refiner(normalise=False))
            )
            before = distance(task.gradients(start, labels), own)
            nearer.append(distance(task.gradients(robust, labels), own) / before)
            nearer_as_printed.append(distance(task.gradients(printed, labels), own) / before)
            noisier.append((evaluation_network()(robust).mean() - evaluation_network()(start).mean()).item())
        assert statistics.median(nearer) < 1
        assert statistics.median(noisier) > 0
        if "init" not in parameters:
            assert statistics.median(nearer_as_printed) > 1

    def test_it_does_not_depend_on_the_scale_of_the_loss(self, tiny_task, tiny_batch):
        inputs, labels = tiny_batch
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(108, 4)).double()
        scaled = gradveil.Task(
            model, lambda out, y: 1e3 * nn.functional.cross_entropy(out, y), input_shape=(1, 6, 6), classes=4
        )
        start = torch.rand(inputs.shape, generator=seeded(7), dtype=torch.float64)
        found = []
        for task in (tiny_task, scaled):
            own, defense = task.gradients(inputs, labels), Refiner()
            weights = defense.search_weights(task, own, start, labels)
            found.append(defense.refine(task, own, labels, start, weights, 10))
        torch.testing.assert_close(*found, rtol=0, atol=1e-9)

    def test_no_sample_moves_further_than_its_steps(self, tiny_task, tiny_batch):
        inputs, labels = tiny_batch
        own = tiny_task.gradients(inputs, labels)
        defense = Refiner()
        robust = defense.refine(tiny_task, own, labels, inputs, defense.weights(own, tiny_task.parameters), 7)
        moved = (robust - inputs).flatten(1).square().mean(1).sqrt()
        assert (moved > 0).all()
        assert (moved <= 7 * defense.step + 1e-12).all()

    def test_parameters_of_one_module_share_a_layer_number(self):
        task = gradveil.Task(
            models.create("lenet", input_shape=(1, 28, 28), classes=3), input_shape=(1, 28, 28), classes=3
        )
        numbers = layer_numbers(task.parameters)
        assert sorted(set(numbers.values())) == [1, 2, 3, 4, 5]
        assert numbers["classifier.weight"] == numbers["classifier.bias"] == 5
        assert numbers["features.0.weight"] == numbers["features.0.bias"] == 1


class TestWarmStart:
    def iterations_of(self, monkeypatch, defense):
        calls = []
        original = Refiner._slope

        def counted(self, *arguments):
            calls.append(1)
            return original(self, *arguments)

        monkeypatch.setattr(Refiner, "_slope", counted)

        def share(task, batch, memory):
            calls.clear()
            defense.share(task, *batch, generator=seeded(), memory=memory)
            return len(calls)

        return share

    def test_half_the_iterations_if_every_sample_is_known(self, monkeypatch, tiny_task, tiny_batch):
        share = self.iterations_of(monkeypatch, Refiner(iterations=5))
        memory = {}
        inputs, labels = tiny_batch
        assert share(tiny_task, tiny_batch, memory) == 5
        assert share(tiny_task, (inputs.flip(0), labels.flip(0)), memory) == 3
        assert share(tiny_task, (inputs[:2], labels[:2]), memory) == 3
        assert share(tiny_task, (inputs, (labels + 1) % 4), memory) == 5  # other labels are other samples
        assert share(tiny_task, tiny_batch, {}) == 5
        assert share(tiny_task, tiny_batch, None) == 5

    def test_each_sample_continues_from_its_previous_robust_data(self, tiny_task, tiny_batch):
        memory, defense = {}, Refiner(iterations=2)
        inputs, labels = tiny_batch
        defense.share(tiny_task, inputs, labels, generator=seeded(), memory=memory)
        before = memory["trained_on"]
        defense.share(tiny_task, inputs.flip(0), labels.flip(0), generator=seeded(1), memory=memory)
        moved = (memory["trained_on"].flip(0) - before).flatten(1).square().mean(1).sqrt()
        assert (moved <= Refiner().step + 1e-3).all()  # one step, and the rounding of the stored data

    def test_the_memory_is_bounded_and_drops_the_least_recently_used_sample(self, monkeypatch, tiny_task, tiny_batch):
        monkeypatch.setattr(refiner, "WARM_BYTES", 3 * 2 * 36)  # three images of 36 values
        share = self.iterations_of(monkeypatch, Refiner(iterations=2))
        memory = {}
        images = torch.rand(5, 1, 6, 6, generator=seeded(3), dtype=torch.float64)

        def sample(index):
            return images[index : index + 1], torch.tensor([0])

        for index in (0, 1, 2):
            assert share(tiny_task, sample(index), memory) == 2
        assert share(tiny_task, sample(0), memory) == 1  # used again, so sample 1 is now the oldest
        assert share(tiny_task, sample(3), memory) == 2
        assert len([key for key in memory if key != "trained_on"]) == 3
        assert share(tiny_task, sample(0), memory) == 1
        assert share(tiny_task, sample(1), memory) == 2

    def test_it_works_with_a_scoped_memory(self, tiny_task, tiny_batch):
        memory = {}
        chain = gradveil.defense("refiner+top-k:keep=0.5")
        for _ in range(2):
            chain.share(tiny_task, *tiny_batch, generator=seeded(), memory=memory)
        assert sum(key.startswith("0/refined/") for key in memory) == 3


class TestBlendedStart:
    """Figure 5 of the paper: if D alone counts, the search from the image itself fools the evaluation network."""

    def robust_data(self, photographs, blend):
        images, labels = photographs
        task, memory = photographs_task(activation="gelu"), {}
        Refiner(blend=blend, balance=1e6).share(task, images, labels, generator=seeded(), memory=memory)
        return memory["trained_on"]

    def test_without_blending_the_network_is_fooled(self, photographs):
        robust = self.robust_data(photographs, 0.0)
        assert metrics.psnr(photographs[0], robust).min() > 18
        assert metrics.noise_ratio(photographs[0]).median() < 0.1
        assert metrics.noise_ratio(robust).median() > 0.5

    def test_with_blending_the_image_is_under_noise(self, photographs):
        robust = self.robust_data(photographs, 0.5)
        assert metrics.psnr(photographs[0], robust).max() < 15
        assert metrics.noise_ratio(robust).min() > 0.8
