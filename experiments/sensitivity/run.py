"""The long comparisons of the sensitivity-driven defenses. Run it again to go on: finished cases are skipped.

    GRADVEIL_DATA=/path/to/data python experiments/sensitivity/run.py [KIND...]

Kinds: tradeoff (the optimal defenses against magnitude pruning and uniform noise on mnist-cnn), bound (attacks on
smoothed victims against the reconstruction bound), risk (layer ranking against the brute-force Jacobian), slicing
(risk slicing in a federation of 100 clients), compensation (of real aggregates: distance and cosine to the clean one),
guess (the class mean, scored like an attack). Results are appended to results.jsonl, one line a case; nothing there is
ever edited. `plot.py` draws them.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import gradveil
from gradveil import data, metrics, models, theory
from gradveil.data import Dataset, Split, partition
from gradveil.defenses.risk_slicing import layer_risks
from gradveil.federation import Training, train
from gradveil.federation.job import as_batch, evaluate, split_public
from gradveil.modality import IMAGE
from gradveil.randomness import derived_generator
from gradveil.update import weighted_mean

HERE = Path(__file__).parent


def build(model: str, dataset: Dataset, seed: int, **parameters: object) -> gradveil.Task:
    shape, classes = dataset.train.input_shape, len(dataset.classes)
    net = models.create(model, input_shape=shape, classes=classes, seed=seed, **parameters)
    return gradveil.Task(net, input_shape=shape, classes=classes)


def prepared(defense: gradveil.Defense, task: gradveil.Task, dataset: Dataset, seed: int) -> gradveil.Defense:
    public, _ = split_public(dataset.train, seed)
    batch = as_batch(task, dataset.train.batch(public))
    defense, _ = defense.prepare(task, public=batch, generator=derived_generator(seed, "prepare"))
    return defense


def victims_of(split: Split, victims: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images ``[victims, size, ...]`` and labels ``[victims, size]``."""
    order = torch.randperm(len(split), generator=derived_generator(seed, "victims"))[: victims * size]
    images, labels = split.batch(order)
    return images.view(victims, size, *split.input_shape), labels.view(victims, size)


def attacked(task: gradveil.Task, images: Tensor, labels: Tensor, updates: list, attack: str, seed: int) -> list[dict]:
    """The scores of an attack that is given the labels, one a victim."""
    threat = gradveil.ThreatModel(labels="known", batch_size=labels.shape[1], known_labels=labels)
    found = gradveil.attack(attack).reconstruct(
        task, updates, threat, generator=derived_generator(seed, "attack"), execution="loop"
    )
    scorer = metrics.Scorer()
    return [
        scorer.score(images[v], found.inputs[v].to(images), labels[v], found.labels[v], None)
        for v in range(len(labels))
    ]


def mean(values: list[float]) -> float:
    return float(f"{math.fsum(values) / len(values):.5g}")


# -- the kinds -------------------------------------------------------------------------------------------------------


def tradeoff(case: dict, seed: int) -> dict:
    """mnist-cnn, batches of 16: what IG recovers, U1, U2 and tr J_F at the first weights, the loss after training."""
    dataset = data.load("mnist")
    task = build("mnist-cnn", dataset, seed)
    images, labels = victims_of(dataset.test, 4, 16, seed)
    batches = list(zip(images, labels, strict=True))
    if "u2_of" in case:
        # Uniform noise of variance v has U2 = -v |g|^2.
        other = gradveil.defense(case["u2_of"])
        u2 = theory.usefulness(task, batches, other, draws=64, generator=derived_generator(seed, "u2")).u2
        squared = mean([sum(float(g.square().sum()) for g in task.gradients(*batch).values()) for batch in batches])
        defense = gradveil.defense("gaussian-noise", std=math.sqrt(-u2 / squared))
    else:
        defense = gradveil.defense(case["defense"])
    updates = [
        defense.share(task, *batch, generator=derived_generator(seed, "share", v)) for v, batch in enumerate(batches)
    ]
    scores = attacked(task, images, labels, updates, "inverting-gradients:iterations=1000,lr=0.05,tv=0.01", seed)
    use = theory.usefulness(task, batches, defense, draws=32, generator=derived_generator(seed, "u2"))

    subset = Split(dataset.train.inputs[:4196], dataset.train.targets[:4196])  # 4,096 and the 100 public ones
    small = Dataset(dataset.name, dataset.classes, dataset.source, subset, dataset.test)
    training = Training(rounds=200, clients=4, batch_size=16, lr=0.02, momentum=0.9, evaluate_every=20, seed=seed)
    trained = train(task, small, defense, training)
    return {
        "defense": str(defense),
        "mse": mean([score["mse"] for score in scores]),
        "psnr": mean([score["psnr"] for score in scores]),
        "mse_of_each": [float(f"{score['mse']:.4g}") for score in scores],
        "u1": float(f"{use.u1:.5g}"),
        "u2": float(f"{use.u2:.5g}"),
        "data_information": data_information(task, batches, defense, seed),
        "train_loss": float(f"{evaluate(trained.task, subset)[1]:.5g}"),
        "test_accuracy": trained.accuracy,
        "history": trained.history,
        "round_seconds": round(trained.round_seconds, 4),
    }


def data_information(task: gradveil.Task, batches: list, defense: gradveil.Defense, seed: int) -> float | None:
    """Mean of sum s^2 / variance; for optimal noise with the variance of its local form, which the bound leaves out."""
    if defense.name not in ("gaussian-noise", "optimal-noise"):
        return None
    total = []
    for number, batch in enumerate(batches):
        s2 = task.sensitivity(*batch, 40, generator=derived_generator(seed, "information", number))
        if defense.name == "gaussian-noise":
            total.append(sum(float(value.sum()) for value in s2.values()) / defense.std**2)
        else:
            # Another estimate than the one that chose the noise: with the same one the sum would be biased low.
            drawn = task.sensitivity(*batch, 10, generator=derived_generator(seed, "share", number))
            g2 = {name: value.square() for name, value in task.gradients(*batch).items()}
            variance = defense.variance(drawn, g2)
            total.append(sum(theory.reconstruction.information(s2[name], variance[name]) for name in s2))
    return mean(total)


def bound(case: dict, seed: int) -> dict:
    """Smoothed MNIST images on lenet under uniform noise: three attackers against the bound.

    The noise makes tr J_F `share` times the prior's n / tau^2, so the bound is tau^2 / (1 + share) a value. The third
    attacker is given the image before smoothing and inverts the linearised gradient as Bayes would: nobody who sees
    one update can do much better.
    """
    tau = theory.reconstruction.SMOOTHING
    dataset = data.load("mnist")
    task = build("lenet", dataset, seed, init="uniform").to(torch.float64)
    images, labels = victims_of(dataset.test, case["victims"], 1, seed)
    images = images.double()
    generator = derived_generator(seed, "smooth")
    smoothed = images + tau * torch.randn(images.shape, generator=generator, dtype=torch.float64)
    values = smoothed[0].numel()
    trace = mean(
        [
            sum(float(v.sum()) for v in task.sensitivity(smoothed[n], labels[n], 40, generator=generator).values())
            for n in range(len(labels))
        ]
    )
    variance = trace * tau**2 / values / case["share"]
    limit = theory.reconstruction_bound(
        task, list(zip(images, labels, strict=True)), variance, directions=40, generator=generator
    )
    defense = gradveil.defense("gaussian-noise", std=math.sqrt(variance))
    updates = [
        defense.share(task, smoothed[n], labels[n], generator=derived_generator(seed, "share", n))
        for n in range(len(labels))
    ]
    errors = {}
    threat = gradveil.ThreatModel(labels="known", known_labels=labels)
    for attack in ("idlg:iterations=300", "inverting-gradients:optimiser=lbfgs,iterations=150,tv=0.01"):
        found = gradveil.attack(attack).reconstruct(
            task, updates, threat, generator=derived_generator(seed, "attack"), execution="loop"
        )
        errors[attack] = [float((found.inputs[n] - smoothed[n]).square().mean()) for n in range(len(labels))]
    errors["the image before smoothing"] = [
        float((images[n] - smoothed[n]).square().mean()) for n in range(len(labels))
    ]
    errors["linearised Bayes from the image before smoothing"] = [
        float((bayes(task, images[n], labels[n], updates[n], variance, tau) - smoothed[n]).square().mean())
        for n in range(len(labels))
    ]
    return {
        "tau": tau,
        "std": defense.std,
        "bound_mse": limit.mse,
        "tau_squared_over_2": tau**2 / 2,
        "mean_mse": {name: mean(each) for name, each in errors.items()},
        "standard_error": {name: float(torch.tensor(each).std() / len(each) ** 0.5) for name, each in errors.items()},
    }


def bayes(task: gradveil.Task, start: Tensor, label: Tensor, update: dict, variance: float, tau: float) -> Tensor:
    """The posterior mean of x = start + N(0, tau^2) if the gradient were linear around `start`."""
    gradients = task.gradients(start, label)
    basis = torch.eye(start.numel(), dtype=start.dtype).view(-1, *start.shape)

    def response(direction: Tensor) -> Tensor:
        inner = torch.func.jvp(lambda x: task.gradient(task.parameters, x, label), (start,), (direction,))[1]
        return torch.cat([value.flatten() for value in inner.values()])

    jacobian = torch.func.vmap(response, chunk_size=98)(basis)  # [inputs, gradients]
    difference = torch.cat([(update[name] - gradients[name]).flatten() for name in gradients])
    precision = jacobian @ jacobian.T / variance + torch.eye(len(basis), dtype=start.dtype) / tau**2
    return start + torch.linalg.solve(precision, jacobian @ difference / variance).view_as(start)


def risk(case: dict, seed: int) -> dict:
    """The layers by their estimated risk and by that of the brute-force Jacobian, on the same public images."""
    dataset = data.load(case["dataset"])
    task = build(case["model"], dataset, seed)
    public, _ = split_public(dataset.train, seed)
    inputs, labels = dataset.train.batch(public[: case["examples"]])
    estimate = layer_risks(task, inputs, labels, generator=derived_generator(seed, "risk"))
    exact = layer_risks(task, inputs, labels, directions=None)

    def ranking(risks: dict[str, float]) -> list[str]:
        return sorted(risks, key=risks.__getitem__, reverse=True)

    return {
        "same_ranking": ranking(estimate) == ranking(exact),
        "ranking": ranking(estimate),
        "exact_ranking": ranking(exact),
        "exact": {name: float(f"{value:.5g}") for name, value in exact.items()},
        "largest_relative_error": max(abs(estimate[name] / exact[name] - 1) for name in exact),
    }


def slicing(case: dict, seed: int) -> dict:
    """MNIST, 100 clients with 2 classes each, 10 a round, FedAvg with 2 epochs; then iDLG and IG on single images."""
    dataset = data.load("mnist")
    trainable = build("lenet", dataset, seed, activation="relu")
    local = gradveil.LocalSteps(epochs=2, batch_size=10, lr=0.1)
    training = Training(
        rounds=200,
        clients=100,
        clients_per_round=10,
        batch_size=20,
        lr=0.1,
        momentum=0.0,
        scheme="classes",
        classes_per_client=2,
        local=local,
        evaluate_every=20,
        seed=seed,
    )
    trained = train(trainable, dataset, gradveil.defense(case["defense"]), training)
    task = build("lenet", dataset, seed, init="uniform")
    defense = prepared(gradveil.defense(case["defense"]), task, dataset, seed)
    images, labels = victims_of(dataset.test, 16, 1, seed)
    updates = [
        defense.share(task, images[n], labels[n], generator=derived_generator(seed, "share", n))
        for n in range(len(labels))
    ]
    result: dict = {
        "accuracy": trained.accuracy,
        "history": trained.history,
        "round_seconds": round(trained.round_seconds, 4),
        "diverged": trained.diverged,
    }
    for attack in ("idlg:iterations=300", "inverting-gradients:optimiser=lbfgs,iterations=150,tv=0.01"):
        scores = attacked(task, images, labels, updates, attack, seed)
        result[attack] = {metric: mean([score[metric] for score in scores]) for metric in ("psnr", "ssim", "mse")}
    return result


def compensation(case: dict, seed: int) -> dict:
    """Ten clients with 20 images of two classes each under risk slicing: what compensation makes of their mean."""
    dataset = data.load("mnist")
    task = build(case["model"], dataset, seed, **case.get("parameters", {}))
    defense = prepared(gradveil.defense("risk-slicing", **case["defense"]), task, dataset, seed)
    shares = partition(dataset.train.targets, clients=100, scheme="classes", classes_per_client=2, seed=seed)[:10]
    batches = [dataset.train.batch(share[:20]) for share in shares]
    clean = [gradveil.defense("none").share(task, *batch) for batch in batches]
    sent = [defense.perturb(update, generator=derived_generator(seed, n)) for n, update in enumerate(clean)]
    goal, noisy = flat(weighted_mean(clean)), weighted_mean(sent)
    variance = defense.aggregate_variance([1.0] * len(sent))
    noise = {name: noisy[name] - value for name, value in weighted_mean(clean).items()}
    results = {
        "before": flat(noisy),
        "after": flat(gradveil.compensate(noisy, variance)),
        "paper": flat(gradveil.compensate(noisy, variance * len(sent) ** 2)),
    }
    distance = {name: float(f"{(value - goal).norm():.4g}") for name, value in results.items()}
    cosine = {
        name: round(float(torch.nn.functional.cosine_similarity(value, goal, dim=0)), 4)
        for name, value in results.items()
    }
    left = flat(gradveil.compensate(noise, variance)).square().sum() / flat(noise).square().sum()
    return {
        "clean_norm": float(f"{goal.norm():.4g}"),
        "energy_left": round(float(left), 4),
        "distance": {key: distance[key] for key in ("before", "after")},
        "cosine": {key: cosine[key] for key in ("before", "after")},
        "paper": {"distance": distance["paper"], "cosine": cosine["paper"]},
    }


def guess(case: dict, seed: int) -> dict:
    """What the public mean image of the class scores on the victims of the other kinds: no gradient needed."""
    dataset = data.load("mnist")
    images, labels = victims_of(dataset.test, case["victims"], case["batch_size"], seed)
    public = dataset.train
    scorer = metrics.Scorer()
    scores = [
        scorer.score(
            images[v],
            IMAGE.blind(public.inputs, public.targets, labels[v], classes=len(dataset.classes)),
            labels[v],
            labels[v],
            None,
        )
        for v in range(len(labels))
    ]
    return {metric: mean([score[metric] for score in scores]) for metric in ("psnr", "ssim", "mse")}


def flat(update: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in update.values()]).double()


KINDS = {
    "tradeoff": tradeoff,
    "bound": bound,
    "risk": risk,
    "slicing": slicing,
    "compensation": compensation,
    "guess": guess,
}


def main() -> None:
    torch.set_num_threads(1)
    config = json.loads((HERE / "config.json").read_text())
    results = HERE / "results.jsonl"
    wanted = sys.argv[1:] or list(KINDS)
    for case in config["cases"]:
        finished = (
            {json.loads(line)["name"] for line in results.read_text().splitlines()} if results.exists() else set()
        )
        if case["name"] in finished or case["kind"] not in wanted:
            continue
        started = time.perf_counter()
        row = {**case, "seed": config["seed"], **KINDS[case["kind"]](case, config["seed"])}
        row["seconds"] = round(time.perf_counter() - started, 1)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({key: value for key, value in row.items() if key != "history"}), flush=True)


if __name__ == "__main__":
    main()
