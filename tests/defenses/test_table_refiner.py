"""Refiner on rows of a table: robust rows, the evaluation network for its columns, and the attacker who undoes it."""

import dataclasses
import importlib.util
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import spearmanr

import gradveil
from gradveil import models
from gradveil.core.errors import DataError, InputError
from gradveil.core.randomness import source_of
from gradveil.defenses.refiner import Refiner, _utility
from gradveil.modality import Column, Table, Text, Words
from gradveil.models.fitted_evaluation import TableEvaluationNetwork, TextEvaluationNetwork, write_network

ROOT = Path(__file__).parents[2]
JOBS, TOWNS = ("baker", "clerk", "pilot", "nurse"), ("Bonn", "Ulm")
TABLE = Table(
    columns=(
        Column("age", 18, 80, middle=0.3, spread=0.1),
        Column("job", categories=JOBS, shares=(0.1, 0.2, 0.6, 0.1)),
        Column("hours", 0, 100, middle=0.4, spread=0.05),
        Column("town", categories=TOWNS, shares=(0.7, 0.3)),
    )
)
LABELS = torch.tensor([0, 1, 1])


def people(count, seed):
    """Rows in which the job says much about everything else."""
    generator = torch.Generator().manual_seed(seed)
    job = torch.multinomial(torch.tensor(TABLE.columns[1].shares), count, replacement=True, generator=generator)
    age = 25 + 10 * job + 4 * torch.rand(count, generator=generator)
    hours = 40 + 3 * torch.randn(count, generator=generator)
    return torch.stack([age, job, hours, (job > 1).float()], 1)


ROWS = TABLE.inputs_of(people(3, 5))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def task_on(table):
    torch.manual_seed(0)
    model = models.create("mlp", input_shape=(8,), classes=2, hidden=32, activation="gelu")
    return gradveil.Task(model, input_shape=(8,), classes=2, modality=table)


@pytest.fixture(scope="module")
def task():
    return task_on(TABLE)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("making", ROOT / "scripts" / "train_refiner_network.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.STEPS = 300
    return module


@pytest.fixture(scope="module")
def network(script):
    return script.train(TABLE, people(400, 1))


@pytest.fixture(scope="module")
def file(script, network, tmp_path_factory):
    path = tmp_path_factory.mktemp("refiner") / "network.safetensors"
    script.write(network, path, {"data": "people"})
    return str(path)


def share(task, file, memory, **parameters):
    defense = gradveil.defense("refiner", network=file, **parameters)
    return defense.share(task, ROWS, LABELS, generator=seeded(), memory=memory)


def distance(one, other):
    return torch.stack([(one[name] - other[name]).square().sum() for name in one]).sum().sqrt().item()


@pytest.mark.parametrize("blended", [False, True], ids=["replaced", "blended"])
def test_the_network_sees_more_random_cells_in_rows_that_have_more(script, network, blended):
    rows, levels = people(300, 2), torch.arange(5) / 4
    form = torch.full((300,), blended)
    with torch.no_grad():
        seen = [network(script.mixed(TABLE, rows, level.expand(300), form, seeded(3))) for level in levels]
    means = torch.stack(seen).mean(1)
    assert (means.diff() > 0.03).all()
    assert spearmanr(torch.cat(seen), levels.repeat_interleave(300)).statistic > 0.6


def test_training_leaves_or_replaces_whole_cells(script):
    rows, shares = people(200, 4), torch.full((200,), 0.5)
    own = TABLE.inputs_of(rows)
    half = script.mixed(TABLE, rows, shares, torch.zeros(200, dtype=torch.bool), seeded())
    assert torch.equal(TABLE.decode(half), half)
    changed = (TABLE.compared(half) != TABLE.compared(own)).sum(1)
    assert 0 < changed.max() <= 2
    assert torch.equal(script.mixed(TABLE, rows, 0 * shares, torch.zeros(200, dtype=torch.bool), seeded()), own)


@pytest.mark.parametrize("secure", [False, True], ids=["seeded", "secure"])
def test_noise_is_rows_of_which_every_category_is_equally_likely(secure):
    many = TABLE.inputs_of(people(4000, 6))
    noise = TABLE.noise(many, source_of(None if secure else seeded()))
    assert torch.equal(TABLE.decode(noise), noise)
    for place, expected in ((slice(1, 5), 0.25), (slice(6, 8), 0.5)):
        assert (noise[:, place].mean(0) - expected).abs().max() < 0.05
    for column in (0, 5):
        assert abs(noise[:, column].mean() - 0.5) < 0.03
        assert noise[:, column].std() > 0.25


def test_the_shared_gradient_is_at_most_epsilon_away(task, file):
    own = task.gradients(ROWS, LABELS)
    assert distance(share(task, file, {}, epsilon=1e-3), own) == pytest.approx(1e-3, rel=1e-3)
    assert distance(share(task, file, {}, epsilon=0.0), own) == 0


def test_the_search_starts_at_a_blend_with_random_rows(task, file):
    memory = {}
    share(task, file, memory, blend=0.3, iterations=1, step=1e-7)
    blend = torch.lerp(ROWS, TABLE.noise(ROWS, source_of(seeded())), 0.3)
    torch.testing.assert_close(memory["trained_on"], blend, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rounds", [1, 2], ids=["cold", "warm"])
def test_robust_rows_are_soft_rows_and_their_gradient_is_shared(task, file, rounds):
    memory = {}
    for _ in range(rounds):
        update = share(task, file, memory, epsilon=100.0, step=0.1)
    robust = memory["trained_on"]
    assert torch.equal(TABLE.project(robust), robust)
    assert (TABLE.compared(robust) != TABLE.compared(ROWS)).any()
    expected = task.gradients(robust, LABELS)
    for name, value in update.items():
        torch.testing.assert_close(value, expected[name])


def test_the_search_improves_its_objective_over_the_blended_start(task, file):
    defense, source = Refiner(network=file, iterations=20), source_of(seeded(1))
    own, start = task.gradients(ROWS, LABELS), torch.lerp(ROWS, TABLE.noise(ROWS, source), 0.5)
    weights = defense.search_weights(task, own, start, LABELS)

    def objective(rows):
        return _utility(task.gradients(rows, LABELS), own, weights) - defense.evaluation(task)(rows).mean()

    assert objective(defense.refine(task, own, LABELS, start, weights, 20)) < objective(start)


def test_reading_the_network_takes_nothing_from_the_generator_of_torch(task, file, network):
    state = torch.get_rng_state()
    read = gradveil.defense("refiner", network=file).evaluation(task)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(read(ROWS), network(ROWS))
    assert not any(value.requires_grad for value in read.parameters())


def test_networks_that_do_not_belong_to_the_table_are_refused(task, file, tmp_path, tiny_task, tiny_batch):
    with pytest.raises(InputError, match="make one for this table with python scripts/train_refiner_network.py"):
        share(task, "images", {})
    with pytest.raises(DataError, match="expected the weights of an evaluation network for tables"):
        share(task, str(tmp_path / "none.safetensors"), {})
    with pytest.raises(InputError, match="network is for text and tables"):
        gradveil.defense("refiner", network=file).share(tiny_task, *tiny_batch)
    age, *others = TABLE.columns
    for column in (dataclasses.replace(age, high=90), dataclasses.replace(age, name="height")):
        other = task_on(Table(columns=(column, *others)))
        with pytest.raises(
            InputError, match=r"expected an evaluation network for the table \w+, got one for \w+, which"
        ):
            share(other, file, {})
    text = Text(Words(("good", "film")), torch.randn(4, 8, generator=seeded()))
    write_network(TextEvaluationNetwork(text), tmp_path / "words.safetensors", {})
    with pytest.raises(InputError, match="which knows other columns"):
        share(task, str(tmp_path / "words.safetensors"), {})
    broken = tmp_path / "broken.safetensors"
    save_file({"first": torch.zeros(1)}, broken, {"table": TableEvaluationNetwork(TABLE).digest})
    with pytest.raises(DataError, match="make the file with"):
        share(task, str(broken), {})


def test_what_is_known_about_columns_beside_their_encoding_does_not_matter(task, file):
    age, *others = TABLE.columns
    other = task_on(Table(columns=(dataclasses.replace(age, middle=0.9, spread=0.3), *others)))
    assert share(other, file, {}).keys() == share(task, file, {}).keys()


class TestUndoneBlends:
    def test_the_attacker_of_rows_tells_the_likelier_of_two_categories(self, task, file):
        defense = gradveil.defense("refiner", network=file)
        assert list(defense.adapt(task)) == ["undo-blend", "solve-gradient"]
        random = TABLE.inputs_of(torch.tensor([[36.6, 0, 40, 1]]))
        own = TABLE.inputs_of(torch.tensor([[36.6, 2, 40, 0]]))
        found = defense.adapt(task)["undo-blend"].after(torch.lerp(own, random, 0.5))
        torch.testing.assert_close(found, own, rtol=0, atol=0.02)

    @pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
    def test_categories_are_those_of_a_slow_reference(self, share):
        table = Table(columns=(TABLE.columns[1],))
        blocks = torch.rand(20, 4, generator=seeded(), dtype=torch.float64)
        blocks[:, 0] = 0
        blocks = blocks / blocks.sum(1, keepdim=True)
        blocks = torch.lerp(torch.eye(4, dtype=torch.float64)[torch.arange(20) % 4], blocks, share)
        found = table.unblended(blocks, 0.5, 0.2).argmax(1).tolist()
        for block, category in zip(blocks, found, strict=True):
            share = min(float(1 - block.max()) / 0.75, 0.5)
            weights = []
            for i, frequency in enumerate(TABLE.columns[1].shares):
                total = 0.0
                for j in range(4):
                    blend = torch.zeros(4, dtype=torch.float64)
                    blend[i] += 1 - share
                    blend[j] += share
                    total += float((-(block - blend).square().sum() / (2 * 0.2**2)).exp())
                weights.append(frequency * total)
            assert category == max(range(4), key=weights.__getitem__)

    @pytest.mark.parametrize(("value", "share"), [(0.1, 0.2), (0.35, 0.5), (0.8, 0.4)])
    def test_numbers_are_the_median_of_those_that_the_blend_leaves_possible(self, value, share):
        blend = torch.tensor([[value, 1 - 0.75 * share, 0.75 * share, 0, 0]], dtype=torch.float64)
        found = Table(columns=TABLE.columns[:2]).unblended(blend, 0.5, 0.1)[0, 0].item()
        low, high = max(0, (value - share) / (1 - share)), min(1, value / (1 - share))
        possible = torch.linspace(low, high, 100_001, dtype=torch.float64)
        weights = (-(possible - 0.3).abs() / 0.1).exp()
        assert found == pytest.approx(float(possible[int((weights.cumsum(0) < weights.sum() / 2).sum())]), abs=1e-4)

    def test_intervals_far_from_the_median_have_one_too(self):
        capital = Column("capital", middle=0.0, spread=0.01)
        for low in (0.3, 0.9):
            edges = torch.tensor([low]), torch.tensor([low + 0.1])
            assert capital.median_between(*edges).item() == pytest.approx(low + 0.01 * math.log(2), abs=1e-4)

    def test_rows_that_are_not_blended_stay(self):
        torch.testing.assert_close(TABLE.unblended(ROWS, 0.5, 0.1), ROWS)
        numbers = Table(columns=TABLE.columns[::2])
        soft = torch.rand(4, 2, generator=seeded())
        assert numbers.unblended(soft, 0.5, 0.1) is soft
