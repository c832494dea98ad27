"""What a client keeps in the state that Flower holds for its node throughout a run."""

import dataclasses
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.defenses import Defense
from gradveil.federation.flower._messages import Instructions

MEMORY = "gradveil.memory"
ROUNDS = "gradveil.rounds"


class _ContextMemory(MutableMapping[str, Tensor]):
    """A defense's memory in the state that Flower keeps for a node throughout a run."""

    def __init__(self, state: RecordDict) -> None:
        if MEMORY not in state:
            state[MEMORY] = ArrayRecord()
        self._record = state.array_records[MEMORY]

    def __getitem__(self, key: str) -> Tensor:
        return torch.from_numpy(self._record[key].numpy())

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._record[key] = Array(value.detach().cpu().numpy())

    def __delitem__(self, key: str) -> None:
        del self._record[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


def memory(context: Context) -> MutableMapping[str, Tensor]:
    """The client's memory for ``defense.share(..., memory=...)``; it is kept in the node's context and never sent.

    >>> context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    >>> memory(context)["residual/weight"] = torch.tensor([1.0, 2.0])
    >>> memory(context)["residual/weight"].tolist()
    [1.0, 2.0]
    """
    return _ContextMemory(context.state)


@dataclass
class Ledger:
    """Which rounds a client has answered; it is kept in the node's context.

    Args:
        run: the id of the run.
        announced: the latest round of this run in which the client announced.
        trained: the latest round of this run in which the client trained.
        rounds: how many different rounds were answered, in all runs that share the context.

    Example:
        >>> ledger = Ledger("run 1")
        >>> ledger.claim(3, budget=None)
        >>> ledger
        Ledger(run='run 1', announced=0, trained=3, rounds=1)
    """

    run: str
    announced: int = 0
    trained: int = 0
    rounds: int = 0

    @classmethod
    def of(cls, context: Context) -> "Ledger":
        """The ledger of the current run in a node's context."""
        stored = context.state.config_records.get(ROUNDS)
        ledger = cls(str(context.run_id)) if stored is None else cls(**stored)  # type: ignore[arg-type]
        if ledger.run != str(context.run_id):  # every run counts from 1
            ledger = cls(str(context.run_id), rounds=ledger.rounds)
        return ledger

    def claim(self, number: int | None, budget: int | None, *, announce: bool = False) -> None:
        """Enter a round, or raise `InputError` if it was answered before or is beyond the budget.

        Args:
            number: the round's number; None: the next one.
            budget: how many rounds may be answered in total; None: any number.
            announce: the client announces in this round, and will train in it later.
        """
        latest = max(self.announced, self.trained)
        if number is None:
            number = latest + 1
        # A round may be announced and then trained, each once.
        if number < latest or number == (latest if announce else self.trained):
            raise InputError(
                f"flower: expected a round after {latest}, got round {number} again; a round is answered once and "
                "round numbers only grow, because several answers to one request average the noise away"
            )
        if number > latest:
            if budget is not None and self.rounds >= budget:
                raise InputError(
                    f"flower: this client answers {budget} rounds and has answered {self.rounds}; if more are wanted, "
                    "its owner must allow more: rounds="
                )
            self.rounds += 1
        if announce:
            self.announced = number
        else:
            self.trained = number

    def keep(self, context: Context) -> None:
        """Store it in the node's context."""
        context.state[ROUNDS] = ConfigRecord(dataclasses.asdict(self))


def answer_once(
    message: Message, context: Context, *, rounds: int | None = None, defense: Defense | None = None
) -> None:
    """Raise `InputError` for a train message of a round that this client has answered already.

    Call it in the first line of train functions that call `reply` themselves; `defense_mod` does the same by itself.

    Args:
        message: the train message.
        context: the node's context; the answered rounds are kept in its state.
        rounds: how many rounds this client answers in total; None: any number.
        defense: if it has error feedback, give it here: what an update carried that the server did not use is then owed
            again.

    Example:
        >>> from types import SimpleNamespace
        >>> context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        >>> instructions = Instructions(round=3, lr=0.1, defense="dp-sgd").record()
        >>> message = SimpleNamespace(content=RecordDict({"gradveil": instructions}))  # Flower makes real ones
        >>> answer_once(message, context)
        >>> answer_once(message, context)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        gradveil.core.errors.InputError: flower: expected a round after 3, got round 3 again; ...
    """
    budget = None if rounds is None else checks.integer("answer_once", "rounds", rounds, low=1)
    instructions, ledger = Instructions.required(message), Ledger.of(context)
    arrived = instructions.used >= ledger.trained  # before the ledger enters this round
    ledger.claim(instructions.round, budget, announce=instructions.announce)
    ledger.keep(context)
    if defense is not None:
        defense.settle(memory(context), arrived=arrived)
