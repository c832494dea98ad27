"""Which noise the server can remove from an update, and what that reveals.

gradveil: noise from an explicit generator on an mlp; a passive server that knows public images. gradveil-in-use: the
same without a generator. active: the network of examples/flower with silenced units. opacus: its default DP-SGD, where
the server sees the gradient or the change of weights. flower: the real LocalDpMod around a client that trains one step.
numpy-laplace: `numpy.random.laplace` added layer by layer; NVFlare's SVT filter calls that function too, but assigns
its draws to coordinates in a random order, which is not emulated here. last-bits: which of a hundred images a dp-sgd
update was made from, judged by the regularity of the noise that is left when an image's gradient is subtracted.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradveil
from gradveil.attacks import noise_recovery as recovery
from gradveil.core.randomness import derived_generator
from gradveil.core.registry import parse_spec
from kinds import Row, Session, build, load

Values = Mapping[str, Tensor]


def network_of(case: Row) -> tuple[gradveil.Task, Values]:
    """A network, and for each layer the coordinates that the server knows to be 0: a group number, or -1 if unknown.

    The network is an mlp or, with `silenced` units, that of examples/flower, in which an active server made the zeros.
    If no unit is silenced, the server knows the coordinates that public images leave at 0.
    """
    task = build({**case, "model": "mlp"})
    if "silenced" in case:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))
        task = recovery.silence(task.with_model(model), "1.bias", range(case["silenced"]))
    if not case.get("silenced"):
        return task, recovery.known_zeros(task, load("mnist").train.batch(range(case["public"]))[0])
    zeros = {name: torch.full(value.shape, -1) for name, value in task.parameters.items()}
    units = torch.arange(case["silenced"])
    zeros["1.bias"][units], zeros["1.weight"][units] = units, units[:, None].expand(-1, 28 * 28)
    return task, zeros


def victims(count: int) -> tuple[Tensor, Tensor]:
    return load("mnist").test.batch(range(count))


def decibels(update: Values, image: Tensor) -> float:
    """PSNR, without a ceiling, of the image that all units of the first linear layer's gradient reveal together."""
    name = next(name for name, value in update.items() if value.dim() == 2 and value.shape[1] == 28 * 28)
    weight, bias = update[name].double(), update[name.replace("weight", "bias")].double()
    found = (weight * bias[:, None]).sum(0) / bias.square().sum()
    return float(-10 * (image.flatten().double() - found.clamp(0, 1)).square().mean().log10())


def largest_difference(values: Values, truth: Values) -> float:
    return max(float((values[name].double() - truth[name]).abs().max()) for name in truth)


def attack(update: Values, zeros: Values, source: Any, truth: Values, image: Any = None, **options: Any) -> Row:
    """Remove the noise of a source from an update; `options` are the errors and attempts of `recovery.recover`."""
    bits = source.read(update, {name: groups >= 0 for name, groups in zeros.items()}, options.get("errors"))[0]
    found = recovery.recover(update, zeros, source, generator=derived_generator(0, "attack"), **options)
    names = ("verified", "reason", "equations", "rank", "wrong_zeros")
    row = {name: getattr(found, name) for name in names} | {"attack_seconds": found.seconds}
    row |= {"zeros": sum(int((groups >= 0).sum()) for groups in zeros.values()), "sure_bits": len(bits.values)}
    row["largest_noise"] = largest_difference(update, truth)
    row["largest_rest"] = None if found.update is None else largest_difference(found.update, truth)
    if image is not None:
        row["psnr_before"] = decibels(update, image)
        row["psnr_after"] = None if found.update is None else decibels(found.update, image)
    return row


def without_noise(spec: str, task: gradveil.Task, batch: tuple[Tensor, Tensor]) -> Values:
    clipped = "dp-sgd:noise_multiplier=0"
    return gradveil.defense(clipped if spec.startswith("dp-sgd") else "none").share(task, *batch)


def on_gradveil(case: Row, _session: Session) -> Row:
    (task, zeros), batch, spec = network_of(case), victims(case["batch"]), case["defense"]
    generator = derived_generator(case["seed"], "client") if case.get("draws") != "cryptographic" else None
    update = gradveil.defense(spec).share(task, *batch, generator=generator)
    name, parameters = parse_spec(spec)
    std = parameters["noise_multiplier"] / case["batch"] if name == "dp-sgd" else parameters["std"]
    source = recovery.TorchLaplace(std / 2**0.5) if name == "laplace-noise" else recovery.TorchNormal(std)
    image = batch[0][0] if case["batch"] == 1 else None
    return attack(update, zeros, source, without_noise(spec, task, batch), image=image, attempts=8)


def opacus(case: Row, _session: Session) -> Row:
    """One step of Opacus' default DP-SGD on 16 images, with noise from torch's global generator."""
    from opacus import PrivacyEngine
    from opacus.data_loader import DataLoader

    (task, zeros), batch = network_of(case), victims(16)
    model, lr, adam = task.copy_model(), case.get("lr", 0.1), case["seen"] == "adam"
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=lr)
    torch.seed()  # as if nobody had seeded it
    warnings.simplefilter("ignore")
    loader = DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=16)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, **settings
    )
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    clipped, parameters = (
        without_noise("dp-sgd", task, batch),
        dict(zip(task.parameters, model.parameters(), strict=True)),
    )
    if case["seen"] == "gradient":
        return attack(
            {name: value.grad for name, value in parameters.items()}, zeros, recovery.TorchNormal(1 / 16), clipped
        )
    # The server subtracts the weights that it sent; rounding errs by at most half the spacing of a weight.
    after = {name: value.detach() for name, value in parameters.items()}
    change = {name: value - after[name] for name, value in task.parameters.items()}
    truth = {name: value * lr for name, value in clipped.items()}
    return attack(change, zeros, recovery.TorchNormal(lr if adam else lr / 16), truth, errors=spacing(after))


def spacing(values: Values) -> dict[str, Tensor]:
    """Distance from each value to the next one that float32 can hold."""
    return {name: torch.from_numpy(np.spacing(value.abs().float().numpy())).double() for name, value in values.items()}


def flower(case: Row, _session: Session) -> Row:
    """Flower's LocalDpMod around a client that takes one step of gradient descent on one image."""
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp.mod import LocalDpMod
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
        1,
        1,
        1,
    )  # a message outside a running app needs these
    (task, zeros), batch = network_of(case), victims(1)
    lr, clip, delta = 0.1, 1.0, 1e-5
    gradient = task.gradients(*batch)
    stepped = {name: value - lr * gradient[name] for name, value in task.parameters.items()}

    def client(message: Message, _context: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord(stepped)}), reply_to=message)

    message = Message(RecordDict({"arrays": ArrayRecord(dict(task.parameters))}), 1, "train")
    np.random.seed()  # from the operating system, as in a new process
    reply = LocalDpMod(clip, 1.0, case["epsilon"], delta)(message, None, client)  # type: ignore[arg-type]
    received = next(iter(reply.content.array_records.values())).to_torch_state_dict()
    std = float(np.sqrt(2 * np.log(1.25 / delta)) / case["epsilon"])
    change = {name: received[name].double() - value.double() for name, value in task.parameters.items()}
    # First the noise is rounded to float32, then the sum of weight and noise. The bound on the first rounding is twice
    # what the observed change suggests, because the noise may lie just above a power of two.
    weights, noise = spacing(received), spacing(change)
    errors = {name: weights[name] / 2 + noise[name] for name in change}
    norm = lr * float(torch.cat([value.flatten() for value in gradient.values()]).norm())
    truth = {name: -lr * value.double() * min(1, clip / norm) for name, value in gradient.items()}
    return {**attack(change, zeros, recovery.NumpyNormal(std), truth, batch[0][0], errors=errors), "std": std}


def numpy_laplace(case: Row, _session: Session) -> Row:
    """Weight changes in float32 to which `numpy.random.laplace(scale=1 / epsilon)` was added, layer by layer."""
    (task, zeros), batch = network_of(case), victims(1)
    truth, scale = task.gradients(*batch), 1 / case["epsilon"]
    np.random.seed()
    noise = {name: np.random.laplace(scale=scale, size=value.shape) for name, value in truth.items()}
    seen = {name: torch.from_numpy((value.numpy() + noise[name]).astype(np.float32)) for name, value in truth.items()}
    return attack(seen, zeros, recovery.NumpyLaplace(scale), truth, image=batch[0][0])


def last_bits(case: Row, _session: Session) -> Row:
    """How often the right one of several test images is identified from the angles of Box-Muller pairs.

    torch draws an angle from one number of 24 bits, so subtracting the right clipped gradient leaves noise whose angles
    lie near multiples of 2^-24 turns; any other gradient leaves an average distance of .25.
    """
    task, layer = build({**case, "model": "mlp"}), "features.1.weight"
    defense = gradveil.defense("dp-sgd", clip=1.0, noise_multiplier=case["multiplier"])
    singles = list(zip(*(tensor[:, None] for tensor in victims(case["candidates"])), strict=True))
    gradients = torch.stack([without_noise("dp-sgd", task, one)[layer].double().flatten() for one in singles])
    named, right, best = 0, 0.0, 0.0
    for victim in range(case["victims"]):
        generator = derived_generator(case["seed"], "client", victim) if case["draws"] == "seeded" else None
        sent = defense.share(task, *singles[victim], generator=generator)[layer]
        pairs = (sent.double().flatten() - gradients).view(len(singles), -1, 2, 8)
        turns = torch.atan2(pairs[:, :, 1], pairs[:, :, 0]) / (2 * torch.pi) * 2**24
        distances = (turns - turns.round()).abs().flatten(1).mean(1)
        named += int(distances.argmin() == victim)
        right += float(distances[victim]) / case["victims"]
        best += float(torch.cat([distances[:victim], distances[victim + 1 :]]).min()) / case["victims"]
    return {"named": named, "distance_right": right, "distance_best_wrong": best}


KINDS = {"last-bits": last_bits, "opacus": opacus, "flower": flower, "numpy-laplace": numpy_laplace}
KINDS |= dict.fromkeys(("gradveil", "gradveil-in-use", "active"), on_gradveil)
