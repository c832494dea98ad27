"""The audit as a library: cases, what is observed of them, scores."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import save_file

import gradveil
from gradveil import metrics, models
from gradveil.attacks import ATTACKS, Attack, Reconstruction
from gradveil.audit import AuditConfig, run
from gradveil.audit.cases import (
    Case,
    at_stage,
    attack_on,
    bound,
    build_task,
    choose_victims,
    fit,
    load_weights,
    observe,
    prepare,
    score,
)
from gradveil.core.errors import DataError, ParameterError, ThreatModelError
from gradveil.core.parameters import state
from gradveil.core.tensors import Tensors
from gradveil.data import Dataset, Split
from gradveil.federation import Training
from gradveil.federation.digests import weights_digest
from gradveil.federation.job import as_batch
from gradveil.update import LocalSteps

ATTACK = gradveil.attack("idlg", iterations=40)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    train, test = (
        Split(
            torch.randint(0, 256, (count, 1, 12, 12), generator=generator, dtype=torch.uint8), torch.arange(count) % 3
        )
        for count in (130, 30)
    )
    return Dataset("squares", ("a", "b", "c"), "made", train, test)


@pytest.fixture(scope="module")
def task(dataset):
    return build_task(dataset, "mlp:activation=sigmoid")


def case_of(dataset, task, spec="none", attack=ATTACK, **settings):
    victims = settings.pop("victims", None) or choose_victims(dataset.test, 3)
    public = dataset.train.batch(range(20))
    settings = {"public": public, **settings}
    return Case(prepare(task, gradveil.defense(spec), attack, public=public), attack, victims, **settings)


def test_a_case_is_observed_attacked_and_scored(dataset, task):
    seen = observe(case_of(dataset, task))
    assert [len(rounds) for rounds in seen.seen] == [1, 1, 1]
    assert seen.power == [0.0, 0.0, 0.0]
    assert seen.trained_on == [None, None, None]
    scores = score(seen, attack_on(seen), metrics.Scorer())
    assert len(scores) == 3
    for one in scores:
        assert one.metrics["label_correct"] == 1.0
        assert one.metrics["leaked"] is None  # it was not told the scores of a blind guess
        assert one.inputs.shape == (1, 1, 12, 12)
        assert one.losses["loss_start"] > one.losses["loss_late"] >= one.loss


def test_a_part_of_the_victims_is_observed_as_among_all(dataset, task):
    whole = case_of(dataset, task, "gaussian-noise:std=0.1")
    part = replace(whole, victims=whole.victims.part(range(1, 3)))
    for there, here in zip(observe(whole).seen[1:], observe(part).seen, strict=True):
        assert all(torch.equal(value, here[0][1][name]) for name, value in there[0][1].items())


def test_local_steps_apply_to_clients_and_attackers(dataset, task):
    local = LocalSteps(epochs=2, batch_size=1, lr=0.05)
    victims = choose_victims(dataset.test, 2, 2)
    case = case_of(dataset, task, "none", victims=victims, local=local, labels="known")
    seen = observe(case)
    assert seen.seen[0][0][1].meta.local == local
    assert seen.power == [0.0, 0.0]
    assert bound(replace(case, prepared=prepare(task, gradveil.defense("gaussian-noise"), ATTACK, public=None))) is None
    assert attack_on(seen).inputs.shape == (2, 2, 1, 12, 12)


def test_the_inputs_really_used_are_known_for_one_step(dataset, task):
    victims = choose_victims(dataset.test, 2, 2)
    spec = "ats:policy=invert"
    seen = observe(case_of(dataset, task, spec, victims=victims, labels="known"))
    for used, own in zip(seen.trained_on, victims.inputs, strict=True):
        assert torch.allclose(used, 1 - own, atol=1 / 255)
    refined = build_task(dataset, "lenet")
    local = LocalSteps(epochs=1, batch_size=1, lr=0.05)
    seen = observe(case_of(dataset, refined, "refiner:iterations=1", victims=victims, labels="known", local=local))
    assert seen.trained_on == [None, None]
    assert len(score(seen, attack_on(seen), metrics.Scorer())) == 2


def test_several_rounds_are_observed_at_other_weights(dataset, task):
    seen = observe(case_of(dataset, task, "top-k:keep=0.3+error-feedback", rounds=3, server_lr=0.5))
    for rounds in seen.seen:
        assert len(rounds) == 3
        weights = [task.parameters["classifier.weight"] for task, _ in rounds]
        assert not torch.equal(weights[0], weights[1])
    first = observe(case_of(dataset, task, "top-k:keep=0.3+error-feedback")).seen
    for one, several in zip(first, seen.seen, strict=True):
        assert all(torch.equal(value, several[0][1][name]) for name, value in one[0][1].items())
    assert attack_on(seen).inputs.shape == (3, 1, 1, 12, 12)


ALIGNED = "aligned-dual-pruning:k1=0.1,keep=0.2"


def sent_by(case):
    return [rounds[0][1] for rounds in observe(case).seen]


def set_of(defense, task, batch, *, lying=False):
    gradients = task.gradients(*as_batch(task, batch))
    return defense.publish({name: 1 / (value.abs() + 1e-30) if lying else value for name, value in gradients.items()})


@pytest.mark.parametrize("wrapper", ["", "+error-feedback", "+top-k:keep=0.9"])
def test_ordinary_clients_are_attacked_inside_the_set_of_another_client(dataset, task, wrapper):
    victims = choose_victims(dataset.test, 3, publishers=dataset.train)
    case = case_of(dataset, task, ALIGNED + wrapper, victims=victims)
    aligned, alone = gradveil.defense(ALIGNED), sent_by(replace(case, publisher="victim"))
    honest, lying = sent_by(case), sent_by(replace(case, publisher="lying"))
    for victim in range(3):
        own = victims.batches(victim)[0]
        other = tuple(part[victim] for part in victims.publishers)
        assert not torch.equal(own[0], other[0])
        for sent, public in (
            (honest, set_of(aligned, task, other)),
            (lying, set_of(aligned, task, other, lying=True)),
            (alone, set_of(aligned, task, own)),
        ):
            expected = case.prepared.defense.share(task, *as_batch(task, own), memory={}, announced=public)
            assert all(torch.equal(sent[victim][name], value) for name, value in expected.items())
            assert not any(value[~public[name]].any() for name, value in sent[victim].items())
    energy = [sum(float(value.square().sum()) for one in sent for value in one.values()) for sent in (honest, lying)]
    assert energy[1] < 0.8 * energy[0]  # a liar leaves less to send


def test_who_publishes_changes_nothing_else(dataset, task):
    """Neither the victims, nor a part of them, nor defenses that announce nothing."""
    with_others = choose_victims(dataset.test, 3, 2, publishers=dataset.train)
    assert torch.equal(with_others.inputs, choose_victims(dataset.test, 3, 2).inputs)
    assert with_others.publishers[0].shape == (3, 2, 1, 12, 12)
    assert with_others.publishers[1].shape == (3, 2)
    whole = case_of(dataset, task, ALIGNED, victims=with_others)
    part = replace(whole, victims=with_others.part(range(1, 3)))
    for there, here in zip(sent_by(whole)[1:], sent_by(part), strict=True):
        assert all(torch.equal(value, here[name]) for name, value in there.items())
    noisy = [sent_by(case_of(dataset, task, "gaussian-noise", publisher=who)) for who in ("honest", "lying", "victim")]
    assert all(torch.equal(value, other[0][name]) for other in noisy for name, value in noisy[0][0].items())


def test_a_publisher_that_there_is_not_is_refused(dataset, task):
    with pytest.raises(ParameterError, match=r"another client announces .* choose_victims\(..., publishers="):
        observe(case_of(dataset, task, ALIGNED))
    with pytest.raises(ParameterError, match="publisher must be one of honest, lying, victim, got 'nobody'"):
        case_of(dataset, task, ALIGNED, publisher="nobody")
    with pytest.raises(ParameterError, match="needs 31 training images that are not public, there are 30"):
        choose_victims(dataset.train, 1, 31, publishers=dataset.train)


def test_a_lie_is_made_of_gradients(dataset, task):
    class FromData(gradveil.Perturbation):
        name, announces = "from-data", True

        def make_announcement(self, client):
            return {"examples": client.targets}

        def perturb_rows(self, rows, draws):
            return rows.clone()

    victims = choose_victims(dataset.test, 2, publishers=dataset.train)
    case = case_of(dataset, task, victims=victims)
    case = replace(case, prepared=replace(case.prepared, defense=FromData()))
    assert observe(case)
    with pytest.raises(ParameterError, match="publisher=lying needs a defense that makes its announcement from grad"):
        observe(replace(case, publisher="lying"))


def test_clients_behind_a_victim_are_hidden_in_a_sum(dataset, task):
    victims = choose_victims(dataset.test, 2, 1, clients=3)
    seen = observe(case_of(dataset, task, "secure-aggregation", victims=victims))
    assert len(seen.seen) == 2
    assert seen.seen[0][0][1].meta.clients == 3
    assert seen.targets.shape == (2, 3)
    alone = observe(case_of(dataset, task, "none", victims=victims))
    assert len(alone.seen) == 6
    assert alone.targets.shape == (6, 1)


def test_more_victims_than_examples_are_refused(dataset):
    with pytest.raises(ParameterError, match="20 victims of 2 images need 40 of them, the test split has 30"):
        choose_victims(dataset.test, 20, 2)


# -- learned attacks --------------------------------------------------------------------------------------------------


@pytest.fixture
def nearest(monkeypatch):
    monkeypatch.setattr(ATTACKS, "_factories", dict(ATTACKS._factories))
    fitted = []

    @ATTACKS.register("nearest")
    @dataclass(frozen=True, repr=False)
    class Nearest(Attack):
        """Finds the public example whose gradient is nearest."""

        paper, needs_public, finds_labels = "-", True, True
        learned: Tensors | None = state()

        def learn(self, task, threat, learning):
            fitted.append(threat.defense.name)
            inputs, labels = threat.public
            return replace(self, learned=Tensors({"inputs": inputs, **task.per_example_gradients(inputs, labels)}))

        def run(self, problem):
            distances = sum(
                (value.flatten(1)[:, None] - self.learned[name].flatten(1)).square().sum(2)
                for name, value in problem.updates.items()
            )
            losses, places = distances.min(1)
            inputs = self.learned["inputs"][places][:, None]
            return Reconstruction(inputs, problem.labels, losses, torch.zeros(len(losses), dtype=torch.long))

    return fitted


def test_a_learned_attack_gets_the_public_examples(dataset, task, nearest):
    attack = gradveil.attack("nearest")
    case = fit(case_of(dataset, task, attack=attack))
    assert nearest == ["none"]
    assert case.attack != attack
    found = attack_on(observe(case)).inputs[:, 0]
    public, _ = dataset.train.batch(range(20))
    assert all(any(torch.equal(one, other) for other in public) for one in found)


@pytest.mark.filterwarnings("ignore:LPIPS")
def test_an_audit_learns_once_also_if_it_is_interrupted(dataset, nearest, tmp_path, monkeypatch):
    """A plain attacker knows no defense, so what it learned serves against all of them; at the end it is removed."""
    from gradveil.audit.run import _Work
    from gradveil.data.loader import SOURCES

    monkeypatch.setattr(SOURCES, "_factories", {"squares": lambda: dataset})
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    config = AuditConfig(
        dataset="squares",
        model="mlp",
        defenses=("none", "top-k"),
        attacks=("nearest",),
        victims=4,
        chunk=2,
        rounds=1,
        clients=2,
        client_batch=8,
        public=120,
        games=0,
    )
    attack = _Work._attack

    def interrupted(self, spec, *arguments):
        if spec != "none":
            raise KeyboardInterrupt
        return attack(self, spec, *arguments)

    with monkeypatch.context() as context:
        context.setattr(_Work, "_attack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "out")
    assert len(list((tmp_path / "cache" / "learned").rglob("*.safetensors"))) == 1
    run(config, tmp_path / "out", resume=True)
    assert nearest == ["none"]
    assert not list((tmp_path / "cache" / "learned").rglob("*.safetensors"))
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (described["learned"], described["public_examples"]) == (["nearest"], 120)


@pytest.mark.filterwarnings("ignore:LPIPS")
@pytest.mark.usefixtures("nearest")
def test_victims_among_the_public_examples_are_counted(dataset, monkeypatch):
    from gradveil.audit.run import Subject
    from gradveil.data.loader import SOURCES

    def overlap(data):
        monkeypatch.setattr(SOURCES, "_factories", {"squares": lambda: data})
        config = AuditConfig(dataset="squares", model="mlp", defenses=(), attacks=("nearest",), victims=4, clients=1)
        return Subject.of(config).describe()["public_overlap"]

    assert overlap(dataset) == 0
    assert overlap(replace(dataset, test=dataset.train)) == 4


# -- the user's own models -------------------------------------------------------------------------------------------


def test_the_users_own_weights_are_loaded_and_must_fit(dataset, tmp_path):
    path = tmp_path / "mine.safetensors"
    model = models.create("mlp", input_shape=(1, 12, 12), classes=3, seed=7)
    save_file(model.state_dict(), path)
    task = build_task(dataset, "mlp", weights=path)
    for name, value in model.named_parameters():
        assert torch.equal(task.parameters[name], value)
    with pytest.raises(
        DataError, match=r"mine.safetensors: expected for '.*' .*, got .*; use weights of this very model"
    ):
        build_task(dataset, "lenet", weights=path)
    path.write_bytes(b"no weights")
    with pytest.raises(DataError, match="expected weights in the safetensors format"):
        load_weights(model, path)
    with pytest.raises(DataError, match="expected a file of weights that can be read"):
        load_weights(model, tmp_path / "missing.safetensors")
    broken = {name: value * float("nan") for name, value in model.state_dict().items()}
    save_file(broken, path)
    with pytest.raises(DataError, match="expected finite weights, got NaN or Inf"):
        load_weights(model, path)


SMALL = {"attacks": ("idlg:iterations=2",), "defenses": ("none",), "model": "mlp", "games": 0, "victims": 1}
SMALL |= {"rounds": 4, "clients": 2, "client_batch": 8, "lr": 0.5, "public": 20}


def test_victims_are_attacked_at_a_stage_of_the_training(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("gradveil.data.load", lambda *_args, **_parameters: dataset)
    described, trained = {}, {}
    for stage in (0.0, 0.5, 1.0):
        folder = tmp_path / str(stage)
        run(AuditConfig(**SMALL, stage=stage), folder)
        described[stage] = json.loads((folder / "config.json").read_text())
        trained[stage] = json.loads((folder / "utility.jsonl").read_text())
    digests = [config["weights_digest"] for config in described.values()]
    assert len(set(digests)) == 3
    # The training behind the accuracy always begins at the first weights, and stage 1 is its end.
    assert len({row["accuracy"] for row in trained.values()}) == 1
    assert described[1.0]["weights_accuracy"] == trained[0.0]["accuracy"]
    task = build_task(dataset, "mlp")
    after = at_stage(task, dataset, Training(rounds=8, clients=2, batch_size=8, lr=0.5, seed=0), 0.25)
    assert weights_digest(after) == digests[1]
    with pytest.raises(ParameterError, match=r"after 8 rounds .* it diverged in round \d; lower --lr"):
        at_stage(task, dataset, Training(rounds=8, clients=2, lr=1e30), 1.0)


def test_only_shared_parameters_leave_the_client(dataset, tmp_path, monkeypatch):
    task = build_task(dataset, "mlp", shared="features.*.weight,*.bias")
    names = list(build_task(dataset, "mlp").parameters)
    assert "classifier.weight" in names
    assert list(task.parameters) == [name for name in names if name != "classifier.weight"]
    [[(_, update)]] = observe(case_of(dataset, task, victims=choose_victims(dataset.test, 1))).seen
    whole = build_task(dataset, "mlp")
    [[(_, all_of_it)]] = observe(case_of(dataset, whole, victims=choose_victims(dataset.test, 1))).seen
    for name, value in update.items():
        torch.testing.assert_close(value, all_of_it[name])
    with pytest.raises(ParameterError, match="shared must name parameters of the model, got 'layer9"):
        build_task(dataset, "mlp", shared="*.bias,layer9*")
    monkeypatch.setattr("gradveil.data.load", lambda *_args, **_parameters: dataset)
    with pytest.raises(ThreatModelError, match=r"classifier 'classifier.weight' is frozen, .* or --labels known"):
        run(AuditConfig(**SMALL, shared="features*"), tmp_path / "out")
    with pytest.raises(ParameterError, match="shared is about single gradients"):
        AuditConfig(shared="a*", local_epochs=1)


def test_attackers_use_only_what_they_know_of_local_steps(dataset, task):
    local = LocalSteps(epochs=2, batch_size=1, lr=0.1, momentum=0.5)
    attack, victims = gradveil.attack("idlg", iterations=3), choose_victims(dataset.test, 2, 2)
    seen = {}
    for known, assumed in {"full": local, "part": LocalSteps(2, None, 0.1), "none": None}.items():
        case = case_of(dataset, task, attack=attack, victims=victims, local=local, local_known=known)
        observation = observe(case)
        seen[known] = attack_on(observation).inputs
        # What it finds follows from the values of the update and what is assumed about it.
        values = [dict(rounds[0][1]) for rounds in observation.seen]
        threat, randomness = (
            gradveil.ThreatModel(batch_size=2, local=assumed),
            case.randomness("attack", str(attack), 0),
        )
        expected = attack.reconstruct(task, values, threat, generator=randomness, execution="batch")
        assert torch.equal(seen[known], expected.inputs)
    assert not torch.equal(seen["full"], seen["none"])
    with pytest.raises(ParameterError, match="local_known=part is about local steps"):
        AuditConfig(local_known="part")
    assert AuditConfig(local_epochs=1, local_momentum=0.5).local == LocalSteps(1, None, 0.05, 0.5)


@pytest.mark.parametrize("classes", [1, 2])
def test_victims_of_few_classes_have_repeated_labels(dataset, task, classes):
    victims = choose_victims(dataset.test, 4, 5, classes=classes)
    assert [len(labels.unique()) for labels in victims.targets] == [classes] * 4
    assert len({image.numpy().tobytes() for image in victims.inputs.flatten(0, 1)}) == 20  # nobody twice
    again = choose_victims(dataset.test, 4, 5, classes=classes)
    assert torch.equal(victims.inputs, again.inputs)
    assert not torch.equal(victims.inputs, choose_victims(dataset.test, 4, 5, classes=classes, seed=1).inputs)
    attack = gradveil.attack("idlg", iterations=1)
    found = attack_on(observe(case_of(dataset, task, attack=attack, victims=victims)))
    assert torch.equal(found.labels, victims.targets.sort(1).values)
    with pytest.raises(ParameterError, match="4 batches of 7 images of 1 classes each need more examples of the same"):
        choose_victims(dataset.test, 4, 7, classes=1)
    with pytest.raises(ParameterError, match="victim_classes must be a whole number from 1 to 1, got 2"):
        AuditConfig(victim_classes=2)


DROPOUT_MODEL = """
from torch import nn

def build(input_shape, classes):
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(400, classes)]
    return nn.Sequential(*layers).eval()
"""


def test_dropout_is_active_unless_it_is_switched_off(dataset, tmp_path):
    (tmp_path / "model.py").write_text(DROPOUT_MODEL)
    model = f"{tmp_path}/model.py@build"
    task = build_task(dataset, model)
    assert task.dropout_rates == {"3": 0.5}
    assert not task.has_batch_statistics  # as the model comes
    off = build_task(dataset, model, dropout="inference", norms="train")
    assert not off.has_dropout
    assert off.has_batch_statistics
    with pytest.raises(ParameterError, match="dropout must be one of"):
        build_task(dataset, model, dropout="off")
    observed = observe(case_of(dataset, task))
    # Without a defense, what is seen is what the client computed: with the same masks.
    assert observed.power == [0.0, 0.0, 0.0]
    assert bound(case_of(dataset, task, "gaussian-noise")) is None


def test_batch_norm_works_in_the_chosen_mode(dataset):
    assert build_task(dataset, "resnet18:norm=batch", norms="train").has_batch_statistics
    assert not build_task(dataset, "resnet18:norm=batch", norms="inference").has_batch_statistics
    with pytest.raises(ParameterError, match="norms must be one of train, inference"):
        build_task(dataset, "mlp", norms="off")


def test_normalisation_belongs_to_the_model(dataset):
    task = build_task(dataset, "mlp", mean=[0.5], std=[0.25])
    inputs, _ = dataset.test.batch([0])
    assert torch.allclose(task.normalised(inputs), (inputs - 0.5) / 0.25)


@pytest.mark.filterwarnings("ignore:LPIPS")
def test_an_audit_takes_all_of_these_as_settings(dataset, tmp_path, monkeypatch):
    from gradveil.data.loader import SOURCES

    monkeypatch.setattr(SOURCES, "_factories", {"squares": lambda: dataset})
    weights = tmp_path / "mine.safetensors"
    save_file(models.create("mlp", input_shape=(1, 12, 12), classes=3, seed=7).state_dict(), weights)
    config = AuditConfig(
        dataset="squares",
        model="mlp",
        defenses=("none", "gaussian-noise:std=0.1"),
        attacks=("idlg:iterations=2",),
        victims=2,
        batch_size=2,
        labels="known",
        rounds=2,
        clients=2,
        client_batch=8,
        games=4,
        candidates=8,
        local_epochs=2,
        local_batch=1,
        observed_rounds=2,
        weights=str(weights),
        norms="inference",
        mean=(0.5,),
        std=(0.25,),
    )
    for word in ("--local-epochs 2", "--local-batch 1", "--observed-rounds 2", "--norms inference", "--mean 0.5"):
        assert word in config.command
    run(config, tmp_path / "out")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert AuditConfig.from_json(described) == config
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert all(row["bound_mse"] is None for row in rows)
    run(config, tmp_path / "out", resume=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"local_batch": 2}, "local_batch belongs to local steps; give the passes too: local_epochs"),
        ({"local_epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"observed_rounds": 0}, "observed_rounds must be a whole number of at least 1"),
        ({"norms": "eval"}, "norms must be one of train, inference"),
        ({"device": 1}, "device must be a text"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ParameterError, match=words):
        AuditConfig(**settings)


def test_a_device_that_is_not_there_is_refused(dataset):
    with pytest.raises(ParameterError, match="device must be one that torch has here, such as cpu, got 'abacus'"):
        build_task(dataset, "mlp", device="abacus")
    with pytest.raises(ParameterError, match="device must be one that torch has here, such as cpu, got 'meta'"):
        build_task(dataset, "mlp", device="meta")
