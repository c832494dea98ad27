"""Damaged checkpoints: each one is refused with a reason, or the training ends as if nothing had happened.

The default run damages `DEFAULT` checkpoints. `GRADVEIL_FUZZ=600` in the environment makes it 600. Run as a script with
a number (``python tests/federation/test_checkpoint_damage.py 600``), this file prints the outcomes of that many.
"""

import json
import math
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradveil
from gradveil import models
from gradveil.core.errors import GradveilError
from gradveil.data import Dataset, Split
from gradveil.federation import RoundRecord, Training, TrainingResult, train
from gradveil.federation.checkpoint import FILE, MEMORIES

DEFAULT = 60
STOPPED_AFTER = 5  # rounds; the checkpoint is of round 4
TIMES = ("gradient_seconds", "defense_seconds", "aggregation_seconds")
ABOUT = "gradveil"  # the entry of a file's metadata that holds its JSON


@dataclass(frozen=True)
class Job:
    """A training run that is stopped, damaged and resumed."""

    defense: str
    training: Training

    def run(self, folder: Path | None, *, resume: bool = False, watch: Any = None) -> TrainingResult:
        torch.manual_seed(0)
        model = models.create("mlp", input_shape=(1, 8, 8), classes=2)
        task = gradveil.Task(model, input_shape=(1, 8, 8), classes=2)
        return train(
            task,
            blobs(),
            gradveil.defense(self.defense),
            self.training,
            checkpoint=folder,
            resume=resume,
            watch=watch,
            ram_bytes=20_000,
            transport=drop_some,
        )


FEEDBACK = Job(
    "top-k:keep=0.1+error-feedback",
    Training(
        rounds=6,
        clients=5,
        clients_per_round=3,
        batch_size=8,
        lr=0.05,
        optimiser="adam",
        evaluate_every=2,
        checkpoint_every=2,
        seed=4,
    ),
)
PRIVATE = Job("dp-sgd:clip=1.0,noise_multiplier=1.0", replace(FEEDBACK.training, optimiser="sgd", momentum=0.5))


def blobs() -> Dataset:
    generator = torch.Generator().manual_seed(1)

    def split(count: int) -> Split:
        images = torch.randint(0, 256, (count, 1, 8, 8), generator=generator).to(torch.uint8)
        return Split(images, images.float().mean((1, 2, 3)).gt(127).long())

    return Dataset("blobs", ("dark", "bright"), "made by the test", split(180), split(40))


def drop_some(number: int, client: int, message: bytes) -> list[bytes]:
    """Every third message is lost, every fourth arrives twice."""
    which = number + client
    return [] if which % 3 == 0 else [message, message] if which % 4 == 0 else [message]


class Stopped(Exception):
    pass


@dataclass(frozen=True)
class Victim:
    """A stopped run, its expected result, an earlier state of its folder and the folder of another run."""

    job: Job
    folder: Path
    earlier: Path
    other: Path
    undamaged: TrainingResult

    @classmethod
    def make(cls, job: Job, root: Path) -> "Victim":
        folder, earlier, other, copy = (root / name for name in ("folder", "earlier", "other", "copy"))

        def stop(record: RoundRecord) -> None:
            if record.round == 2:
                shutil.copytree(folder, earlier)
            if record.round == STOPPED_AFTER - 1:
                raise Stopped

        def stop_other(record: RoundRecord) -> None:
            if record.round == STOPPED_AFTER - 1:
                raise Stopped

        with pytest.raises(Stopped):
            job.run(folder, watch=stop)
        with pytest.raises(Stopped):
            replace(job, training=replace(job.training, seed=5)).run(other, watch=stop_other)
        shutil.copytree(folder, copy)
        return cls(job, folder, earlier, other, job.run(copy, resume=True))


def difference(expected: TrainingResult, got: TrainingResult, ran: set[int]) -> str | None:
    """What differs from the expected result; the times of the rounds that ran again may differ."""
    pairs = [(value, got.task.parameters[name]) for name, value in expected.task.parameters.items()]
    if not all(torch.equal(one, other) for one, other in pairs):
        return "other weights"
    figures = [
        (
            result.privacy,
            result.history,
            result.faults,
            result.diverged,
            result.accuracy,
            result.loss,
            # As text, because a round without updates has NaN bytes.
            [
                repr(replace(record, **dict.fromkeys(TIMES, 0.0)) if record.round in ran else record)
                for record in result.rounds
            ],
        )
        for result in (expected, got)
    ]
    return None if figures[0] == figures[1] else "other figures"


# -- damage ----------------------------------------------------------------------------------------------------------

Damage = Callable[[random.Random, Victim, Path], None]


def some_file(rng: random.Random, folder: Path) -> Path:
    """The checkpoint, or a memory that it refers to."""
    files = memories(folder)
    return folder / FILE if not files or rng.random() < 0.6 else rng.choice(files)


def memories(folder: Path) -> list[Path]:
    """The memories that the checkpoint refers to; there may be newer ones, which are never read."""
    if not (folder / FILE).exists():
        return []
    with edited(folder / FILE, write=False) as (_, about, _data):
        named = {f"client-{entry[0]}-{entry[1]}.safetensors" for entry in about["memories"]}
    return sorted(folder / MEMORIES / name for name in named)


@contextmanager
def edited(path: Path, *, write: bool = True) -> Iterator[tuple[dict[str, Any], Any, bytearray]]:
    """Header, JSON and tensors of a file, written back by somebody who knows safetensors but not gradveil's digest."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    about = json.loads(header["__metadata__"][ABOUT])
    yield header, about, data
    if write:
        if ABOUT in header.get("__metadata__", {}):
            header["__metadata__"][ABOUT] = json.dumps(about)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def flip_a_bit(rng: random.Random, _victim: Victim, folder: Path) -> None:
    path = some_file(rng, folder)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def flip_a_bit_of_the_header(rng: random.Random, _victim: Victim, folder: Path) -> None:
    path = some_file(rng, folder)
    content = bytearray(path.read_bytes())
    content[rng.randrange(8 + int.from_bytes(content[:8], "little"))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut_short(rng: random.Random, _victim: Victim, folder: Path) -> None:
    path = some_file(rng, folder)
    os.truncate(path, rng.choice([0, 4, 8, rng.randrange(path.stat().st_size), path.stat().st_size - 1]))


def append(rng: random.Random, _victim: Victim, folder: Path) -> None:
    with some_file(rng, folder).open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 64)))


def overwrite_a_block(rng: random.Random, _victim: Victim, folder: Path) -> None:
    path = some_file(rng, folder)
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content) - 64)
    block = content[start : start + 64]
    content[start : start + 64] = rng.choice([bytes(64), b"\xff" * 64, rng.randbytes(64)])
    if content[start : start + 64] == block:  # it was zeros already
        content[start] ^= 1
    path.write_bytes(content)


def swap_tensors(rng: random.Random, _victim: Victim, folder: Path) -> None:
    with edited(folder / FILE) as (header, _, data):
        names = [name for name in header if name != "__metadata__"]
        one = rng.choice(names)
        alike = [name for name in names if name != one and header[name]["shape"] == header[one]["shape"]]
        # Every tensor of this network has one of the same shape: its moment. Two that are equal are not swapped.
        other = rng.choice([name for name in alike if tensor_of(header, name, data) != tensor_of(header, one, data)])
        header[one]["data_offsets"], header[other]["data_offsets"] = (
            header[other]["data_offsets"],
            header[one]["data_offsets"],
        )


def tensor_of(header: dict[str, Any], name: str, data: bytearray) -> bytes:
    start, end = header[name]["data_offsets"]
    return bytes(data[start:end])


def rename_a_tensor(rng: random.Random, _victim: Victim, folder: Path) -> None:
    with edited(some_file(rng, folder)) as (header, _, _data):
        name = rng.choice([name for name in header if name != "__metadata__"])
        header[rng.choice([f"{name}x", name[:-1], "", name.replace("/", "."), "second/" + name])] = header.pop(name)


def change_a_type(rng: random.Random, _victim: Victim, folder: Path) -> None:
    with edited(some_file(rng, folder)) as (header, _, _data):
        entry = header[rng.choice([name for name in header if name != "__metadata__"])]
        entry["dtype"] = rng.choice(["F64", "F16", "I32", "F32", "U32", "BF16", "Q9"])
        if math.prod(entry["shape"]) and entry["dtype"] in ("F16", "BF16"):  # as many bytes, twice the values
            entry["shape"] = [*entry["shape"][:-1], 2 * entry["shape"][-1]]
        if entry["dtype"] == "F32":
            entry["dtype"] = "I32"


def change_a_shape(rng: random.Random, _victim: Victim, folder: Path) -> None:
    with edited(some_file(rng, folder)) as (header, _, _data):
        entry = header[rng.choice([name for name in header if name != "__metadata__"])]
        entry["shape"] = rng.choice([[*entry["shape"], 1], [math.prod(entry["shape"]), 1, 1], [2**40, 2**40]])


def not_finite(rng: random.Random, _victim: Victim, folder: Path) -> None:
    with edited(some_file(rng, folder)) as (header, _, data):
        names = [name for name in header if name != "__metadata__" and header[name]["dtype"] == "F32"]
        start, end = header[rng.choice([name for name in names if math.prod(header[name]["shape"])])]["data_offsets"]
        place = start + 4 * rng.randrange((end - start) // 4)
        data[place : place + 4] = rng.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f"])


def change_a_number(rng: random.Random, _victim: Victim, folder: Path) -> None:
    """Anywhere in the JSON: the round, a client's rounds, a version, a position, a loss."""
    with edited(some_file(rng, folder)) as (_, about, _data):
        numbers = [
            (container, key)
            for container, key, value in leaves(about)
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        if not numbers:  # a memory without sparse tensors
            about["sparse"] = {"residual/x": [2**62]}
            return
        container, key = rng.choice(numbers)
        if isinstance(container[key], float):
            container[key] = rng.choice([container[key] * 1.5 + 1, -1.0, 10 * container[key] + 3])
        else:
            container[key] = rng.choice([container[key] + change for change in (-2, -1, 1, 2)])


def change_the_rounds_of_epsilon(rng: random.Random, _victim: Victim, folder: Path) -> None:
    with edited(folder / FILE) as (_, about, _data):
        rounds_of = about["rounds_of"]
        how = rng.randrange(4)
        if how == 0:
            rng.choice(rounds_of)[1] = rng.choice([0, 1]) - 1
        elif how == 1:
            rounds_of.pop(rng.randrange(len(rounds_of)))
        elif how == 2:
            about["rounds_of"] = []
        else:
            rng.choice(rounds_of)[0] += 1


def change_the_structure(rng: random.Random, _victim: Victim, folder: Path) -> None:
    with edited(some_file(rng, folder)) as (_, about, _data):
        container, key, value = rng.choice([*leaves(about), *((about, key, about[key]) for key in about)])
        how = rng.randrange(4)
        if how == 0 and isinstance(container, dict):
            del container[key]
        elif how == 1:
            container[key] = [value, value]
        elif how == 2:
            container[key] = "x" if value != "x" else "y"
        else:
            container[key] = {"round": value}


def leaves(container: Any) -> list[tuple[Any, Any, Any]]:
    """(container, key, value) of every value in JSON that contains no other."""
    found = []
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        found += leaves(value) if isinstance(value, dict | list) else [(container, key, value)]
    return found


def drop_the_text(rng: random.Random, _victim: Victim, folder: Path) -> None:
    with edited(some_file(rng, folder)) as (header, _, _data):
        del header["__metadata__"][rng.choice(list(header["__metadata__"]))]


def lose_a_file(rng: random.Random, _victim: Victim, folder: Path) -> None:
    some_file(rng, folder).unlink()


def exchange_memories(rng: random.Random, _victim: Victim, folder: Path) -> None:
    one, other = rng.sample(memories(folder), 2)
    one_content, other_content = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_content)
    other.write_bytes(one_content)


def bring_back_a_stale_memory(rng: random.Random, victim: Victim, folder: Path) -> None:
    """Under the newer file's name: a client's own memory of an earlier round."""
    stale = {path.name.split("-")[1]: path for path in memories(victim.earlier)}
    now = {path.name.split("-")[1]: path for path in memories(folder)}
    client = rng.choice([client for client in now if client in stale and now[client].name != stale[client].name])
    shutil.copy(stale[client], now[client])


def take_from_another_training(rng: random.Random, victim: Victim, folder: Path) -> None:
    path = some_file(rng, folder)
    theirs = victim.other / FILE if path.name == FILE else rng.choice(memories(victim.other))
    shutil.copy(theirs, path)


def take_an_earlier_checkpoint(_rng: random.Random, victim: Victim, folder: Path) -> None:
    """Only the checkpoint: the memories are newer."""
    shutil.copy(victim.earlier / FILE, folder / FILE)


ALWAYS: tuple[Damage, ...] = (
    flip_a_bit,
    flip_a_bit_of_the_header,
    cut_short,
    append,
    overwrite_a_block,
    swap_tensors,
    rename_a_tensor,
    change_a_type,
    change_a_shape,
    not_finite,
    change_a_number,
    change_the_rounds_of_epsilon,
    change_the_structure,
    drop_the_text,
    lose_a_file,
    take_from_another_training,
    take_an_earlier_checkpoint,
)
WITH_MEMORIES: tuple[Damage, ...] = (exchange_memories, bring_back_a_stale_memory)


# -- outcomes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    kind: str  # refused, same, silent or raw
    damage: str
    words: str


def resumed(victim: Victim, folder: Path, damage: str) -> Outcome:
    ran: set[int] = set()
    try:
        result = victim.job.run(folder, resume=True, watch=lambda record: ran.add(record.round))
    except GradveilError as error:
        return Outcome("raw" if "\n" in str(error) else "refused", damage, str(error))
    except Exception as error:
        return Outcome("raw", damage, repr(error))
    found = difference(victim.undamaged, result, ran | set(range(STOPPED_AFTER - 1, victim.job.training.rounds)))
    return Outcome("same", damage, "") if found is None else Outcome("silent", damage, found)


def fuzz(count: int, root: Path) -> list[Outcome]:
    victims = [Victim.make(job, root / name) for name, job in (("feedback", FEEDBACK), ("private", PRIVATE))]
    cases = [(victims[0], damage) for damage in ALWAYS + WITH_MEMORIES] + [(victims[1], damage) for damage in ALWAYS]
    outcomes = []
    for number in range(count):
        victim, damage = cases[number % len(cases)]
        folder = root / "damaged"
        shutil.copytree(victim.folder, folder)
        damage(random.Random(number), victim, folder)
        outcomes.append(resumed(victim, folder, damage.__name__))
        shutil.rmtree(folder)
    return outcomes


@pytest.mark.slow
def test_no_damaged_checkpoint_is_resumed_silently_or_ends_in_a_raw_error(tmp_path):
    outcomes = fuzz(int(os.environ.get("GRADVEIL_FUZZ", DEFAULT)), tmp_path)
    assert [outcome for outcome in outcomes if outcome.kind not in ("refused", "same")] == []
    counted = Counter(outcome.kind for outcome in outcomes)
    # An earlier checkpoint of a training run without memories is valid and leads to the same end; all else is refused.
    same = {outcome.damage for outcome in outcomes if outcome.kind == "same"}
    assert same <= {take_an_earlier_checkpoint.__name__}
    assert counted["refused"] >= 0.9 * len(outcomes)


def test_the_undamaged_trainings_have_all_that_can_be_damaged(tmp_path):
    """Memories, moments, faults, history, epsilon; and they can be resumed."""
    feedback, private = (Victim.make(job, tmp_path / str(job.training.optimiser)) for job in (FEEDBACK, PRIVATE))
    assert len(memories(feedback.folder)) >= 2
    result = private.undamaged
    assert result.privacy is not None
    assert result.privacy.epsilon > 0
    assert {fault.kind for fault in result.faults} == {"missing", "duplicate"}
    assert len(result.history) == 3
    assert resumed(feedback, feedback.folder, "").kind == resumed(private, private.folder, "").kind == "same"


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as somewhere:
        found = fuzz(int(sys.argv[1]), Path(somewhere))
    for outcome in found:
        if outcome.kind not in ("refused", "same"):
            print(f"{outcome.kind}: {outcome.damage}: {outcome.words}")
    print(dict(Counter(outcome.kind for outcome in found)))
    print("silent:", dict(Counter(outcome.words for outcome in found if outcome.kind == "silent")))
