"""The audit as a library: from a case to what an attacker sees, and to the scores of the attack.

An audit, an experiment and a test all take the same steps::

    prepared = prepare(task, defense, attack, public=public, seed=0)
    seen = observe(fit(Case(prepared, attack, victims)))
    scores = score(seen, attack_on(seen), scorer)
"""

import fnmatch
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradveil import metrics, models, theory
from gradveil.attacks import Attack, Reconstruction, ThreatModel
from gradveil.attacks.problem import Progress
from gradveil.audit.rows import MODES, PUBLISHERS
from gradveil.core import checks
from gradveil.core.errors import DataError, InputError, ParameterError
from gradveil.core.randomness import derived_generator
from gradveil.core.registry import parse_spec
from gradveil.core.tensors import first_mismatch
from gradveil.data import Dataset, Split
from gradveil.defenses import Defense
from gradveil.defenses import create as create_defense
from gradveil.federation import Training, train
from gradveil.federation.job import as_batch, split_public
from gradveil.task import Task
from gradveil.update import Announced, LocalSteps, Rounds, Update, compute_update

Batch = tuple[Tensor, Tensor]
Memory = dict[str, Tensor]

PUBLISHED_BY = {
    "honest": "attacked as ordinary clients, inside what another, honest client announced for the round.",
    "lying": "attacked as ordinary clients, inside what a liar announced for the round: another client that passes its "
    "smallest values off as its largest.",
    "victim": "attacked as the clients that announce for the round, each inside what it announced itself.",
}
"""What readers of the figures of a defense that announces must know, by the publisher of the case."""


def build_task(
    dataset: Dataset,
    model: str,
    *,
    seed: int = 0,
    loss: str = "cross-entropy",
    weights: Path | None = None,
    shared: str | None = None,
    norms: str | None = None,
    dropout: str = "train",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: str = "cpu",
) -> Task:
    """Build the task of a model for a data set.

    Args:
        dataset: gives the modality, the shape of an input and the classes.
        model: a name with parameters, or ``FILE.py@FUNCTION``, which runs the code in that file.
        seed: seed of the initial weights.
        loss: ``"cross-entropy"``, or ``"logistic"`` for two classes and a model with one logit.
        weights: a safetensors file of the user's own weights, under the model's names; None: the initial ones.
        shared: patterns of the parameters that leave the client, with commas between them; None: all but the
            embedding of a text model. The others are frozen.
        norms: ``"train"``: batch norm uses the statistics of the batch; ``"inference"``: its running ones; None: as the
            model is built.
        dropout: ``"train"``: dropout modules are active, whatever their mode in the model; ``"inference"``: all modules
            but batch norms are in evaluation mode.
        mean: the model's normalisation per channel or column, together with `std`; None: none.
        std: see `mean`.
        device: the device to compute on.
    """
    name, parameters = parse_spec(model)
    split, classes = dataset.train, len(dataset.classes)
    logits = 1 if loss == "logistic" else classes
    known = split.modality.model_arguments(split.stored_shape)
    net = models.create(name, classes=logits, seed=seed, **known, **parameters)
    if weights is not None:
        load_weights(net, weights)
    if shared is not None:
        _share_only(net, shared.split(","))
    if norms is not None:
        checks.choice("audit", "norms", norms, MODES)
        for module in net.modules():
            if isinstance(module, _BatchNorm):
                module.train(norms == "train")
    _switch_dropout(net, checks.choice("audit", "dropout", dropout, MODES))
    net, modality = split.modality.bind(net.to(usable_device(device)), split.stored_shape, withhold=shared is None)
    shape = modality.input_shape(split.stored_shape)
    task = Task(net, loss, input_shape=shape, classes=classes, mean=mean, std=std, modality=modality)
    if loss == "cross-entropy" and _gives_probabilities(task):
        warnings.warn(
            f"{model} ends in softmax: its outputs sum to one, but the cross-entropy loss expects logits and applies "
            "softmax itself, so gradients are small and attacks look weak; remove the last softmax unless you really "
            "train that way",
            stacklevel=2,
        )
    return task


@torch.no_grad()
def _gives_probabilities(task: Task) -> bool:
    """Whether the outputs for noise are at least 0 and sum to one."""
    shape, randomness = (4, *task.input_shape), derived_generator(0, "noise", device=task.device)
    outputs = task.predict(task.modality.start(shape, randomness, dtype=task.dtype, device=task.device))
    sums = outputs.sum(1)
    return (
        outputs.shape[1] > 1 and bool((outputs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
    )


def check_attackable(task: Task) -> None:
    """Refuse a model without the second derivatives that attacks need; some recurrent and fused layers have none."""
    parameters, shape = task.parameters, (2, 2, *task.input_shape)
    randomness = derived_generator(0, "noise", device=task.device)
    inputs = task.modality.start(shape, randomness, dtype=task.dtype, device=task.device)
    if task.classes is None:
        return
    labels = task.random_labels(4, randomness).view(2, 2, *task.positions)

    def cost(candidate: Tensor, label: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in task.gradient(parameters, candidate, label).values()]).sum()

    try:
        slopes = vmap(grad(cost))(inputs, labels)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"audit: expected a model whose gradients can be differentiated again and batched, which attacks need, got "
            f"an error: {reason}; replace fused layers such as nn.LSTM and nn.GRU by loops over nn.LSTMCell or "
            "nn.GRUCell, and operations in place by others"
        ) from error
    if not torch.isfinite(slopes).all():
        raise InputError(
            "audit: expected gradients with finite derivatives, got NaN or Inf on noise; check the model's operations "
            "(sqrt, norm and division at 0)"
        )


def _share_only(net: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that no pattern matches."""
    names = [name for name, _ in net.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ParameterError(
                f"audit: shared must name parameters of the model, got {pattern!r}, which matches none of "
                f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            )
    for name, parameter in net.named_parameters():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def at_stage(task: Task, dataset: Dataset, training: Training, stage: float) -> Task:
    """The task after this share of an undefended training; itself at stage 0.

    Args:
        task: the task at its first weights.
        dataset: the data of the training.
        training: the settings of the whole training.
        stage: in [0, 1].
    """
    rounds = round(stage * training.rounds)
    if rounds == 0:
        return task
    result = train(task, dataset, create_defense("none"), replace(training, rounds=rounds, evaluate_every=None))
    if result.diverged is not None:
        raise ParameterError(
            f"audit: expected weights after {rounds} rounds of undefended training (stage={stage}), but it diverged in "
            f"round {result.diverged + 1}; lower --lr"
        )
    return result.task


def _switch_dropout(net: torch.nn.Module, mode: str) -> None:
    for module in net.modules():
        if mode == "train" and isinstance(module, _DropoutNd):
            module.train()
        # Any other module may contain dropout: attention and recurrent layers do.
        if mode == "inference" and not isinstance(module, _BatchNorm):
            module.training = False


def usable_device(name: str) -> torch.device:
    """The device of that name, if torch can compute on it here.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        tensor = torch.zeros(1, device=name)
        tensor.item()  # fails on devices without values, such as "meta"
        return tensor.device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # what torch raises if there is no such device
        reason = str(error).partition("\n")[0]
        raise ParameterError(f"device must be one that torch has here, such as cpu, got {name!r}: {reason}") from error


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Load the weights of a safetensors file, which holds no code, into a model; all of them must be there and fit."""
    try:
        values = safetensors.torch.load_file(path)
    except OSError as error:
        raise DataError(f"{path}: expected a file of weights that can be read, got: {error}") from error
    except SafetensorError as error:
        raise DataError(
            f"{path}: expected weights in the safetensors format, got something else ({error}); write them with "
            "safetensors.torch.save_file(model.state_dict(), path)"
        ) from error
    if wrong := first_mismatch(model.state_dict(), values):
        name, expected, got = wrong
        raise DataError(f"{path}: expected for {name!r} {expected}, got {got}; use weights of this very model")
    for name, value in values.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise DataError(f"{path}: expected finite weights, got NaN or Inf in {name!r}")
    model.load_state_dict(values)


@dataclass(frozen=True, eq=False)
class Victims:
    """The examples behind the updates that are attacked.

    Args:
        inputs: ``[victims, examples, *input_shape]``, one client's examples after the other's.
        targets: ``[victims, examples, *target_shape]``.
        clients: how many clients hold a victim's examples between them and send in the same round.
        first: number of the first of these victims in the whole audit; random draws derive from it.
        publishers: for each victim, the examples of another client, which announces for the victim's rounds if the
            defense needs that, as inputs and targets ``[victims, examples, ...]``; None: there is no such client.

    Example:
        >>> victims = Victims(torch.zeros(3, 4, 1, 8, 8), torch.zeros(3, 4, dtype=torch.long), clients=2)
        >>> len(victims), victims.batch_size, len(victims.part(range(1, 3)))
        (3, 2, 2)
    """

    inputs: Tensor
    targets: Tensor
    clients: int = 1
    first: int = 0
    publishers: Batch | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def batch_size(self) -> int:
        """Examples behind each client's update."""
        return self.inputs.shape[1] // self.clients

    def part(self, chosen: range) -> "Victims":
        """A range of consecutive victims."""
        rows = slice(chosen.start, chosen.stop)
        publishers = None if self.publishers is None else (self.publishers[0][rows], self.publishers[1][rows])
        return Victims(self.inputs[rows], self.targets[rows], self.clients, self.first + chosen.start, publishers)

    def batches(self, victim: int) -> list[Batch]:
        """The examples that each client of a victim holds."""
        return list(zip(self.inputs[victim].chunk(self.clients), self.targets[victim].chunk(self.clients), strict=True))


def choose_victims(
    split: Split,
    victims: int,
    batch_size: int = 1,
    *,
    clients: int = 1,
    seed: int = 0,
    classes: int | None = None,
    publishers: Split | None = None,
) -> Victims:
    """Choose random victims from a split, the same for the same seed.

    Args:
        split: where victims come from; none of its examples may be used for anything else.
        victims: number of victims.
        batch_size: examples behind each update.
        clients: clients behind each victim.
        seed: seed of the choice.
        classes: how many classes the examples of each client come from, in nearly equal parts; None: any.
        publishers: the training split, which has the examples of the clients that announce for the victims' rounds;
            those that are public are left out. Needed for defenses that announce, unless the victims do it themselves.
    """
    shape = victims, clients * batch_size
    wanted = math.prod(shape)
    if wanted > len(split):
        raise ParameterError(
            f"audit: {victims} victims of {shape[1]} {split.modality.unit}s need {wanted} of them, the test split has "
            f"{len(split)}; ask for fewer victims or a smaller batch"
        )
    order = torch.randperm(len(split), generator=derived_generator(seed, "victims"))
    if classes is not None:
        order = _of_few_classes(split, order, victims * clients, batch_size, classes)
    inputs, targets = split.batch(order[:wanted])
    chosen = Victims(inputs.view(*shape, *inputs.shape[1:]), targets.view(*shape, *targets.shape[1:]), clients)
    return (
        chosen if publishers is None else replace(chosen, publishers=_publishers(publishers, victims, batch_size, seed))
    )


def _of_few_classes(split: Split, order: Tensor, clients: int, batch_size: int, classes: int) -> Tensor:
    """The places of each client's examples, which come from `classes` classes; no example is used twice."""
    if split.targets.ndim != 1 or split.targets.is_floating_point():
        raise ParameterError("audit: victim_classes needs data with one class per example; leave it out")
    left = {label: order[split.targets[order] == label].tolist() for label in torch.unique(split.targets).tolist()}
    sizes = [len(part) for part in torch.arange(batch_size).tensor_split(classes)]
    chosen: list[int] = []
    for client in range(clients):
        # Classes with enough examples left come first, otherwise in a random order.
        fullest = sorted(left, key=lambda label: (len(left[label]) < sizes[0], left[label][:1] or [len(split)]))
        for label, size in zip(fullest, sizes, strict=False):
            chosen += [left[label].pop(0) for _ in range(min(size, len(left[label])))]
        if len(chosen) < (client + 1) * batch_size:
            raise ParameterError(
                f"audit: {clients} batches of {batch_size} {split.modality.unit}s of {classes} classes each need more "
                f"examples of the same classes than the test split has; ask for fewer victims or more victim_classes"
            )
    return torch.tensor(chosen)


def _publishers(split: Split, victims: int, batch_size: int, seed: int) -> Batch:
    """For each victim, the examples of another client, drawn from those that are not public."""
    _, private = split_public(split, seed)
    if batch_size > len(private):
        raise ParameterError(
            f"audit: a client that announces needs {batch_size} training {split.modality.unit}s that are not public, "
            f"there are {len(private)}; ask for a smaller batch"
        )
    generator = derived_generator(seed, "publishers")
    drawn = [private[torch.randperm(len(private), generator=generator)[:batch_size]] for _ in range(victims)]
    inputs, targets = split.batch(torch.cat(drawn))
    shape = victims, batch_size
    return inputs.view(*shape, *inputs.shape[1:]), targets.view(*shape, *targets.shape[1:])


@dataclass(frozen=True, eq=False)
class PreparedDefense:
    """A defense that is prepared for the model that a server sends.

    Args:
        defense: the prepared defense.
        sent: the model as the server sends it; an active server has changed it.
        task: the model that clients train: `sent`, as the defense may have changed it.
    """

    defense: Defense
    sent: Task
    task: Task


def prepare(task: Task, defense: Defense, attack: Attack, *, public: Batch | None, seed: int = 0) -> PreparedDefense:
    """Let an active server change the model, then prepare the clients' defense for the model that they are sent.

    Args:
        task: the honest model.
        defense: the clients' defense.
        attack: the attack, which may change the model.
        public: examples that anybody has.
        seed: seed of both steps.
    """
    device = task.device
    sent = attack.modify(task, public=public, generator=derived_generator(seed, "modify", str(attack), device=device))
    randomness = derived_generator(seed, "prepare", str(defense), device=device)
    prepared, trained = defense.prepare(sent, public=public, generator=randomness)
    return PreparedDefense(prepared, sent, trained)


@dataclass(frozen=True, eq=False)
class Case:
    """One defense against one attacker on some victims.

    Args:
        prepared: the prepared defense and the model.
        attack: the attack.
        victims: whom it attacks.
        adaptive: whether the attacker knows the defense, or the name of the form in which it uses that knowledge.
        labels: ``"infer"``: the attacker must find the labels; ``"known"``: it is given them.
        local: the clients' local steps; None: each update is a single gradient.
        rounds: how many rounds of each victim, on the same data, the attacker observes.
        server_lr: learning rate of the server's step along the mean update between these rounds.
        seed: everything random derives from it.
        publisher: who announces for the victims' rounds, if the defense needs that: ``"honest"``: another client;
            ``"lying"``: another client, which passes its smallest values off as its largest; ``"victim"``: the first
            client of the victim, inside whose own announcement it is then attacked.
        public: examples that anybody has, none of them a victim's, which an attack that learns may learn from.
        local_known: what the attacker knows about the local steps, see `ThreatModel`.
    """

    prepared: PreparedDefense
    attack: Attack
    victims: Victims
    adaptive: bool | str = False
    labels: str = "infer"
    local: LocalSteps | None = None
    rounds: int = 1
    server_lr: float = 0.1
    seed: int = 0
    publisher: str = "honest"
    public: Batch | None = None
    local_known: str = "full"

    def __post_init__(self) -> None:
        checks.choice("audit", "publisher", self.publisher, PUBLISHERS)

    def threat(self, batch_size: int, targets: Tensor) -> ThreatModel:
        """What the attacker may know about updates of `batch_size` examples, whose labels are `targets`."""
        return ThreatModel(
            labels=self.labels,
            batch_size=batch_size,
            adaptive=self.adaptive,
            defense=self.prepared.defense,
            local=self.local,
            server=self.attack.server,
            known_labels=targets if self.labels == "known" else None,
            rounds=self.rounds,
            public=self.public if self.attack.needs_public else None,
            local_known=self.local_known,
        )

    def randomness(self, *path: object) -> torch.Generator:
        """A separate generator for each use."""
        return derived_generator(self.seed, *path, device=self.prepared.task.device)


@dataclass(frozen=True, eq=False)
class Observation:
    """What the server sees of a case's victims, and what only the audit knows about them.

    Args:
        case: the case that was observed.
        seen: what the server sees, one entry per update that the attacker may attack.
        trained_on: for each victim, the inputs that its clients really used, if the defense changed them.
        power: for each victim, how far what is seen in the first round is from what its clients computed, see
            `metrics.relative_power`; None if the defense changed the model itself.
    """

    case: Case
    seen: list[Rounds]
    trained_on: list[Tensor | None]
    power: list[float | None]

    @cached_property
    def targets(self) -> Tensor:
        """The labels behind each visible update, ``[updates, examples, ...]``."""
        targets = self.case.victims.targets
        return targets.reshape(len(self.seen), -1, *targets.shape[2:])


def observe(case: Case) -> Observation:
    """What the server sees of each victim's clients in the first rounds, as if no other clients took part in them."""
    prepared, victims = case.prepared, case.victims
    memories: list[list[Memory]] = [[{} for _ in range(victims.clients)] for _ in range(len(victims))]
    seen: list[list[tuple[Task, Update]]] = []
    powers: list[float | None] = []
    task = prepared.task
    for number in range(case.rounds):
        visible: list[Update] = []
        sent: list[Update] = []
        for victim in range(len(victims)):
            updates, tasks = _share_round(case, task, victim, memories[victim], number)
            seen_of_victim = prepared.defense.visible(updates)
            if number == 0:
                powers.append(_power(case, tasks, victim, seen_of_victim))
            sent += updates
            visible += seen_of_victim
        seen = seen or [[] for _ in visible]
        for rounds, update in zip(seen, visible, strict=True):
            rounds.append((task, update))
        if number + 1 < case.rounds:
            mean = prepared.defense.aggregate(sent)
            task = task.with_parameters(
                {name: value - case.server_lr * mean[name] for name, value in task.parameters.items()}
            )
    trained_on = [_trained_on(each, victims.inputs.shape[1]) for each in memories]
    return Observation(case, [Rounds(rounds) for rounds in seen], trained_on, powers)


def _share_round(
    case: Case, task: Task, victim: int, memories: Sequence[Memory], number: int
) -> tuple[list[Update], list[Task]]:
    """What a victim's clients send in one round, and the models that they were sent."""
    defense, victims = case.prepared.defense, case.victims
    first = (victims.first + victim) * victims.clients
    round_path = (number,) if number else ()  # the first round draws as in an audit of one round
    tasks = [case.attack.for_client(task, first + client) for client in range(victims.clients)]
    batches = [as_batch(task, batch) for batch in victims.batches(victim)]
    announced = _announcement(case, tasks[0], victim, memories[0], round_path) if defense.announces else None
    updates = [
        defense.share(
            client_task,
            *batch,
            generator=case.randomness("share", str(defense), first + client, *round_path),
            memory=memory,
            announced=announced,
            local=case.local,
        )
        for client, (client_task, batch, memory) in enumerate(zip(tasks, batches, memories, strict=True))
    ]
    return updates, tasks


def _announcement(case: Case, task: Task, victim: int, memory: Memory, round_path: tuple[int, ...]) -> Announced | None:
    """What the publisher of the case announces for a victim's round; another client does so in its first round."""
    defense, victims = case.prepared.defense, case.victims
    number = (victims.first + victim) * victims.clients
    generator = case.randomness("announce", str(defense), number, *round_path)
    if case.publisher == "victim":
        batch = as_batch(task, victims.batches(victim)[0])
        return defense.announce(task, *batch, generator=generator, memory=memory, local=case.local)
    if victims.publishers is None:
        raise ParameterError(
            f"audit: under {defense.name} another client announces for the victims' rounds, and there is none; "
            'write choose_victims(..., publishers=dataset.train), or Case(..., publisher="victim")'
        )
    inputs, targets = victims.publishers
    batch = as_batch(task, (inputs[victim], targets[victim]))
    if case.publisher == "honest":
        return defense.announce(task, *batch, generator=generator, memory={}, local=case.local)
    honest = compute_update(task, *batch, local=case.local, generator=generator)
    # The reciprocal reverses the order of the magnitudes; the summand keeps that of a zero finite.
    announced = defense.publish({name: 1 / (value.abs() + 1e-30) for name, value in honest.items()}, {})
    if announced is None:
        raise ParameterError(
            f"audit: publisher=lying needs a defense that makes its announcement from gradients, got {defense.name}, "
            "which makes it from data; use publisher=honest or publisher=victim"
        )
    defense.check_announced(announced, task.parameters)  # a lie that the server refuses would show nothing
    return announced


def _power(case: Case, tasks: Sequence[Task], victim: int, visible: Sequence[Update]) -> float | None:
    """The mean over a victim's clients of `metrics.relative_power` in the first round."""
    prepared, victims = case.prepared, case.victims
    if first_mismatch(prepared.task.parameters, prepared.sent.parameters):
        return None
    powers = []
    for client, (task, batch) in enumerate(zip(tasks, victims.batches(victim), strict=True)):
        seen = visible[client * len(visible) // victims.clients]
        mean = {name: value / seen.meta.clients for name, value in seen.items()}
        number = (victims.first + victim) * victims.clients + client
        generator = case.randomness("share", str(prepared.defense), number)  # so that local steps use the same order
        honest = compute_update(task, *as_batch(task, batch), local=case.local, generator=generator)
        powers.append(metrics.relative_power(honest, mean))
    return finite(fmean(powers))


def _trained_on(memories: Sequence[Memory], examples: int) -> Tensor | None:
    """The inputs that were really used, as noted by a defense that stands alone or comes first in a chain.

    With several local steps a defense notes only the inputs of the last one; these are not all `examples`, hence None.
    """
    used = [memory.get("trained_on", memory.get("0/trained_on")) for memory in memories]
    found = [inputs for inputs in used if inputs is not None]
    return torch.cat(found) if sum(map(len, found)) == examples else None


def bound(case: Case) -> float | None:
    """The least mean squared error of any attacker on smoothed inputs; None: no bound is known."""
    if case.local is not None or case.rounds > 1:
        return None  # the bound is that of one gradient
    prepared, victims = case.prepared, case.victims
    batches = [as_batch(prepared.task, batch) for victim in range(len(victims)) for batch in victims.batches(victim)]
    randomness = case.randomness("bound", str(prepared.defense))
    found = theory.reconstruction_bound(prepared.task, batches, prepared.defense, generator=randomness)
    return None if found is None else found.mse


def fit(case: Case, *, progress: Progress = None, cache: Path | None = None) -> Case:
    """The case with its attack fitted: a learned attack trains before it sees an update. Most have nothing to learn.

    Args:
        case: the case.
        progress: called with (steps done, steps in all, seconds left).
        cache: see `Attack.fit`.
    """
    if not case.attack.needs_public:
        return case
    victims, hidden = case.victims, case.prepared.defense.hides_updates
    threat = case.threat(victims.inputs.shape[1] if hidden else victims.batch_size, victims.targets)
    randomness = case.randomness("fit", str(case.attack))
    fitted = case.attack.fit(case.prepared.task, threat, generator=randomness, progress=progress, cache=cache)
    return replace(case, attack=fitted)


def attack_on(
    observation: Observation, *, progress: Progress | None = None, execution: str | None = None
) -> Reconstruction:
    """Attack what was observed; a learned attack must have been fitted before (`fit`).

    Args:
        observation: what the attacker sees.
        progress: called with (steps done, steps in all, seconds left).
        execution: see `Attack.reconstruct`; default: chosen by size, so that the figures are repeatable.
    """
    case, targets = observation.case, observation.targets
    task, threat = case.prepared.task, case.threat(targets.shape[1], targets)
    return case.attack.reconstruct(
        task,
        observation.seen,
        threat,
        generator=case.randomness("attack", str(case.attack), case.victims.first),
        progress=progress,
        execution=execution or choose_execution(task, targets.shape[1]),
    )


def choose_execution(task: Task, batch_size: int) -> str:
    """Loop or batch, by size and not by timing: they round differently, and an audit must be repeatable to the bit.

    Measured on two cores: one vmapped program for all victims is three times faster on lenet (30,000 values) and
    slower on convnet and resnet18 (millions).
    """
    return "batch" if batch_size * task.activations + task.size < 300_000 else "loop"


@dataclass(frozen=True)
class Score:
    """How well an attack reconstructed one victim.

    Args:
        inputs: the reconstruction, ``[examples, *input_shape]``.
        metrics: the mean over the examples for each metric, with ``label_correct``, ``leaked`` and ``leak_rule``.
        trained_on: the metrics against what the clients really used, if the defense changed that.
        loss: the attacker's own final loss; the mean over a victim's updates if they were attacked one by one.
        losses: ``loss_start``, ``loss_late`` and ``loss_restarts``; all None if there was no search, or if one of the
            losses was not finite.
        iterations: iterations of the longest search.
        seconds: the victim's share of the wall time.
    """

    inputs: Tensor = field(repr=False)
    metrics: Mapping[str, Any]
    trained_on: Mapping[str, Any] | None
    loss: float | None
    losses: Mapping[str, Any]
    iterations: int
    seconds: float


def score(
    observation: Observation,
    found: Reconstruction,
    scorer: metrics.Scorer,
    blind: Mapping[str, Tensor] | None = None,
) -> list[Score]:
    """Score a reconstruction, victim by victim.

    Args:
        observation: what was attacked.
        found: what the attack reconstructed.
        scorer: the scorer of the modality.
        blind: the blind guess's score of each example by each metric, ``[victims, examples]``; without it the
            ``leaked`` verdict cannot be given.
    """
    victims = observation.case.victims
    count = len(victims)
    # If a victim's clients are seen one by one, each was attacked separately.
    inputs = found.inputs.reshape(count, -1, *victims.inputs.shape[2:])
    guesses = found.labels.reshape(victims.targets.shape)
    losses, steps = (tensor.reshape(count, -1) for tensor in (found.loss, found.iterations))
    results = []
    for victim in range(count):
        guess = (
            inputs[victim].float().cpu(),
            victims.targets[victim],
            guesses[victim].cpu(),
            None if blind is None else {name: scores[victim] for name, scores in blind.items()},
        )
        used = observation.trained_on[victim]
        results.append(
            Score(
                inputs=inputs[victim].cpu(),
                metrics=scorer.score(victims.inputs[victim], *guess),
                trained_on=None if used is None else scorer.score(used.float().cpu(), *guess),
                loss=finite(float(losses[victim].mean())),
                losses=_losses(found, victim, count),
                iterations=int(steps[victim].max()),
                seconds=found.seconds / count,
            )
        )
    return results


def blind_scores(
    scorer: metrics.Scorer, public: Split, victims: Victims, guess: Tensor, *, seed: int = 0
) -> dict[str, Tensor]:
    """What leaks must beat: the best score of each example by each metric without a gradient, ``[victims, examples]``.

    That is the score of the blind guess and, if the modality asks for `draws` and there are batches, those of public
    examples with the same labels, drawn at random and matched like a reconstruction.

    Args:
        scorer: the scorer of the modality.
        public: the public examples.
        victims: what an attack would recover.
        guess: the blind guess ``[victims, examples, *input_shape]``.
        seed: seed of the draws.
    """
    examples = victims.targets.shape[1]
    flat = scorer.blind_scores(victims.inputs.flatten(0, 1), guess.flatten(0, 1))
    best = {name: scores.view(len(victims), examples) for name, scores in flat.items()}
    if not scorer.modality.draws or examples == 1 or victims.targets.ndim != 2:
        return best
    generator = derived_generator(seed, "drawn rows")
    members = {
        label: (public.targets == label).nonzero().flatten() for label in set(victims.targets.flatten().tolist())
    }
    for victim, (originals, labels) in enumerate(zip(victims.inputs, victims.targets.tolist(), strict=True)):
        for _ in range(scorer.modality.draws):
            places = [members[label][torch.randint(len(members[label]), (1,), generator=generator)] for label in labels]
            drawn = scorer.matched(originals, public.batch(torch.cat(places))[0])
            for name, scores in scorer.blind_scores(originals, drawn).items():
                closer = torch.maximum if metrics.METRICS.get(name).better == "higher" else torch.minimum
                best[name][victim] = closer(best[name][victim], scores)
    return best


NO_LOSSES: Mapping[str, Any] = {"loss_start": None, "loss_late": None, "loss_restarts": None}


def _losses(found: Reconstruction, victim: int, victims: int) -> Mapping[str, Any]:
    """The losses of the search for one victim; means over its clients if they were attacked one by one."""
    history = found.history
    if history is None:
        return NO_LOSSES
    start, late = (float(losses.view(victims, -1)[victim].mean()) for losses in (history.start, history.late))
    restarts = history.restarts.view(victims, -1, history.restarts.shape[-1])[victim].mean(0).tolist()
    if not all(map(math.isfinite, [start, late, *restarts])):
        return NO_LOSSES
    return {"loss_start": start, "loss_late": late, "loss_restarts": tuple(restarts)}


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinities, which JSON cannot hold."""
    return value if math.isfinite(value) else None
