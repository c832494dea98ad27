"""The game that audits a private defense: worst-case neighbours, and the defense's own code."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.core.randomness import Randomness, source_of
from gradveil.defenses import Defense
from gradveil.defenses.accounting import SampledGaussian
from gradveil.task import Task
from gradveil.update import LocalSteps

VALUES = 16
"""Parameters of the model of one game, half of them in each of two layers."""
TOGETHER = 64
"""Games that are played in one call of `share`; a call's time grows with the square of it."""


@dataclass(frozen=True)
class GameScores:
    """The scores of many games, in the order in which they were played.

    Args:
        with_member: log-likelihood ratios of the games with the member.
        without: those of the games without it.

    Example:
        >>> scores = GameScores(np.array([1.0, 3.0]), np.array([-1.0, 0.0]))
        >>> float(scores.with_member.mean() - scores.without.mean())
        2.5
    """

    with_member: NDArray[np.float64]
    without: NDArray[np.float64]


class _Games(nn.Module):
    """A model with separate parameters for every game, and the gradient of an example is the example itself.

    The parameters of a game are spread over two layers, because an example must be clipped over all layers together.
    """

    def __init__(self, games: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(games * VALUES // 2, 1, bias=False) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = inputs.flatten(2).unbind(1)
        outputs: Tensor = self.first(first) + self.second(second)
        return outputs


def game_task(games: int) -> Task:
    """The task of `games` games: inputs ``[N, 2, games, VALUES / 2]``; the gradient of an example is the example.

    >>> example = torch.rand(1, 2, 3, VALUES // 2)
    >>> gradients = game_task(3).gradients(example, torch.zeros(1))
    >>> bool(torch.equal(torch.stack(list(gradients.values())).view(example.shape), example))
    True
    """
    return Task(_Games(games), lambda outputs, _: outputs.mean(), input_shape=(2, games, VALUES // 2), classes=None)


def play(
    defense: Defense,
    *,
    clip: float,
    games: int,
    rounds: int = 1,
    batch_size: int = 1,
    examples: int | None = None,
    epochs: int = 1,
    length: float = 4.0,
    together: int = TOGETHER,
    generator: Randomness | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> GameScores:
    r"""Play games against a defense that promises a guarantee, with the data for which its promise is hardest to keep.

    A client has `examples` examples. All but one have the gradient -v, whose norm is `length` times the clip. The last
    one has the gradient v in half of the games (the member is there) and -v in the others (it was replaced), so that
    the sum of clipped gradients moves by twice the clip, or by more if the defense does not clip. Each round draws a
    batch without replacement and calls the defense's own ``share``. The attacker sees all updates and knows everything
    but the answer; the score is the log-likelihood ratio of the mechanism that the defense declares.

    Many games go into one call of ``share``: every game has its own block of parameters, outside which its examples'
    gradients are zero. Clipping acts on single examples, and noise on single coordinates, so each block is what its
    game alone would have sent (times a constant: the update is divided by the number of examples of all games).

    Args:
        defense: the defense; it must declare its mechanism (`Defense.sampled_gaussian`).
        clip: the norm to which it clips.
        games: number of games, half of them with the member.
        rounds: number of rounds in a game.
        batch_size: number of examples drawn in each round.
        examples: number of examples they are drawn from; default: all are in the batch.
        epochs: local epochs over the drawn batch, each one step.
        length: norm of every example's gradient, in units of `clip`; above 1, so that clipping has something to do.
        together: games in one call of ``share``.
        generator: randomness of the client, to repeat a simulation; default: a cryptographic stream, as in use.
        progress: called with (games played, games in all).

    References:
        Nasr et al., Adversary Instantiation: Lower Bounds for Differentially Private Machine Learning, S&P 2021
        (canaries that are gradients).

    Example:
        >>> import gradveil
        >>> scores = play(gradveil.defense("dp-sgd", clip=0.5, noise_multiplier=0.1), clip=0.5, games=128)
        >>> len(scores.with_member), bool(scores.with_member.min() > scores.without.max())
        (64, True)
    """
    owner = "play"
    checks.number(owner, "clip", clip, above=0)
    checks.integer(owner, "games", games, low=2)
    checks.integer(owner, "epochs", epochs, low=1)
    checks.number(owner, "length", length, low=1)
    checks.integer(owner, "together", together, low=1)
    examples = batch_size if examples is None else examples
    local = LocalSteps(epochs=epochs) if epochs > 1 else None
    mechanism = defense.sampled_gaussian(rounds=rounds, batch_size=batch_size, examples=examples, local=local)
    if mechanism is None or mechanism.sampling != "fixed" or not mechanism.noise_multiplier or not rounds:
        raise InputError(
            f"play: {defense} promises nothing for batches of a fixed size, so games could refute nothing; expected a "
            "defense that clips every example and adds normal noise"
        )
    games += games % 2
    together = min(together + together % 2, games)
    direction = torch.full((2, VALUES // 2), VALUES**-0.5)
    has_member = torch.arange(games) % 2 == 0
    scores = torch.zeros(games, dtype=torch.float64)
    tasks = {size: game_task(size) for size in {together, games % together} if size}
    for first in range(0, games, together):
        members = has_member[first : first + together]
        for _ in range(rounds):
            batch = _drawn(members, mechanism, generator)
            inputs = length * clip * _in_blocks(batch, direction)
            task, targets = tasks[len(members)], torch.zeros(len(inputs))
            update = defense.share(task, inputs, targets, generator=generator, local=local)
            values = torch.stack([value.double() for value in update.values()]).view(2, len(members), VALUES // 2)
            sums = len(inputs) * torch.einsum("lgv,lv->g", values, direction.double()) / clip
            scores[first : first + together] += _log_ratio(sums, mechanism)
        progress(min(first + together, games), games)
    return GameScores(scores[has_member].numpy(), scores[~has_member].numpy())


def _drawn(members: Tensor, mechanism: SampledGaussian, generator: Randomness | None) -> Tensor:
    """The signs of the examples in the batch of each game, ``[games, batch size]``."""
    signs = torch.full((len(members), mechanism.examples), -1.0)
    signs[:, 0] = torch.where(members, 1.0, -1.0)
    if mechanism.rate == 1:
        return signs
    order = source_of(generator).uniform(signs.double()).argsort(1)[:, : mechanism.batch_size]
    return signs.gather(1, order)


def _in_blocks(signs: Tensor, direction: Tensor) -> Tensor:
    """Examples with these signs along `direction`, each in the block of its game: ``[examples, 2, games, values]``."""
    games, batch_size = signs.shape
    inputs = torch.zeros(games, batch_size, 2, games, VALUES // 2)
    game = torch.arange(games)
    inputs[game, :, :, game] = signs[:, :, None, None] * direction
    return inputs.flatten(0, 1)


def _log_ratio(sums: Tensor, mechanism: SampledGaussian) -> Tensor:
    """The log-likelihood ratio of a round; `sums` are noisy sums of clipped gradients along the member's."""
    spread = mechanism.noise_multiplier * math.sqrt(mechanism.passes)
    mu = 2 * mechanism.passes / spread
    # Without the member all examples have -1; then this is standard normal, and around mu if the member is drawn.
    standard = (sums + mechanism.passes * mechanism.batch_size) / spread
    ratio = mu * standard - mu**2 / 2
    if mechanism.rate == 1:
        return ratio
    rate = ratio.new_tensor(mechanism.rate)
    return torch.logaddexp(torch.log1p(-rate), rate.log() + ratio)
