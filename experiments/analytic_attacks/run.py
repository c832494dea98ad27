"""What closed-form and active attacks recover of CIFAR-10 images, undefended and defended, and what `inspect` notices.

    GRADVEIL_DATA=/path/to/data python experiments/analytic_attacks/run.py [PART]...

Run it again to go on: finished cases are skipped. Results are appended to results.jsonl, one line a case; nothing there
is ever edited. Defenses that this version does not have are skipped with a message.

The parts. r-gap: every victim's PSNR. ranks: which layers of which models the recursion cannot pass. robbing-the-fed:
the figures of the dual-pruning paper's table 1. batches: larger batches against the share that the number of bins
predicts. loki: the share of every client's images above 20 dB, out of the mean of all clients' updates and nothing
else. inspect: findings on planted, permuted, rescaled and renamed blocks and on every model of the zoo, and the
attack's success where nothing is seen.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradveil
from gradveil import data, metrics, models
from gradveil.attacks.base import ThreatModel
from gradveil.errors import GradveilError, UnknownNameError
from gradveil.federation import Training, train
from gradveil.federation.job import split_public
from gradveil.modality import IMAGE
from gradveil.models.malicious import Imprint
from gradveil.randomness import derived_generator
from gradveil.registry import parse_spec
from gradveil.theory import recursion_ranks
from gradveil.update import Meta, Update

HERE = Path(__file__).parent
CONFIG = json.loads((HERE / "config.json").read_text())
SEED = CONFIG["seed"]
Row = dict[str, Any]


def task_of(spec: str, logits: int = 10) -> gradveil.Task:
    """The model of a spec at its initial weights; with one logit it tells even from odd labels."""
    name, parameters = parse_spec(spec)
    model = models.create(name, input_shape=(3, 32, 32), classes=logits, seed=SEED, **parameters)
    if logits == 1:
        return gradveil.Task(model, "logistic", input_shape=(3, 32, 32), classes=2)
    return gradveil.Task(model, input_shape=(3, 32, 32), classes=logits)


def batches(dataset: data.Dataset, count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(dataset.test), generator=derived_generator(SEED, "victims"))
    return [dataset.test.batch(order[at * size : (at + 1) * size]) for at in range(count)]


def public_of(dataset: data.Dataset) -> tuple[Tensor, Tensor]:
    places, _ = split_public(dataset.train, SEED)
    return dataset.train.batch(places)


def share(
    defense: gradveil.Defense,
    task: gradveil.Task,
    batch: tuple[Tensor, Tensor],
    number: int,
    local: gradveil.LocalSteps | None = None,
) -> tuple[Update, dict[str, Tensor]]:
    """An honest client's update, and what it keeps."""
    memory: dict[str, Tensor] = {}
    announced = defense.announce(
        task, *batch, generator=derived_generator(SEED, "announce", number), memory=memory, local=local
    )
    update = defense.share(
        task,
        *batch,
        generator=derived_generator(SEED, "share", number),
        memory=memory,
        announced=announced,
        local=local,
    )
    return update, memory


def scores(originals: Tensor, found: Tensor) -> dict[str, Tensor]:
    """Every metric of every image, under one assignment."""
    images = IMAGE.repaired(found.float())
    images = images[metrics.match(originals, images)]
    weights = data.find("lpips-alex")
    lpips = torch.full((len(images),), torch.nan)
    if weights is not None:
        lpips = metrics.Lpips.load(weights)(originals, images)
    return {"psnr": metrics.psnr(originals, images), "ssim": metrics.ssim(originals, images), "lpips": lpips}


def summary(all_scores: list[dict[str, Tensor]]) -> Row:
    psnr, ssim, lpips = (torch.cat([score[key] for score in all_scores]) for key in ("psnr", "ssim", "lpips"))
    return {
        "psnr": [round(value, 2) for value in psnr.tolist()],
        "median_psnr": round(float(psnr.median()), 2),
        "above_40_db": [int((score["psnr"] > 40).sum()) for score in all_scores],
        "lpips": float(lpips.mean()),
        "min_lpips": float(lpips.min()),
        "ssim": float(ssim.mean()),
        "max_ssim": float(ssim.max()),
        "lpips_resolution": metrics.LPIPS_RESOLUTION,
    }


def against_trained_on(shared: list[tuple[Update, dict[str, Tensor]]], found: Tensor) -> Row:
    """Scores against what the clients trained on instead of their images, if they did: the paper's ATS-R."""
    pairs = [
        (memory["trained_on"].float(), guess)
        for (_, memory), guess in zip(shared, found, strict=True)
        if "trained_on" in memory
    ]
    return {"against_trained_on": summary([scores(*pair) for pair in pairs])} if pairs else {}


def r_gap(case: Row, spec: str) -> Row:
    dataset, task = data.load(CONFIG["dataset"]), task_of(case["model"], case["logits"])
    victims = batches(dataset, CONFIG["r-gap"]["victims"], 1)
    if case["logits"] == 1:
        victims = [(image, label % 2) for image, label in victims]
    defense = gradveil.defense(spec)
    public = public_of(dataset)
    if case["logits"] == 1:
        public = (public[0], public[1] % 2)
    defense, sent = defense.prepare(task, public=public, generator=derived_generator(SEED, "prepare"))
    shared = [share(defense, sent, victim, number) for number, victim in enumerate(victims)]
    result = gradveil.attack("r-gap").reconstruct(
        sent,
        [update for update, _ in shared],
        ThreatModel(defense=defense),
        generator=derived_generator(SEED, "attack"),
    )
    per_image = [scores(image, found) for (image, _), found in zip(victims, result.inputs, strict=True)]
    right = sum(int(found == label) for (_, label), found in zip(victims, result.labels[:, 0], strict=True))
    return {
        **summary(per_image),
        "labels_right": f"{right} of {len(victims)}",
        "median_loss": statistics.median(result.loss.tolist()),
        **against_trained_on(shared, result.inputs),
    }


def ranks(spec: str) -> Row:
    return {
        "layers": [
            {"name": r.name, "kind": r.kind, "unknowns": r.unknowns, "forward": r.forward, "gradient": r.gradient}
            | {"rank": r.rank, "reason": r.reason}
            for r in recursion_ranks(task_of(spec))
        ]
    }


def robbing(model: str, count: int, attack_spec: str, spec: str) -> Row:
    dataset, task = data.load(CONFIG["dataset"]), task_of(model)
    size = CONFIG["robbing-the-fed"]["batch_size"]
    victims, public = batches(dataset, count, size), public_of(dataset)
    attack, defense = gradveil.attack(attack_spec), gradveil.defense(spec)
    sent = attack.modify(task, public=public, generator=derived_generator(SEED, "modify"))
    defense, sent = defense.prepare(sent, public=public, generator=derived_generator(SEED, "prepare"))
    shared = [share(defense, sent, victim, number) for number, victim in enumerate(victims)]
    threat = ThreatModel(server="active", batch_size=size, defense=defense)
    result = attack.reconstruct(sent, [update for update, _ in shared], threat)
    row = summary([scores(images, found) for (images, _), found in zip(victims, result.inputs, strict=True)])
    row["certain"] = result.certain.sum(1).tolist()
    return {**row, **against_trained_on(shared, result.inputs)}


def blind(count: int) -> Row:
    dataset = data.load(CONFIG["dataset"])
    victims = batches(dataset, count, CONFIG["robbing-the-fed"]["batch_size"])
    guesses = [IMAGE.blind(dataset.train.inputs, dataset.train.targets, labels, classes=10) for _, labels in victims]
    return summary([scores(images, guess) for (images, _), guess in zip(victims, guesses, strict=True)])


def batch_size(size: int, bins: int) -> Row:
    settings = CONFIG["batches"]
    dataset, task = data.load(CONFIG["dataset"]), task_of(settings["model"])
    victims = batches(dataset, settings["batches"], size)
    attack, honest = gradveil.attack("robbing-the-fed", bins=bins), gradveil.defense("none")
    sent = attack.modify(task, public=public_of(dataset), generator=derived_generator(SEED, "modify"))
    shares, certain, right = [], 0, 0
    for number, (images, labels) in enumerate(victims):
        update, _ = share(honest, sent, (images, labels), number)
        result = attack.reconstruct(sent, update, ThreatModel(server="active", batch_size=size))
        found = result.inputs[0].clamp(0, 1)
        order = metrics.match(images, found)
        good = metrics.psnr(images, found[order]) > 40
        shares.append(float(good.double().mean()))
        certain += int(result.certain.sum())
        right += int((result.certain[0][order] & good).sum())
    return {
        "share_above_40_db": shares,
        "mean_share": statistics.fmean(shares),
        "expected_share": (1 - 1 / bins) ** (size - 1),
        "declared_single": certain,
        "of_these_above_40_db": right,
    }


def loki(setting: Row, spec: str) -> Row:
    settings = CONFIG["loki"]
    dataset, task = data.load(CONFIG["dataset"]), task_of(settings["model"])
    clients, size = settings["clients"], setting["images"]
    local = gradveil.LocalSteps(setting["epochs"], setting["batch_size"], setting["lr"])
    victims, public = batches(dataset, clients, size), public_of(dataset)
    attack, defense = gradveil.attack(settings["attack"]), gradveil.defense(spec)
    sent = attack.modify(task, public=public, generator=derived_generator(SEED, "modify"))
    defense, sent = defense.prepare(sent, public=public, generator=derived_generator(SEED, "prepare"))
    total: Update | None = None
    for client, batch in enumerate(victims):  # summed as they come: one update holds 126 MB
        update, _ = share(defense, attack.for_client(sent, client), batch, client, local)
        total = update if total is None else Update({name: value + update[name] for name, value in total.items()})
    assert total is not None
    seen = Update({name: value / clients for name, value in total.items()}, Meta(samples=clients * size, local=local))
    threat = ThreatModel(server="active", batch_size=clients * size, defense=defense, local=local)
    result = attack.reconstruct(sent, seen, threat)
    originals = torch.cat([images for images, _ in victims])
    found = IMAGE.repaired(result.inputs[0])
    order = metrics.match(originals, found)
    psnr = metrics.psnr(originals, found[order])
    right = result.labels[0][order] == torch.cat([labels for _, labels in victims])
    return {
        "attack": str(attack),
        "steps": setting["epochs"] * size // setting["batch_size"],
        "share_above_20_db": [round(float((part > 20).double().mean()), 4) for part in psnr.view(clients, size)],
        "mean_share": float((psnr > 20).double().mean()),
        "median_psnr": float(psnr.median()),
        "labels_right_of_these": float(right[psnr > 20].double().mean()) if (psnr > 20).any() else None,
        "declared_single": int(result.certain.sum()),
        "of_these_above_20_db": int((result.certain[0][order] & (psnr > 20)).sum()),
        "expected_share": (1 - 1 / attack.bins) ** (size - 1),
    }


def kinds(model: nn.Module) -> list[str]:
    return sorted({finding.kind for finding in gradveil.inspect(model)})


def planted() -> Row:
    """What is seen of the shipped blocks, and of the same blocks in disguise."""
    dataset, rows = data.load(CONFIG["dataset"]), {}
    generator = derived_generator(SEED, "inspect")
    for model in ("lenet", "resnet18"):
        for spec in ("robbing-the-fed", "robbing-the-fed:signal=1", "robbing-the-fed:bins=1024", "loki:bins=64"):
            attack = gradveil.attack(spec)
            sent = attack.modify(task_of(model), public=public_of(dataset), generator=generator)
            rows[f"{spec} before {model}"] = kinds(sent.copy_model())
    for disguise in ("renamed", "row-permuted", "rescaled"):
        attack = gradveil.attack("robbing-the-fed")
        sent = attack.modify(task_of("lenet"), public=public_of(dataset), generator=generator).copy_model()
        block = sent.imprint
        if disguise == "renamed":
            inner = [block.encode, block.relu, block.decode, nn.Unflatten(1, (3, 32, 32))]
            sent = nn.Sequential(nn.Flatten(), *inner, sent.model)
        elif disguise == "row-permuted":
            order = torch.randperm(len(block.encode.bias), generator=generator)
            permute(block, order)
        else:
            rescale(block, torch.exp(2 * torch.randn(len(block.encode.bias), generator=generator)), normal=True)
        rows[f"{disguise} block before lenet"] = kinds(sent)
    return {"findings": rows, "missed": [name for name, found in rows.items() if not found]}


@torch.no_grad()
def permute(block: Imprint, order: Tensor) -> None:
    block.encode.weight.copy_(block.encode.weight[order])
    block.encode.bias.copy_(block.encode.bias[order])
    block.decode.weight.copy_(block.decode.weight[:, order])


@torch.no_grad()
def rescale(block: Imprint, factors: Tensor, normal: bool = False) -> None:
    """Multiply the encoder's rows and divide the decoder's columns; the block computes the same."""
    if normal:  # the sizes an ordinary layer has
        factors = factors / factors.mean() * 0.01 / block.encode.weight.abs().mean()
    block.encode.weight.mul_(factors[:, None])
    block.encode.bias.mul_(factors)
    block.decode.weight.div_(factors)


def zoo(rounds: int) -> Row:
    """Findings on every model as it is made, and after federated training."""
    dataset, rows = data.load(CONFIG["dataset"]), {}
    for name in models.names():
        for init in ("default", "uniform"):
            rows[f"{name}:init={init}"] = kinds(task_of(f"{name}:init={init}").copy_model())
        small = name in ("lenet", "mlp", "cnn6", "mnist-cnn", "vit")
        settings = Training(
            rounds=rounds if small else max(1, rounds // 25), clients=4, batch_size=32, lr=0.05, seed=SEED
        )
        trained = train(task_of(name), dataset, gradveil.defense("none"), settings)
        rows[f"{name} after {settings.rounds} rounds, accuracy {trained.accuracy:.3f}"] = kinds(
            trained.task.copy_model()
        )
    return {"findings": rows, "alarms": [name for name, found in rows.items() if found]}


def well_trained() -> Row:
    """Findings on models that have learned their task, which those of the zoo after a few rounds have not."""
    rows = {}
    for settings in CONFIG["inspect"]["well-trained"]:
        dataset = data.load(settings["dataset"])
        name, parameters = parse_spec(settings["model"])
        shape = dataset.train.input_shape
        model = models.create(name, input_shape=shape, classes=10, seed=SEED, **parameters)
        scale = {key: shape[0] * [settings[key]] for key in ("mean", "std")}
        task = gradveil.Task(model, input_shape=shape, classes=10, **scale)
        trained = train(task, dataset, gradveil.defense("none"), Training(**settings["training"], seed=SEED))
        rows[f"{settings['model']} on {settings['dataset']}, accuracy {trained.accuracy:.3f}"] = kinds(
            trained.task.copy_model()
        )
    return {"findings": rows, "alarms": [name for name, found in rows.items() if found]}


def jittered(jitter: float, bins: int) -> Row:
    """An imprint block whose rows were drawn apart by noise of a relative size: seen? and still working?"""
    dataset, task = data.load(CONFIG["dataset"]), task_of("lenet")
    attack, honest = gradveil.attack("robbing-the-fed", bins=bins), gradveil.defense("none")
    sent = attack.modify(task, public=public_of(dataset), generator=derived_generator(SEED, "modify"))
    model = sent.copy_model()
    with torch.no_grad():
        rescale(model.imprint, torch.ones(2 * bins), normal=True)
        weight = model.imprint.encode.weight
        noise = torch.randn(weight.shape, generator=derived_generator(SEED, "jitter"))
        # Without a part along the mean image, by which the thresholds would shift.
        noise = noise - noise.mean(1, keepdim=True)
        weight.add_(jitter * weight.abs().mean() * noise)
    moved = task.with_model(model)
    good, images = 0, 0
    for number, victim in enumerate(batches(dataset, 5, 9)):
        update, _ = share(honest, moved, victim, number)
        result = attack.reconstruct(moved, update, ThreatModel(server="active", batch_size=9))
        good += int((scores(victim[0], result.inputs[0])["psnr"] > 20).sum())
        images += len(victim[0])
    return {"findings": kinds(model), "above_20_db": f"{good} of {images}"}


def cases(parts: list[str]) -> Iterator[tuple[str, Callable[[], Row]]]:
    if "r-gap" in parts:
        for case in CONFIG["r-gap"]["models"]:
            specs = CONFIG["r-gap"]["defenses"] if case["defenses"] == "all" else case["defenses"]
            for spec in specs:
                name = f"r-gap on {case['model']}, {case['logits']} logits, {spec}"
                yield name, lambda case=case, spec=spec: r_gap(case, spec)
    if "ranks" in parts:
        for spec in ("cnn6", "lenet", "lenet:activation=relu", "mlp", "mnist-cnn", "convnet", "resnet10", "vit"):
            yield f"ranks of {spec}", lambda spec=spec: ranks(spec)
    if "robbing-the-fed" in parts:
        settings = CONFIG["robbing-the-fed"]
        for model, count in settings["models"].items():
            yield f"blind guess beside {model}", lambda count=count: blind(count)
            for attack in settings["attacks"]:
                for spec in settings["defenses"]:
                    name = f"{attack} on {model}, {spec}"
                    # A search on ResNet18 takes half an hour; there ATS uses the policies found on a LeNet.
                    given = settings["replaced"].get(model, {}).get(spec, spec)
                    yield name, lambda m=model, c=count, a=attack, s=given: robbing(m, c, a, s)
    if "batches" in parts:
        for size in CONFIG["batches"]["sizes"]:
            for bins in CONFIG["batches"]["bins"]:
                yield f"batch of {size}, {bins} bins", lambda size=size, bins=bins: batch_size(size, bins)
    if "loki" in parts:
        for setting in CONFIG["loki"]["settings"]:
            for spec in CONFIG["loki"]["defenses"]:
                name = f"loki, {setting['images']} images x {setting['epochs']} epochs, {spec}"
                yield name, lambda setting=setting, spec=spec: loki(setting, spec)
    if "inspect" in parts:
        settings = CONFIG["inspect"]
        yield "inspect planted blocks", planted
        for bins in settings["bins"]:
            for jitter in settings["jitter"]:
                yield (
                    f"inspect {bins} bins with rows {jitter} apart",
                    lambda jitter=jitter, bins=bins: jittered(jitter, bins),
                )
        yield "inspect the zoo", lambda: zoo(settings["rounds"])
        yield "inspect well-trained models", well_trained


PARTS = ["r-gap", "ranks", "robbing-the-fed", "batches", "loki", "inspect"]


def main() -> None:
    torch.set_num_threads(1)
    results = HERE / "results.jsonl"
    done = {json.loads(line)["case"] for line in results.read_text().splitlines()} if results.exists() else set()
    for name, work in cases(sys.argv[1:] or PARTS):
        if name in done:
            continue
        try:
            row = {"case": name, "gradveil": gradveil.__version__, "torch": torch.__version__, **work()}
        except UnknownNameError as error:
            print(f"skipped {name}: {error}", flush=True)
            continue
        except GradveilError as error:
            # Not written down, so that a later version tries again.
            print(f"refused {name}: {error}", flush=True)
            continue
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(name, {key: value for key, value in row.items() if key not in ("psnr", "case", "layers")}, flush=True)


if __name__ == "__main__":
    main()
