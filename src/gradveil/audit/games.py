"""The identification game: members of a client's batch are hidden among candidates; an attacker has to find them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks import Attack, Identification, ThreatModel
from gradveil.attacks.problem import Progress
from gradveil.audit.cases import PreparedDefense
from gradveil.core import checks
from gradveil.core.errors import ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.data import Split
from gradveil.federation.job import as_batch
from gradveil.metrics.identification import class_mix
from gradveil.update import Announced, LocalSteps, Update

INCLUSIONS = ("batch", "eighth", "one")
"""How much of a batch is among the candidates: all of it, an eighth of it (at least one), or one example."""
DISTRACTORS = ("class", "nearest")
"""The candidates that are not members: of the members' classes, or also their nearest neighbours."""


def included(inclusion: str, batch_size: int) -> int:
    """How many examples of a batch are among the candidates.

    >>> [included(inclusion, 16) for inclusion in INCLUSIONS]
    [16, 2, 1]
    """
    checks.choice("game", "inclusion", inclusion, INCLUSIONS)
    return {"batch": batch_size, "eighth": max(1, batch_size // 8), "one": 1}[inclusion]


@dataclass(frozen=True, eq=False)
class Games:
    """Batches of clients, of which some examples are in one pool of candidates.

    All games have the same pool, so that an attacker computes the candidates' gradients only once.

    Args:
        split: where everything comes from.
        pool: ``[N]``, the places of the candidates in the split.
        batches: ``[games, batch size]``, the places of each client's examples.
        members: ``[games, N]``, True for the candidates that are in the game's batch.

    Example:
        >>> split = Split(torch.rand(60, 1, 2, 2), torch.arange(60) % 3)
        >>> games = draw_games(split, games=2, candidates=12, batch_size=4, inclusion="one")
        >>> games.members.sum(1).tolist(), games.batches.shape
        ([1, 1], torch.Size([2, 4]))
    """

    split: Split
    pool: Tensor
    batches: Tensor
    members: Tensor

    def __post_init__(self) -> None:
        for batch, members in zip(self.batches, self.members, strict=True):
            if not torch.equal(torch.isin(self.pool, batch), members) or len(torch.unique(batch)) < len(batch):
                raise ParameterError(
                    "game: expected the members to be exactly those candidates that are in the batch, each once, got "
                    "others; draw the rest of a batch from outside the pool"
                )
        if len(torch.unique(self.pool)) < len(self.pool):
            raise ParameterError("game: expected every candidate once, got some that are in the pool twice")

    @property
    def class_mix(self) -> float | None:
        """How likely the members' mix of classes is, see `metrics.identification.class_mix`; None without classes."""
        targets = self.split.targets[self.pool]
        if targets.ndim > 1 or targets.is_floating_point():
            return None
        return class_mix(targets, self.members)


def draw_games(
    split: Split,
    *,
    games: int,
    candidates: int,
    batch_size: int,
    inclusion: str = "batch",
    distractors: str = "class",
    seed: int = 0,
) -> Games:
    """Draw a pool of candidates and games with it; everything follows from the seed.

    With ``distractors="class"`` the pool is a random sample of the split. Members are drawn from it at random, so that
    members and distractors have the same distribution of classes, and nothing but the update tells them apart. With
    ``"nearest"`` the pool consists of random examples and, for each of them, its nearest neighbour of the same class
    that is not in the pool yet: every member has a near duplicate beside it.

    Args:
        split: the examples; none of them may have been used to train the model if the game is to measure the update.
        games: number of games.
        candidates: size of the pool.
        batch_size: examples behind each update.
        inclusion: how much of a batch is in the pool, one of `INCLUSIONS`; the rest comes from outside the pool.
        distractors: one of `DISTRACTORS`.
        seed: seed of all draws.
    """
    inside = included(inclusion, batch_size)
    checks.choice("game", "distractors", distractors, DISTRACTORS)
    checks.integer("game", "games", games, low=1)
    checks.integer("game", "batch_size", batch_size, low=1)
    checks.integer("game", "candidates", candidates, low=max(2, inside + 1, batch_size))
    needed = candidates + batch_size - inside
    if len(split) < needed:
        raise ParameterError(
            f"game: {candidates} candidates and the rest of a batch of {batch_size} need {needed} "
            f"{split.modality.unit}s, got {len(split)}; ask for fewer candidates"
        )
    order = torch.randperm(len(split), generator=derived_generator(seed, "pool"))
    pool = order[:candidates] if distractors == "class" else _with_neighbours(split, order, candidates)
    if split.targets.ndim == 1 and not split.targets.is_floating_point() and len(torch.unique(split.targets[pool])) < 2:
        raise ParameterError(
            f"game: expected candidates of two classes or more, got only class {int(split.targets[pool[0]])}; "
            "ask for more candidates or use other data"
        )
    outside = order[~torch.isin(order, pool)]
    batches, members = [], torch.zeros(games, candidates, dtype=torch.bool)
    for game in range(games):
        generator = derived_generator(seed, "game", game, inclusion, batch_size)
        chosen = torch.randperm(candidates, generator=generator)[:inside]
        rest = outside[torch.randperm(len(outside), generator=generator)[: batch_size - inside]]
        batch = torch.cat([pool[chosen], rest])
        batches.append(batch[torch.randperm(batch_size, generator=generator)])
        members[game, chosen] = True
    return Games(split, pool, torch.stack(batches), members)


def _with_neighbours(split: Split, order: Tensor, count: int) -> Tensor:
    """Random examples, each with its nearest neighbour of the same class."""
    flat, pool, free = split.inputs.flatten(1).float(), list[int](), torch.ones(len(split), dtype=torch.bool)
    for place in order.tolist():
        if len(pool) >= count:
            break
        if not free[place]:
            continue
        pool.append(place)
        free[place] = False
        others = (free & (split.targets == split.targets[place]).view(len(split), -1).all(1)).nonzero().flatten()
        if len(others):
            nearest = int(others[(flat[others] - flat[place]).square().sum(1).argmin()])
            pool.append(nearest)
            free[nearest] = False
    return torch.tensor(pool[:count])


def send(games: Games, prepared: PreparedDefense, *, local: LocalSteps | None = None, seed: int = 0) -> list[Update]:
    """What the server sees of each game's client.

    Args:
        games: who holds what.
        prepared: the clients' defense and the model.
        local: the clients' local steps.
        seed: seed of the clients' draws.
    """
    task, defense = prepared.task, prepared.defense
    updates: list[Update] = []
    for number, places in enumerate(games.batches):
        batch = as_batch(task, games.split.batch(places))
        updates += defense.visible(
            [
                defense.share(
                    task,
                    *batch,
                    generator=derived_generator(seed, "share", str(defense), number, device=task.device),
                    memory={},
                    announced=_announced(games, prepared, places, number, local, seed),
                    local=local,
                )
            ]
        )
    return updates


def play(
    games: Games,
    prepared: PreparedDefense,
    attack: Attack,
    *,
    updates: Sequence[Update] | None = None,
    among: Tensor | None = None,
    adaptive: bool | str = False,
    local: LocalSteps | None = None,
    local_known: str = "full",
    seed: int = 0,
    public: tuple[Tensor, Tensor] | None = None,
    progress: Progress = None,
) -> Identification:
    """Let every client send its update, and the attacker score the candidates.

    Args:
        games: who holds what; of several games with the same pool and batch size, any one, if `updates` has them all.
        prepared: the clients' defense and the model.
        attack: an attack that identifies.
        updates: what `send` returned for these games, if it was called before; None: call it.
        among: the candidates of each question about each client, see `Attack.identify`.
        adaptive: whether the attacker knows the defense, or the form in which it uses that knowledge.
        local: the clients' local steps.
        local_known: what the attacker knows about them, see `ThreatModel`.
        seed: seed of the clients' and the attacker's draws.
        public: examples that anybody has, none of them in the games, which the attacker may use; None: there are none.
        progress: called with (steps done, total steps, seconds left).
    """
    task, defense = prepared.task, prepared.defense
    updates = send(games, prepared, local=local, seed=seed) if updates is None else list(updates)
    threat = ThreatModel(
        batch_size=games.batches.shape[1],
        adaptive=adaptive,
        defense=defense,
        local=local,
        public=public,
        local_known=local_known,
    )
    candidates = as_batch(task, games.split.batch(games.pool))
    generator = derived_generator(seed, "attack", str(attack), device=task.device)
    return attack.identify(task, updates, candidates, threat, among=among, generator=generator, progress=progress)


def _announced(
    games: Games, prepared: PreparedDefense, places: Tensor, number: int, local: LocalSteps | None, seed: int
) -> Announced | None:
    """What another, honest client announces for a round, from examples that are neither candidates nor the victim's."""
    if not prepared.defense.announces:
        return None
    used = torch.cat([games.pool, places])
    others = torch.arange(len(games.split))
    others = others[~torch.isin(others, used)]
    if len(others) < len(places):
        raise ParameterError(
            f"game: under {prepared.defense.name} another client announces, from {len(places)} examples that are not "
            f"in the game, and {len(others)} are left; ask for fewer candidates"
        )
    task = prepared.task
    generator = derived_generator(seed, "announce", str(prepared.defense), number, device=task.device)
    order = torch.randperm(len(others), generator=derived_generator(seed, "publisher", number))
    batch = as_batch(task, games.split.batch(others[order[: len(places)]]))
    return prepared.defense.announce(task, *batch, generator=generator, memory={}, local=local)
