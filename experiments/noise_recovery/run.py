"""Which noise the server can strip from an update, and what that shows it.

    GRADVEIL_DATA=/path/to/data python experiments/noise_recovery/run.py [PART]...

Run it again to go on: finished cases are skipped. Results are appended to results.jsonl, one line for each case;
nothing there is ever edited.

The parts. gradveil: noise of an explicit generator on MNIST, mlp, a passive server that knows public images.
gradveil-in-use: the same without a generator; the first row is of the time before draws were cryptographic. active:
the Flower example's network with silenced units. opacus: its default DP-SGD, the server seeing the gradient or the
change of weights. flower: the real LocalDpMod around a client that trains one step. numpy-laplace:
`numpy.random.laplace` added layer by layer; NVFlare's SVT filter calls that function too, but hands its draws to
coordinates in a random order, which is not emulated here. last-bits: which of a hundred images a dp-sgd update was made
from, by the regularity of what the right one's gradient leaves of it (mlp).
"""

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradveil
from gradveil import data, models
from gradveil.attacks.noise_recovery import (
    NoiseSource,
    NumpyLaplace,
    NumpyNormal,
    TorchLaplace,
    TorchNormal,
    known_zeros,
    recover,
    silence,
)
from gradveil.randomness import derived_generator
from gradveil.registry import parse_spec

HERE = Path(__file__).parent
CONFIG = json.loads((HERE / "config.json").read_text())
SEED = CONFIG["seed"]
Row = dict[str, Any]
Values = dict[str, Tensor]


def mlp() -> gradveil.Task:
    model = models.create("mlp", input_shape=(1, 28, 28), classes=10, seed=SEED)
    return gradveil.Task(model, input_shape=(1, 28, 28), classes=10)


def example(silenced: int) -> gradveil.Task:
    """The network of examples/flower, some of whose units an active server silenced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))
    return silence(gradveil.Task(model, input_shape=(1, 28, 28), classes=10), "1.bias", range(silenced))


def victims(count: int) -> tuple[Tensor, Tensor]:
    return data.load("mnist").test.batch(range(count))


def public() -> Tensor:
    return data.load("mnist").train.batch(range(CONFIG["public"]))[0]


def silent_rows(task: gradveil.Task, silenced: int) -> Values:
    """Zeros that the active server made, and no others: it need not guess."""
    weight, bias = (task.parameters[name] for name in ("1.weight", "1.bias"))
    rows = torch.where(torch.arange(len(bias)) < silenced, torch.arange(len(bias)), -1)
    nothing = {name: torch.full(value.shape, -1) for name, value in task.parameters.items()}
    return {**nothing, "1.weight": rows[:, None].expand(weight.shape), "1.bias": rows}


def read_image(update: Values) -> Tensor:
    """The image behind a gradient of the first linear layer, as all its units see it."""
    names = [name for name, value in update.items() if value.dim() == 2 and value.shape[1] == 28 * 28]
    weight, bias = update[names[0]].double(), update[names[0].replace("weight", "bias")].double()
    return (weight * bias[:, None]).sum(0) / bias.square().sum()


def decibels(image: Tensor, found: Tensor) -> float:
    """PSNR without a ceiling."""
    return round(float(-10 * (image.flatten().double() - found.clamp(0, 1)).square().mean().log10()), 1)


def attack(
    update: Values,
    zeros: Values,
    source: NoiseSource,
    truth: Values,
    errors: Values | None = None,
    image: Any = None,
    attempts: int = 1,
) -> Row:
    bits = source.read(update, {name: groups >= 0 for name, groups in zeros.items()}, errors)[0]
    found = recover(
        update, zeros, source, errors=errors, attempts=attempts, generator=derived_generator(SEED, "attack")
    )
    row: Row = {
        "zeros": sum(int((groups >= 0).sum()) for groups in zeros.values()),
        "sure_bits": len(bits.values),
        "verified": found.verified,
        "reason": found.reason,
        "equations": found.equations,
        "rank": found.rank,
        "wrong_zeros": found.wrong_zeros,
        "seconds": round(found.seconds, 1),
        "largest_noise": max(float((update[name].double() - truth[name]).abs().max()) for name in truth),
    }
    if found.update is not None:
        cleaned = found.update
        row["largest_rest"] = max(float((cleaned[name].double() - truth[name]).abs().max()) for name in truth)
    if image is not None:
        row["psnr_before"] = decibels(image, read_image(update))
        row["psnr_after"] = decibels(image, read_image(found.update)) if found.update is not None else None
    return row


def source_of(spec: str, batch: int) -> NoiseSource:
    name, given = parse_spec(spec)
    if name == "laplace-noise":
        return TorchLaplace(given["std"] / 2**0.5)
    return TorchNormal(given["noise_multiplier"] / batch if name == "dp-sgd" else given["std"])


def truth_of(spec: str, task: gradveil.Task, images: Tensor, labels: Tensor) -> Values:
    clipped = "dp-sgd:noise_multiplier=0"
    return gradveil.defense(clipped if spec.startswith("dp-sgd") else "none").share(task, images, labels)


def on_gradveil(case: Row, task: gradveil.Task, zeros: Values, generator: torch.Generator | None) -> Row:
    images, labels = victims(case["batch"])
    update = gradveil.defense(case["defense"]).share(task, images, labels, generator=generator)
    truth = truth_of(case["defense"], task, images, labels)
    image = images[0] if len(images) == 1 else None
    return attack(update, zeros, source_of(case["defense"], case["batch"]), truth, image=image, attempts=8)


def gradveil_part(case: Row) -> Row:
    task = mlp()
    return on_gradveil(case, task, known_zeros(task, public()), derived_generator(SEED, "client"))


def in_use(case: Row) -> Row:
    if "silenced" in case:
        task = example(case["silenced"])
        return on_gradveil(case, task, silent_rows(task, case["silenced"]), None)
    task = mlp()
    return on_gradveil(case, task, known_zeros(task, public()), None)


def active(case: Row) -> Row:
    task = example(case["silenced"])
    return on_gradveil(case, task, silent_rows(task, case["silenced"]), derived_generator(SEED, "client"))


def opacus(case: Row) -> Row:
    """One step of Opacus' default DP-SGD on 16 images, noise from torch's global generator."""
    from opacus import PrivacyEngine
    from opacus.data_loader import DataLoader

    task = example(case["silenced"])
    images, labels = victims(16)
    model = task.copy_model()
    before = {name: value.detach().clone() for name, value in task.parameters.items()}
    lr = case.get("lr", 0.1)
    kinds = {"adam": torch.optim.Adam}
    optimizer = kinds.get(case["seen"], torch.optim.SGD)(model.parameters(), lr=lr)
    loader = DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=16)
    torch.seed()  # as if nobody had seeded it
    warnings.simplefilter("ignore")
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    clipped = truth_of("dp-sgd", task, images, labels)
    zeros = silent_rows(task, case["silenced"])
    gradients = {name: value.grad for name, value in zip(before, model.parameters(), strict=True)}
    if case["seen"] == "gradient":
        return attack(gradients, zeros, TorchNormal(1 / 16), clipped)
    after = {name: value.detach() for name, value in zip(before, model.parameters(), strict=True)}
    # The server subtracts what it sent; a weight is rounded to half the distance of its neighbours.
    change = {name: before[name] - after[name] for name in before}
    errors = {name: torch.from_numpy(np.spacing(after[name].abs().numpy())).double() for name in before}
    scale = lr if case["seen"] == "adam" else lr / 16
    truth = {name: value * lr for name, value in clipped.items()}
    row = attack(change, zeros, TorchNormal(scale), truth, errors)
    if case["seen"] == "adam":
        row["note"] = "the first step of Adam is lr * sign of the gradient: the size of a draw is gone"
    return row


def flower(case: Row) -> Row:
    """Flower's LocalDpMod around a client that takes one step of gradient descent on one image."""
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp.mod import LocalDpMod
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # a message outside a running app
    task = example(case["silenced"])
    images, labels = victims(1)
    lr, clip, delta = 0.1, 1.0, 1e-5
    stepped = {name: value - lr * task.gradients(images, labels)[name] for name, value in task.parameters.items()}

    def client(message: Message, _context: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord(dict(stepped))}), reply_to=message)

    sent = RecordDict({"arrays": ArrayRecord(dict(task.parameters))})
    message = Message(sent, 1, "train")
    np.random.seed()  # from the operating system, as in a new process
    reply = LocalDpMod(clip, 1.0, case["epsilon"], delta)(message, None, client)  # type: ignore[arg-type]
    received = next(iter(reply.content.array_records.values())).to_torch_state_dict()
    std = float(np.sqrt(2 * np.log(1.25 / delta)) / case["epsilon"])
    change = {name: received[name].double() - value.double() for name, value in task.parameters.items()}
    # The noise is rounded to float32, and then the sum of weight and noise. The first rounding is taken twice as
    # large as what is seen suggests, since the noise may lie just above a power of two.
    errors = {
        name: torch.from_numpy(
            np.spacing(received[name].abs().numpy()) / 2 + np.spacing(value.abs().float().numpy())
        ).double()
        for name, value in change.items()
    }
    gradient = task.gradients(images, labels)
    norm = float(torch.cat([value.flatten() for value in gradient.values()]).norm()) * lr
    truth = {name: -lr * value.double() * min(1, clip / norm) for name, value in gradient.items()}
    zeros = silent_rows(task, case["silenced"]) if case["silenced"] else known_zeros(task, public())
    row = attack(change, zeros, NumpyNormal(std), truth, errors, images[0])
    return {**row, "std": std}


def numpy_laplace(case: Row) -> Row:
    """Weight changes in float32 to which `numpy.random.laplace(scale=1 / epsilon)` was added, layer by layer."""
    task = example(case["silenced"])
    images, labels = victims(1)
    truth = task.gradients(images, labels)
    np.random.seed()
    scale = 1 / case["epsilon"]
    update = {
        name: (value.numpy() + np.random.laplace(scale=scale, size=value.shape)).astype(np.float32)
        for name, value in truth.items()
    }
    seen = {name: torch.from_numpy(value) for name, value in update.items()}
    return attack(seen, silent_rows(task, case["silenced"]), NumpyLaplace(scale), truth, image=images[0])


def last_bits(case: Row) -> Row:
    """How often the right one of some test images is named, by the angles of Box-Muller pairs.

    torch draws an angle from one number of 24 bits, so the noise that is left when the right clipped gradient is taken
    off lies near multiples of 2^-24 turns; any other gradient leaves a distance of .25 on average.
    """
    task, defense = mlp(), gradveil.defense("dp-sgd", clip=1.0, noise_multiplier=case["multiplier"])
    images, labels = victims(case["candidates"])
    layer = "features.1.weight"
    gradients = [
        truth_of("dp-sgd", task, images[one, None], labels[one, None])[layer].double().flatten()
        for one in range(case["candidates"])
    ]
    named, right, best = 0, [], []
    for victim in range(case["victims"]):
        generator = derived_generator(SEED, "client", victim) if case["draws"] == "seeded" else None
        sent = defense.share(task, images[victim, None], labels[victim, None], generator=generator)[layer]
        blocks = [(sent.double().flatten() - one).view(-1, 2, 8) for one in gradients]
        turns = [torch.atan2(one[:, 1], one[:, 0]) / (2 * torch.pi) * 2**24 for one in blocks]
        distances = [float((one - one.round()).abs().mean()) for one in turns]
        named += min(range(len(distances)), key=distances.__getitem__) == victim
        right.append(distances[victim])
        best.append(min(one for place, one in enumerate(distances) if place != victim))
    return {
        "named": named,
        "distance_right": sum(right) / len(right),
        "distance_best_wrong": sum(best) / len(best),
    }


PARTS = {
    "last-bits": last_bits,
    "gradveil": gradveil_part,
    "gradveil-in-use": in_use,
    "active": active,
    "opacus": opacus,
    "flower": flower,
    "numpy-laplace": numpy_laplace,
}


def main() -> None:
    results = HERE / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    done = [(row["part"], row["case"]) for row in map(json.loads, lines)]
    for part in sys.argv[1:] or PARTS:
        for case in CONFIG[part]:
            if (part, case) in done:
                continue
            started = time.perf_counter()
            row = {"part": part, "case": case, **PARTS[part](case), "version": gradveil.__version__}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                part,
                case,
                row.get("verified", row.get("named")),
                row.get("reason", ""),
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
