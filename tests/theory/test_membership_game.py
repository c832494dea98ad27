"""The game: that many at once are what each would be alone, and that it finds what is broken."""

import dataclasses
import math

import pytest
import torch
from scipy.stats import ks_2samp, kstest, norm

import gradveil
from gradveil.core.errors import InputError
from gradveil.core.randomness import SecureSource
from gradveil.defenses.dp_sgd import DPSGD
from gradveil.theory import empirical_privacy, play
from gradveil.theory.membership_game import VALUES, game_task


class Replayed(SecureSource):
    """The secure path of a defense, with noise that the test supplies layer by layer."""

    def __init__(self, noise):
        super().__init__()
        self.noise = list(noise)

    def add_normal(self, values, std, **_):
        return values + std * self.noise.pop(0).view(values.shape)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_block_is_what_its_game_alone_would_have_sent(batch_size):
    games, defense = 6, gradveil.defense("dp-sgd", clip=0.5, noise_multiplier=2.0)
    torch.manual_seed(0)
    alone = torch.randn(games, batch_size, 2, 1, VALUES // 2) * torch.rand(games, batch_size, 1, 1, 1)
    noise = torch.randn(2, games, VALUES // 2, dtype=torch.float64)
    blocks = torch.zeros(games, batch_size, 2, games, VALUES // 2)
    for game in range(games):
        blocks[game, :, :, game] = alone[game, :, :, 0]
    blocks = blocks.flatten(0, 1)
    together = defense.share(game_task(games), blocks, torch.zeros(len(blocks)), generator=Replayed(noise))
    sums = torch.stack(list(together.values())).view(2, games, -1) * len(blocks)
    for game in range(games):
        update = defense.share(game_task(1), alone[game], torch.zeros(batch_size), generator=Replayed(noise[:, game]))
        expected = torch.stack(list(update.values())).view(2, -1) * batch_size
        torch.testing.assert_close(sums[:, game], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("generator", [None, 0], ids=["in use", "seeded"])
@pytest.mark.parametrize(
    "setting",
    [{}, {"batch_size": 3}, {"rounds": 3}, {"epochs": 2, "batch_size": 2}],
    ids=["one round", "a batch", "rounds", "local epochs"],
)
def test_scores_are_those_of_the_declared_gaussian(setting, generator):
    if generator is not None:
        generator = torch.Generator().manual_seed(generator)
    defense = gradveil.defense("dp-sgd", clip=0.2, noise_multiplier=2.0)
    scores = play(defense, clip=0.2, games=1000, generator=generator, **setting)
    mu = 2 / 2.0 * math.sqrt(setting.get("rounds", 1) * setting.get("epochs", 1))
    assert kstest(scores.with_member, norm(mu**2 / 2, mu).cdf).pvalue > 1e-5
    assert kstest(scores.without, norm(-(mu**2) / 2, mu).cdf).pvalue > 1e-5


def test_games_played_together_are_distributed_as_those_played_in_pairs():
    defense = gradveil.defense("dp-sgd", noise_multiplier=1.0)
    setting = {"clip": 1.0, "games": 600, "batch_size": 2, "examples": 4, "rounds": 2}
    many, few = play(defense, **setting), play(defense, **setting, together=2)
    assert len(many.without) == len(few.without) == 300
    for one, other in zip(vars(many).values(), vars(few).values(), strict=True):
        assert ks_2samp(one, other).pvalue > 1e-5


def test_a_member_that_is_rarely_drawn_is_rarely_seen():
    defense = gradveil.defense("dp-sgd", noise_multiplier=0.1)
    scores = play(defense, clip=1.0, games=2000, batch_size=1, examples=10)
    drawn = (scores.with_member > 0).mean()
    assert 0.06 < drawn < 0.14
    assert (scores.without < 0).all()


def test_an_odd_number_of_games_is_rounded_up():
    scores = play(gradveil.defense("dp-sgd"), clip=1.0, games=67)
    assert len(scores.with_member) == len(scores.without) == 34


@dataclasses.dataclass(frozen=True, repr=False)
class HalfTheNoise(DPSGD):
    name = "half-the-noise"

    def step_gradients(self, client):
        return DPSGD(clip=self.clip, noise_multiplier=self.noise_multiplier / 2).step_gradients(client)


@dataclasses.dataclass(frozen=True, repr=False)
class ClippedByLayer(DPSGD):
    """Clips every layer by itself, so that an example can be longer than the clip by the root of the layers."""

    name = "clipped-by-layer"

    def step_gradients(self, client):
        layers = []
        for layer in range(2):
            inputs = torch.zeros_like(client.inputs)
            inputs[:, layer] = client.inputs[:, layer]
            noiseless = DPSGD(clip=self.clip, noise_multiplier=0.0)
            layers.append(noiseless.step_gradients(dataclasses.replace(client, inputs=inputs)))
        std = self.noise_multiplier * self.clip / len(client.inputs)
        return {name: client.source.add_normal(layers[0][name] + layers[1][name], std) for name in layers[0]}


@pytest.mark.parametrize("broken", [HalfTheNoise, ClippedByLayer])
def test_what_is_broken_is_found_and_what_is_not_is_not(broken):
    for form, is_broken in ((DPSGD, False), (broken, True)):
        scores = play(form(clip=0.5, noise_multiplier=1.0), clip=0.5, games=4000)
        found = empirical_privacy(scores.with_member, scores.without)
        assert (found.mu > 2.0) == is_broken


def test_what_promises_nothing_is_refused():
    for spec in ("none", "gaussian-noise:std=10", "dp-sgd:noise_multiplier=0", "top-k"):
        with pytest.raises(InputError, match="promises nothing for batches of a fixed size"):
            play(gradveil.defense(spec), clip=1.0, games=10)
