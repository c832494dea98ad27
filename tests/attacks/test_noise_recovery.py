"""Noise recovery: every part against a slow, obvious reference; the attack on noise it must strip and must not."""

import itertools
import re

import numpy as np
import pytest
import torch
from torch import nn

import gradveil
from gradveil import data, models
from gradveil.attacks.noise_recovery import (
    NumpyLaplace,
    TorchLaplace,
    TorchNormal,
    TorchUniform,
    disconnect,
    known_zeros,
    recover,
    silence,
)
from gradveil.attacks.noise_recovery._linear import pack, solve
from gradveil.attacks.noise_recovery._mersenne import KnownBits, find_states, next_block, rewind, temper, untemper
from gradveil.attacks.noise_recovery._polar import align, invert_polar, polar_normals
from gradveil.attacks.noise_recovery._sources import normals_around, numpy_generator
from gradveil.core.errors import InputError, ParameterError
from gradveil.core.randomness import derived_generator


def numpy_outputs(count, seed=5):
    """The words of a generator's state before its first output, and its outputs."""
    generator = np.random.RandomState(seed)
    words = generator.get_state()[1].astype(np.uint32)
    return words, generator.randint(0, 2**32, count, dtype=np.uint64).astype(np.uint32)


def torch_outputs(generator, count):
    """The next outputs of a generator, computed by numpy's own Mersenne Twister."""
    raw = generator.get_state().numpy().tobytes()[24 : 24 + 8 * 624]
    twin = np.random.RandomState()
    twin.set_state(("MT19937", np.frombuffer(raw, "<u8").astype(np.uint32), 624))
    return twin.randint(0, 2**32, count, dtype=np.uint64).astype(np.uint32)


def network(activation=nn.ReLU):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 8), activation(), nn.Linear(8, 10))
    return gradveil.Task(model, input_shape=(1, 28, 28), classes=10)


def batch(count=4, seed=0):
    generator = derived_generator(seed, "images")
    return torch.rand(count, 1, 28, 28, generator=generator), torch.arange(count) % 10


@pytest.fixture(scope="module")
def silenced():
    """A task in which an active server silenced three units, and what it then knows: 2,352 consecutive zeros."""
    task = silence(network(), "1.bias", [2, 3, 4])
    return task, known_zeros(task, batch(512, seed=1)[0])


def assert_stripped(found, truth, scale):
    assert found.verified, found.reason
    for name, value in truth.items():
        assert (found.update[name] - value).abs().max() < 1e-5 * (scale + value.abs().max()), name


# Linear equations.


def test_small_systems_agree_with_trying_all_solutions():
    rng = np.random.default_rng(0)
    for _ in range(200):
        unknowns, count = int(rng.integers(1, 9)), int(rng.integers(1, 14))
        system = rng.random((count, unknowns + 1)) < 0.5
        found = solve(pack(system), unknowns)
        candidates = np.array(list(itertools.product([0, 1], repeat=unknowns)))
        holds = (candidates @ system[:, :-1].T % 2 == system[:, -1]).all(1)
        if unknowns - found.rank <= 4:
            assert sorted(bits.tolist() for bits in found.candidates) == candidates[holds].tolist()
        else:
            assert not found.candidates
        assert (found.contradictions > 0) == (not holds.any())
        assert found.rank + found.checks + found.contradictions == count


def test_a_system_of_several_words_gives_the_planted_solution_and_names_contradictions():
    rng = np.random.default_rng(0)
    coefficients, planted = rng.random((700, 601)) < 0.5, rng.random(601) < 0.5
    coefficients[:, 70] = coefficients[:, 300]  # a column that is no pivot of its own
    constants = coefficients.astype(int) @ planted % 2 == 1
    assert solve(pack(np.c_[coefficients, constants]), 601).rank == 600
    coefficients[:, 70] = rng.random(700) < 0.5
    constants = coefficients.astype(int) @ planted % 2 == 1
    found = solve(pack(np.c_[coefficients, constants]), 601)
    (bits,) = found.candidates
    assert (bits == planted).all()
    assert (found.rank, found.checks) == (601, 99)
    constants[650] ^= True
    assert solve(pack(np.c_[coefficients, constants]), 601).contradictions > 0


# The generator.


def test_the_mersenne_twister_is_numpys_forwards_and_backwards():
    words, outputs = numpy_outputs(3 * 624)
    first = next_block(words)
    second = next_block(first)
    assert (temper(np.concatenate([first, second, next_block(second)])) == outputs).all()
    assert (untemper(outputs[:624]) == first).all()
    everything = np.concatenate([words, first, second])
    for back in (1, 300, 624, 1000):
        earlier = rewind(second, back)
        assert (earlier[1:] == everything[1248 - back :][1:624]).all()
        assert earlier[0] >> 31 == everything[1248 - back] >> 31
        assert (temper(next_block(earlier)) == outputs[1248 - back :][:624]).all()


def test_bits_of_consecutive_outputs_give_the_state():
    _, outputs = numpy_outputs(1400)
    positions = np.repeat(np.arange(100, 1350), 20)
    bits = np.tile(np.arange(4, 24), 1250)
    known = KnownBits(positions, bits, (outputs[positions] >> bits.astype(np.uint32) & 1).astype(np.int64))
    solution, (state,) = find_states(known, 99)
    assert solution.rank == 19_937
    assert (temper(state)[1:] == outputs[100:723]).all()
    known.values[20_000] ^= 1
    solution, states = find_states(known, 99)
    assert solution.contradictions > 0
    assert not states


# Certain bits are right.


@pytest.mark.parametrize(
    ("source", "draw", "dtype", "bits"),
    [
        (TorchNormal(0.3), lambda empty, g: 0.3 * empty.normal_(generator=g), torch.float32, (19, 21)),
        (TorchNormal(0.3), lambda empty, g: 0.3 * empty.normal_(generator=g), torch.float64, (46, 51)),
        (TorchNormal(0.1), lambda empty, g: (3 * empty.normal_(generator=g)) / 30, torch.float32, (19, 21)),
        (TorchUniform(0.7), lambda empty, g: 0.7 * (empty.uniform_(generator=g) - 0.5), torch.float32, (20, 24)),
        (TorchUniform(0.7), lambda empty, g: 0.7 * (empty.uniform_(generator=g) - 0.5), torch.float64, (49, 53)),
    ],
)
@pytest.mark.parametrize("size", [16, 50, 40_009])
def test_every_certain_bit_is_the_generators(source, draw, dtype, bits, size):
    values = {"a": torch.empty(size, dtype=dtype), "b": torch.empty(7, dtype=dtype), "c": torch.empty(33, dtype=dtype)}
    generator = derived_generator(size, str(dtype))
    outputs = torch_outputs(generator, 200_000)
    update = {name: draw(value, generator) for name, value in values.items()}
    known = source.known_bits(update, {name: torch.ones_like(v, dtype=torch.bool) for name, v in update.items()})
    assert (outputs[known.positions] >> known.bits.astype(np.uint32) & 1 == known.values).all()
    if size > 1000:
        assert bits[0] < len(known.values) / size < bits[1]


def test_every_certain_bit_of_laplace_noise_is_the_generators():
    for dtype in (torch.float32, torch.float64):
        generator = derived_generator(1, str(dtype))
        outputs = torch_outputs(generator, 100_000)
        defense = gradveil.defense("laplace-noise", std=0.3)
        update = defense.perturb({"w": torch.zeros(40_000, dtype=dtype)}, generator=generator)
        known = TorchLaplace(0.3 / 2**0.5).known_bits(update, {"w": torch.ones(40_000, dtype=torch.bool)})
        assert (outputs[known.positions] >> known.bits.astype(np.uint32) & 1 == known.values).all()
        assert len(known.values) > 20 * 40_000


def test_every_certain_bit_of_numpys_laplace_noise_is_the_generators():
    _, outputs = numpy_outputs(100_000)
    noise = np.random.RandomState(5).laplace(0, 0.2, 40_000)
    for dtype, least in ((torch.float32, 20), (torch.float64, 47)):
        update = {"w": torch.from_numpy(noise).to(dtype)}
        known = NumpyLaplace(0.2).known_bits(update, {"w": torch.ones(40_000, dtype=torch.bool)})
        assert (outputs[known.positions] >> known.bits.astype(np.uint32) & 1 == known.values).all()
        assert len(known.values) > least * 40_000


def test_an_error_of_the_server_costs_bits_and_never_makes_them_wrong():
    generator = derived_generator(3)
    outputs = torch_outputs(generator, 20_000)
    exact = torch.empty(16_000).normal_(generator=generator)
    everything = {"w": torch.ones(16_000, dtype=torch.bool)}
    counts = []
    for error in (1e-6, 1e-5, 1e-4):
        off = {"w": exact + error * (2 * torch.rand(16_000, generator=derived_generator(4)) - 1)}
        known = TorchNormal(1.0).known_bits(off, everything, {"w": torch.full((16_000,), error)})
        assert (outputs[known.positions] >> known.bits.astype(np.uint32) & 1 == known.values).all()
        counts.append(len(known.values))
    assert counts[0] > counts[1] > counts[2] > 0


# numpy's legacy normal noise.


def test_draws_that_numpy_discarded_are_found():
    pairs = 1500
    noise = np.random.RandomState(1).normal(0, 0.5, 2 * pairs)
    trials = polar_normals(np.random.RandomState(1).random_sample(6 * pairs))[1][:pairs]
    weights = np.random.default_rng(1).uniform(-0.05, 0.05, 2 * pairs).astype(np.float32)
    rounded = noise.astype(np.float32)
    values = ((weights + rounded).astype(float) - weights) / 0.5
    errors = (np.spacing(np.abs(weights + rounded)) + np.spacing(np.abs(rounded))).astype(float)
    one, two, error = invert_polar(values[0::2], values[1::2], (errors[0::2], errors[1::2]))
    found = align(one, two, error, np.ones(pairs, bool))
    assert len(found.pairs) > pairs / 4
    _, counts = np.unique(found.trials - trials[found.pairs], return_counts=True)
    assert counts.max() > 0.99 * len(found.pairs)
    assert len(align(one, two, np.full(pairs, 1e-4), np.ones(pairs, bool)).pairs) == 0  # too few bits are certain
    shuffled = np.random.default_rng(2).permutation(pairs)
    assert len(align(one[shuffled], two[shuffled], error[shuffled], np.ones(pairs, bool)).pairs) < 20


def test_numpys_normal_noise_is_drawn_again_before_and_after_an_index():
    words, _ = numpy_outputs(1)
    generator = numpy_generator(words)
    stream = generator.normal(size=20_000)
    values, trials = polar_normals(np.random.RandomState(5).random_sample(60_000))
    assert np.allclose(values.flatten()[:20_000], stream, rtol=1e-12, atol=0)
    for index in (0, 1000, 1001):  # an odd index: one value was left over from before
        start = 4 * int(trials[index // 2 + index % 2])
        everything = words
        for _ in range(start // 624):
            everything = next_block(everything)
        joined = np.concatenate([everything, next_block(everything)])
        state = joined[start % 624 :][:624]
        around = normals_around(state, index, 10_000)
        assert np.allclose(around, stream[index % 2 :][:10_000], rtol=1e-12, atol=0)


# Coordinates that are known to be zero.


def test_known_zeros_are_black_pixels_dead_units_and_disconnected_units():
    images, _ = batch(32)
    images[:, :, 0, :5] = 0
    task = network()
    weight = known_zeros(task, images)["1.weight"] >= 0
    dead = weight.all(1)
    assert (weight[~dead][:, :5]).all()
    assert not weight[~dead][:, 5:].any()
    assert (known_zeros(silence(task, "1.bias", [3]), images)["1.weight"][3] >= 0).all()
    cut = known_zeros(disconnect(network(nn.GELU), "3.weight", [4, 6]), images)
    assert (cut["1.weight"] >= 0).all(1).nonzero().flatten().tolist() == [4, 6]
    assert (cut["1.bias"] >= 0).nonzero().flatten().tolist() == [4, 6]


def test_known_zeros_are_embedding_rows_that_no_text_uses():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, words):
            return self.head(self.table((words * 49).round().long()).mean(1))

    task = gradveil.Task(Words(), input_shape=(6,), classes=3)
    words = torch.tensor([[0, 1, 2, 3, 4, 5], [5, 6, 7, 7, 7, 0]]) / 49
    rows = (known_zeros(task, words)["table.weight"] >= 0).all(1)
    assert rows.nonzero().flatten().tolist() == list(range(8, 50))


def test_names_of_layers_that_do_not_exist_are_refused():
    with pytest.raises(InputError, match="bias must be the name of a bias \\(1.bias, 3.bias\\), got '2.bias'"):
        silence(network(), "2.bias", [0])
    with pytest.raises(InputError, match="weight must be the name of a weight \\(1.weight, 3.weight\\), got '1.bias'"):
        disconnect(network(), "1.bias", [0])


# The attack.


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("gaussian-noise:std=0.3", TorchNormal(0.3)),
        ("dp-sgd:noise_multiplier=10", TorchNormal(10 / 4)),
        ("laplace-noise:std=0.3", TorchLaplace(0.3 / 2**0.5)),
    ],
)
def test_noise_of_an_explicit_generator_is_stripped(silenced, spec, source):
    task, zeros = silenced
    images, labels = batch()
    defense = gradveil.defense(spec)
    found = recover(defense.share(task, images, labels, generator=derived_generator(1)), zeros, source)
    silent = gradveil.defense("dp-sgd:noise_multiplier=0").share(task, images, labels)
    assert_stripped(found, silent if spec.startswith("dp-sgd") else task.gradients(images, labels), source.scale)


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("gaussian-noise:std=0.3", TorchNormal(0.3)),
        ("dp-sgd:noise_multiplier=10", TorchNormal(10 / 4)),
        ("laplace-noise:std=0.3", TorchLaplace(0.3 / 2**0.5)),
    ],
)
def test_noise_without_a_generator_is_not_stripped(silenced, spec, source):
    task, zeros = silenced
    images, labels = batch()
    found = recover(gradveil.defense(spec).share(task, images, labels), zeros, source, attempts=1)
    assert not found.verified
    assert "contradicted" in found.reason


def test_noise_of_perturb_without_a_generator_is_not_stripped(silenced):
    task, zeros = silenced
    found = recover(
        gradveil.defense("gaussian-noise:std=0.3").perturb(task.gradients(*batch())),
        zeros,
        TorchNormal(0.3),
        attempts=1,
    )
    assert not found.verified


def test_noise_of_the_operating_system_contradicts_itself(silenced):
    task, zeros = silenced
    rng = np.random.Generator(np.random.Philox(1))
    update = {
        name: value + 0.3 * torch.from_numpy(rng.standard_normal(tuple(value.shape), np.float32))
        for name, value in task.gradients(*batch()).items()
    }
    found = recover(update, zeros, TorchNormal(0.3), attempts=1)
    assert not found.verified
    assert found.update is None
    assert "contradicted" in found.reason


def test_the_wrong_order_of_layers_is_noticed(silenced):
    task, zeros = silenced
    update = gradveil.defense("gaussian-noise:std=0.3").perturb(
        {name: task.gradients(*batch())[name] for name in reversed(task.parameters)}, generator=derived_generator(1)
    )
    # The state is right, but the other layers are elsewhere in the stream, which only zeros in several layers reveal.
    assert (zeros["3.weight"] >= 0).any()
    found = recover({name: update[name] for name in task.parameters}, zeros, TorchNormal(0.3), attempts=1)
    assert not found.verified
    assert found.update is None


def test_too_few_zeros_are_counted(silenced):
    task, zeros = silenced
    few = {name: torch.full_like(groups, -1) for name, groups in zeros.items()}
    few["1.weight"][2] = zeros["1.weight"][2]
    update = gradveil.defense("gaussian-noise:std=0.3").share(task, *batch(), generator=derived_generator(1))
    found = recover(update, few, TorchNormal(0.3))
    assert not found.verified
    assert found.update is None
    assert re.fullmatch("too few coordinates .* they give 1.,... equations for 19,937 unknown bits", found.reason)
    nothing = {name: torch.full_like(groups, -1) for name, groups in zeros.items()}
    assert "they give 0 equations" in recover(update, nothing, TorchNormal(0.3)).reason


def test_wrong_zeros_are_left_out():
    task = silence(network(), "1.bias", [1, 2, 3, 4, 6])
    zeros = known_zeros(task, batch(512, seed=1)[0])
    truth = task.gradients(*batch())
    truth["1.weight"][6] += 0.5  # the guess was wrong for one unit of five
    update = gradveil.defense("gaussian-noise:std=0.3").perturb(truth, generator=derived_generator(1))
    found = recover(update, zeros, TorchNormal(0.3), attempts=16, generator=derived_generator(2))
    assert_stripped(found, truth, 0.3)
    assert found.wrong_zeros == 28 * 28


def test_layers_in_another_order_and_bad_scales_are_refused(silenced):
    task, zeros = silenced
    update = task.gradients(*batch())
    with pytest.raises(InputError, match="zeros must have the update's layers in their order"):
        recover(update, dict(reversed(zeros.items())), TorchNormal(0.3))
    with pytest.raises(ParameterError, match="scale must be a number above 0, got 0"):
        TorchNormal(0)
    with pytest.raises(ParameterError, match="float32 or float64, got torch.float16"):
        recover({name: value.half() for name, value in update.items()}, zeros, TorchNormal(0.3))


@pytest.mark.slow
def test_a_passive_server_reads_a_digit_behind_normal_noise():
    digits = data.load("mnist")
    model = models.create("mlp", input_shape=(1, 28, 28), classes=10, seed=0)
    task = gradveil.Task(model, input_shape=(1, 28, 28), classes=10)
    zeros = known_zeros(task, digits.train.batch(range(0, len(digits.train), len(digits.train) // 2000))[0])
    # A digit for which all of them are zero; wrong guesses have their own test.
    victims = (digits.test.batch([victim]) for victim in range(100))
    gradients = ((image, task.gradients(image, label)) for image, label in victims)
    image, truth = next(
        (image, gradient)
        for image, gradient in gradients
        if not any(gradient[name][zeros[name] >= 0].any() for name in zeros)
    )
    update = gradveil.defense("gaussian-noise:std=0.3").perturb(truth, generator=derived_generator(1))
    found = recover(update, zeros, TorchNormal(0.3), generator=derived_generator(2))
    assert_stripped(found, truth, 0.3)

    def read(gradients):
        bias = gradients["features.1.bias"]
        return (gradients["features.1.weight"] * bias[:, None]).sum(0) / bias.square().sum()

    assert (read(found.update) - image.flatten()).abs().max() < 1e-3
    assert (read(update) - image.flatten()).abs().max() > 0.3


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_opacus_noise_is_stripped_from_its_gradients(silenced):
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    task, zeros = silenced
    images, labels = batch()
    model = GradSampleModule(task.copy_model())
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4
    )
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.pre_step()
    update = {name: value.grad for name, value in zip(task.parameters, model.parameters(), strict=True)}
    truth = gradveil.defense("dp-sgd:noise_multiplier=0").share(task, images, labels)
    assert_stripped(recover(update, zeros, TorchNormal(1 / 4)), truth, 1 / 4)
