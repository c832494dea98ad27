"""The search for a strength, with costs that are known in closed form and with measured ones."""

import math

import pytest

import gradveil
from gradveil.audit.match import TRIES, Costs, Price, match
from gradveil.core.errors import ParameterError
from gradveil.federation import Training, train


def noise_power(defense):
    return 1000 * defense.std**2


@pytest.mark.parametrize("target", [1e-4, 0.5, 20.0])
def test_the_cost_at_the_strength_found_is_the_target(target):
    price = Price.parse(f"power={target}")
    ended = match(gradveil.defense("gaussian-noise"), price, noise_power)
    assert ended.found.std == pytest.approx(math.sqrt(target / 1000), rel=0.06)
    assert ended.cost == noise_power(ended.found)
    assert abs(ended.cost - target) <= price.tolerance == pytest.approx(0.1 * target)
    assert ended.tries <= TRIES
    assert ended.reason is None


def test_other_parameters_stay_and_compositions_are_searched_inside():
    defense = gradveil.ErrorFeedback(
        gradveil.Chain(gradveil.defense("none"), gradveil.defense("gradient-dropout", std=0.3)), decay=0.5
    )
    ended = match(defense, Price.parse("bytes=0.5"), lambda d: d.inner.parts[1].keep)
    assert ended.found.inner.parts[1].keep == pytest.approx(0.5, rel=0.05)
    assert (ended.found.inner.parts[1].std, ended.found.decay) == (0.3, 0.5)
    assert defense.inner.parts[1].keep == 0.8


@pytest.mark.parametrize(
    ("name", "cost", "message"),
    [
        ("gaussian-noise", lambda _: 1.0, "does not cost bytes=0.2 at any strength: bytes goes from 1 at std=0.0001"),
        ("gaussian-noise", lambda _: 0.1, "does not cost bytes=0.2 at any strength"),
        ("quantization", lambda d: 0.195 if d.bits < 7 else 0.9, None),
        ("quantization", lambda d: 0.1 if d.bits < 7 else 0.9, "comes no nearer to bytes=0.2 than 0.1, at bits="),
        ("secure-aggregation", lambda _: 0.2, "has no parameter that makes it stronger or weaker"),
    ],
)
def test_a_defense_that_cannot_be_matched_gets_a_reason(name, cost, message):
    ended = match(gradveil.defense(name), Price.parse("bytes"), cost)
    assert (ended.found is None) == (message is not None)
    assert message is None or message in ended.reason
    assert ended.tries <= TRIES


def no_games(_):
    raise AssertionError("only matching the share of right names plays games")


def test_accuracy_is_that_of_the_training(two_blobs):
    model = gradveil.models.create("mlp", input_shape=(1, 12, 12), classes=2)
    task = gradveil.Task(model, input_shape=(1, 12, 12), classes=2)
    training = Training(rounds=12, clients=3, lr=0.1, evaluate_every=4)
    defense = gradveil.defense("gaussian-noise", std=1.0)
    plain, defended = (train(task, two_blobs, d, training).accuracy for d in (gradveil.defense("none"), defense))
    assert Costs(task, two_blobs, training, no_games).of("accuracy")(defense) == defended / plain
    with pytest.raises(ParameterError, match="the undefended model is near chance .* train longer"):
        Costs(task, two_blobs, Training(rounds=1, clients=3, lr=1e-6), no_games).of("accuracy")(defense)


def test_power_and_bytes_follow_their_closed_forms(two_blobs):
    model = gradveil.models.create("mlp", input_shape=(1, 12, 12), classes=2)
    task = gradveil.Task(model, input_shape=(1, 12, 12), classes=2)
    costs = Costs(task, two_blobs, Training(rounds=1, clients=3), no_games)
    weak, strong = (costs.of("power")(gradveil.defense("gaussian-noise", std=std)) for std in (0.1, 0.2))
    assert strong / weak == pytest.approx(4)  # the same draws at twice the deviation
    assert costs.of("power")(gradveil.defense("none")) == 0
    assert costs.of("bytes")(gradveil.defense("none")) == 1
    assert costs.of("bytes")(gradveil.defense("top-k", keep=0.1)) < 0.3
    aligned = gradveil.defense("aligned-dual-pruning", keep=0.1)
    assert 0.05 < costs.of("bytes")(aligned) < 0.3  # with its share of the announcement
