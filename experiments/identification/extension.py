"""Which of N candidates a client trained on: games of identification under every defense.

identification: games with one pool of candidates from the test split. If asked for, some epochs of SGD on the training
split come first (`trained`); these weights are kept in the folder `checkpoints`, for the other cases. Cases that differ
only in how much of a batch is among the candidates have the same candidates, so they are attacked together; plain and
adaptive attackers see the same updates. With `clients` "shared" they have the same clients, too: each case is a
question about the same updates, from whose candidates the rest of the batch has been taken out.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

import gradveil
from gradveil.attacks._adaptive import find_knowledge
from gradveil.attacks.problem import Progress
from gradveil.audit import cases
from gradveil.audit.games import INCLUSIONS, Games, draw_games, included, play, send
from gradveil.audit.store import slug
from gradveil.core.randomness import derived_generator
from gradveil.core.storage import save_atomically
from gradveil.defenses.knowledge import NOTHING_TO_KNOW
from gradveil.federation.job import as_batch, evaluate
from gradveil.metrics.identification import summary
from gradveil.update import Update
from kinds import Row, Session, dataset_of, local_of, public_of

MOST_VALUES = 1 << 27
"""Cases are attacked together if their updates have no more values than this: half a GiB."""
VARYING = ("name", "inclusion", "attacker", "adaptive")
"""The settings in which cases that share clients and candidates differ."""


def identification(case: Row, session: Session) -> Row:
    """Play the games of a case."""
    together = _together(json.dumps({key: case[key] for key in case if key not in VARYING}), session.folder)
    members, scores, seconds = together.play(case["inclusion"], case["adaptive"], session.progress)
    figures = summary(scores, members)
    row: Row = {name: estimate.value for name, estimate in figures.items()}
    row |= {f"{name}_interval": [estimate.low, estimate.high] for name, estimate in figures.items()}
    return {
        **row,
        "attack_spec": str(together.attack),
        "attack_seconds": seconds,
        "model_accuracy": together.accuracy,
    }


class Together:
    """Cases with the same clients' model, defense, batch size and candidates.

    Args:
        case: their settings.
        folder: the folder of the results.
    """

    def __init__(self, case: Row, folder: Path) -> None:
        self.case, self.dataset = case, dataset_of(case)
        task = cases.build_task(self.dataset, case["model"], seed=case["seed"], norms=case.get("norms"))
        self.accuracy = None
        if case.get("trained"):
            weights = trained_weights(case, folder, task)
            task = cases.build_task(self.dataset, case["model"], seed=case["seed"], weights=weights)
            self.accuracy = evaluate(task, self.dataset.test)[0]
        self.attack = gradveil.attack(case["attack"])
        defense, public = gradveil.defense(case["defense"]), public_of(case, task)
        self.prepared = cases.prepare(task, defense, self.attack, public=public, seed=case["seed"])
        self.shared = case.get("clients") == "shared" and case["batch_size"] > 1
        self.fits = len(INCLUSIONS) * case["games"] * task.size <= MOST_VALUES and case["batch_size"] > 1
        self._sent: dict[str, tuple[Games, list[Update]]] = {}
        self._found: dict[tuple[str, bool], tuple[Tensor, float]] = {}

    def play(self, inclusion: str, adaptive: bool, progress: Progress) -> tuple[Tensor, Tensor, float]:
        """The members and the scores ``[games, candidates]`` of a case, and the seconds that the attack took."""
        adaptive = adaptive and self._tells_something()
        if self.shared:
            return self._ask(inclusion, adaptive, progress)
        if (inclusion, adaptive) not in self._found:
            sent = {each: self._send(each) for each in (INCLUSIONS if self.fits else [inclusion])}
            found = play(
                sent[inclusion][0],
                self.prepared,
                self.attack,
                updates=[update for _, updates in sent.values() for update in updates],
                adaptive=adaptive,
                local=local_of(self.case),
                seed=self.case["seed"],
                progress=progress,
            )
            for each, scores in zip(sent, found.scores.cpu().split(self.case["games"]), strict=True):
                self._found[each, adaptive] = scores, found.seconds / len(sent)
        return self._sent[inclusion][0].members, *self._found[inclusion, adaptive]

    def _ask(self, inclusion: str, adaptive: bool, progress: Progress) -> tuple[Tensor, Tensor, float]:
        """As `play`, with one update for all inclusions."""
        games, updates = self._send("batch")
        asked = questions(games, self.case["candidates"])
        key = "all", adaptive
        if key not in self._found:
            found = play(
                games,
                self.prepared,
                self.attack,
                updates=updates,
                among=asked,
                adaptive=adaptive,
                local=local_of(self.case),
                seed=self.case["seed"],
                progress=progress,
            )
            self._found[key] = found.scores.cpu(), found.seconds / len(INCLUSIONS)
        scores, seconds = self._found[key]
        question = INCLUSIONS.index(inclusion)
        among = asked[:, question]
        members, scored = (part[among].view(len(among), -1) for part in (games.members, scores[:, question]))
        return members, scored, seconds

    def _tells_something(self) -> bool:
        """Whether knowing the defense changes the attack."""
        threat = gradveil.ThreatModel(
            batch_size=self.case["batch_size"],
            adaptive=True,
            defense=self.prepared.defense,
            local=local_of(self.case),
        )
        return find_knowledge(self.attack.name, self.prepared.task, threat) != next(iter(NOTHING_TO_KNOW.values()))

    def _send(self, inclusion: str) -> tuple[Games, list[Update]]:
        """The games with this much of a batch among the candidates, and the clients' updates."""
        if inclusion not in self._sent:
            if not self.fits:
                self._sent.clear()
            settings = {key: self.case[key] for key in ("games", "candidates", "batch_size", "distractors", "seed")}
            if self.shared:
                settings["candidates"] += self.case["batch_size"]
            games = draw_games(self.dataset.test, inclusion=inclusion, **settings)
            updates = send(games, self.prepared, local=local_of(self.case), seed=self.case["seed"])
            self._sent[inclusion] = games, updates
        return self._sent[inclusion]


def questions(games: Games, candidates: int) -> Tensor:
    """For each game and inclusion, ``[games, inclusions, pool]``, the candidates: some of the batch, and others.

    Args:
        games: games whose batches lie in the pool.
        candidates: how many candidates a question is about.
    """
    asked = torch.zeros(len(games.batches), len(INCLUSIONS), len(games.pool), dtype=torch.bool)
    for game, batch in enumerate(games.batches):
        others = (~games.members[game]).nonzero().flatten()
        for question, inclusion in enumerate(INCLUSIONS):
            inside = included(inclusion, len(batch))
            asked[game, question] = torch.isin(games.pool, batch[:inside])
            asked[game, question, others[: candidates - inside]] = True
    return asked


@lru_cache(maxsize=1)
def _together(settings: str, folder: Path) -> Together:
    return Together(json.loads(settings), folder)


def trained_weights(case: Row, folder: Path, task: gradveil.Task) -> Path:
    """A file of weights after some epochs of SGD; made by the first case that needs it."""
    settings = case["trained"]
    name = f"{case['dataset']} {case['model']} {case.get('norms')} {settings} seed {case['seed']}"
    path = folder / "checkpoints" / f"{slug(name)}.safetensors"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    model, split = task.copy_model(), dataset_of(case).train
    optimiser = torch.optim.SGD(model.parameters(), lr=settings["lr"])
    for epoch in range(settings["epochs"]):
        order = torch.randperm(len(split), generator=derived_generator(case["seed"], "epoch", epoch))
        for places in torch.split(order, settings["batch_size"]):
            inputs, targets = as_batch(task, split.batch(places))
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(task.normalised(inputs)), targets).backward()
            optimiser.step()
    save_atomically(path, dict(model.state_dict()), {})
    return path


KINDS: dict[str, Callable[[Row, Session], Row]] = {"identification": identification}
