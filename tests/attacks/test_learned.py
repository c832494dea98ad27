"""What attacks have learned is kept on disk and found again only if nothing that decides it has changed."""

from dataclasses import replace

import pytest
import torch

import gradveil
from gradveil.attacks._learned import learned_digest
from gradveil.attacks._simulation import SimulatedClients
from gradveil.attacks.lti import LTI

ATTACK = gradveil.attack("lti:form=linear,draws=2,directions=8")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    return gradveil.Task(model, input_shape=(1, 4, 4), classes=3)


@pytest.fixture(scope="module")
def threat():
    public = torch.rand(60, 1, 4, 4, generator=seeded(1)), torch.arange(60) % 3
    return gradveil.ThreatModel(public=public, adaptive=True, defense=gradveil.defense("gaussian-noise", std=0.1))


def test_an_attack_learns_once(task, threat, tmp_path, monkeypatch):
    fitted = ATTACK.fit(task, threat, generator=seeded(), cache=tmp_path)
    learn = LTI.learn
    monkeypatch.delattr(LTI, "learn")
    again = ATTACK.fit(task, threat, generator=seeded(), cache=tmp_path)
    assert again == fitted
    assert again.learned.keys() == fitted.learned.keys()
    monkeypatch.setattr(LTI, "learn", learn, raising=False)
    [file] = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-3])
    assert ATTACK.fit(task, threat, generator=seeded(), cache=tmp_path) == fitted


@pytest.mark.parametrize("spec", ["lti:draws=2,directions=8,epochs=2,hidden=8", "mjolnir:directions=8,epochs=2,tv=0"])
def test_an_interrupted_attack_goes_on_where_it_was_and_ends_the_same(task, threat, tmp_path, monkeypatch, spec):
    attack = gradveil.attack(spec)
    monkeypatch.setattr(SimulatedClients, "chunk", lambda _self, _batch_size: 9)
    expected = attack.fit(task, threat, generator=seeded())
    draws, simulated = SimulatedClients.draws, []

    def counted(self, groups, seeds):
        simulated.append(len(groups))
        if len(simulated) == limit:
            raise KeyboardInterrupt
        return draws(self, groups, seeds)

    monkeypatch.setattr(SimulatedClients, "draws", counted)
    limit = 18
    with pytest.raises(KeyboardInterrupt):
        attack.fit(task, threat, generator=seeded(), cache=tmp_path)
    limit = None
    kept = sorted(path for path in tmp_path.iterdir() if path.suffix != ".lock")
    assert len(kept) > 3
    kept[1].write_bytes(b"damaged")
    reports = []
    again = attack.fit(task, threat, generator=seeded(), cache=tmp_path, progress=lambda *at: reports.append(at))
    assert again == expected
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix != ".lock"] == [".safetensors"]
    assert reports[-1][0] == reports[-1][1]
    resumed = len(simulated) - 18
    attack.fit(task, threat, generator=seeded(), cache=tmp_path / "anew")
    assert resumed < len(simulated) - 18 - resumed


def test_everything_that_decides_what_is_learned_is_in_the_digest(task, threat):
    inputs, labels = threat.public
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 6), torch.nn.GELU(), torch.nn.Linear(6, 3))
    model.load_state_dict({f"{name}": value for name, value in task.parameters.items()})
    sliced = gradveil.defense("risk-slicing:slices=2,ratio=0.5,compensate=false+error-feedback")
    prepared = sliced.prepare(task, public=threat.public, generator=seeded()).defense
    digests = [
        learned_digest(ATTACK, task, threat, seeded()),
        learned_digest(gradveil.attack("lti:form=linear,draws=3,directions=8"), task, threat, seeded()),
        learned_digest(ATTACK, task, threat, seeded(1)),
        learned_digest(ATTACK, task.with_parameters({n: v + 1 for n, v in task.parameters.items()}), threat, seeded()),
        learned_digest(ATTACK, gradveil.Task(model, input_shape=(1, 4, 4), classes=3), threat, seeded()),
        learned_digest(ATTACK, task, replace(threat, public=(inputs.flip(0), labels)), seeded()),
        learned_digest(ATTACK, task, replace(threat, public=(inputs, labels.flip(0))), seeded()),
        learned_digest(ATTACK, task, replace(threat, adaptive=False), seeded()),
        learned_digest(ATTACK, task, replace(threat, batch_size=2), seeded()),
        learned_digest(ATTACK, task, replace(threat, local=gradveil.LocalSteps(2)), seeded()),
        learned_digest(ATTACK, task, replace(threat, defense=gradveil.defense("gaussian-noise", std=0.2)), seeded()),
        *(learned_digest(ATTACK, task, replace(threat, defense=defense), seeded()) for defense in (sliced, prepared)),
    ]
    assert len(set(digests)) == len(digests)
    assert digests[0] == learned_digest(ATTACK, task, threat, seeded())


def test_a_plain_attacker_learns_the_same_against_every_defense(task, threat):
    plain = replace(threat, adaptive=False)
    other = replace(plain, defense=gradveil.defense("top-k"), labels="known", known_labels=torch.zeros(1, 1).long())
    assert learned_digest(ATTACK, task, plain, seeded()) == learned_digest(ATTACK, task, other, seeded())


def test_what_cannot_be_kept_is_said(task, threat, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(gradveil.errors.OutputError, match="expected a folder that can be written to"):
        ATTACK.fit(task, threat, generator=seeded(), cache=tmp_path / "file" / "folder")
