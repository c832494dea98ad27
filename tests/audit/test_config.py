import json
import shlex

import pytest

from gradveil.audit import AuditConfig, default_folder
from gradveil.core.errors import DataError, ParameterError, UnknownNameError


def test_equal_methods_are_one_config():
    a = AuditConfig(defenses=("top-k:keep=.20",), attacks=("idlg",))
    b = AuditConfig(defenses=("none", "top-k"), attacks=("idlg:restarts=1,iterations=300",))
    assert a == b
    assert a.digest == b.digest
    assert default_folder(a) == default_folder(b)
    assert a.digest != AuditConfig(defenses=("top-k:keep=.20",), attacks=("idlg",), seed=1).digest


def test_the_config_survives_json():
    config = AuditConfig(victims=3, defenses=("dual-pruning+error-feedback",))
    fields = json.loads(json.dumps({**config.to_json(), "torch": "2.0", "platform": "here"}))
    assert AuditConfig.from_json(fields) == config
    del fields["seed"]
    with pytest.raises(DataError, match="config.json: 'seed' must be a whole number .* got nothing"):
        AuditConfig.from_json(fields)


def test_the_command_holds_all_settings():
    words = shlex.split(AuditConfig(victims=3, seed=7, defenses=("top-k:keep=0.1",)).command)
    assert words[:2] == ["gradveil", "audit"]
    options = list(zip(words[2::2], words[3::2], strict=True))
    assert ("--victims", "3") in options
    assert ("--seed", "7") in options
    assert ("--defense", "top-k:keep=0.1") in options


@pytest.mark.parametrize(("adaptive", "word"), [(True, "--adaptive"), (False, "--plain"), (None, None)])
def test_the_command_names_the_attackers(adaptive, word):
    words = shlex.split(AuditConfig(adaptive=adaptive, match="power").command)
    assert [found for found in words if found in ("--adaptive", "--plain")] == ([word] if word else [])
    assert words[words.index("--match") + 1] == "power=0.5"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"victims": 0}, ParameterError, "audit: victims must be a whole number of at least 1, got 0"),
        ({"defenses": None}, ParameterError, "audit: defenses must be a list of texts, got None"),
        ({"attacks": ("idlg", 3)}, ParameterError, "audit: attacks must be a text, got 3"),
        ({"model": None}, ParameterError, "audit: model must be a text, got None"),
        ({"seed": -1}, ParameterError, "audit: seed must be a whole number of at least 0, got -1"),
        ({"defenses": ("top-j",)}, UnknownNameError, "unknown defense 'top-j'; did you mean top-k"),
        ({"attacks": ()}, ParameterError, "at least one attack"),
        ({"publisher": "me"}, ParameterError, "publisher must be one of honest, lying, victim, got 'me'"),
        ({"publisher": "lying"}, ParameterError, "such as aligned-dual-pruning, and none of them is audited; leave it"),
        ({"match": "speed"}, ParameterError, "match must be KIND or KIND=TARGET, got 'speed'; known: accuracy, bytes"),
        ({"match": "accuracy=1.5"}, ParameterError, "accuracy can be matched between 0 and 1, got '1.5'"),
        ({"match": "bytes=few"}, ParameterError, "bytes can be matched between 0 and 1, got 'few'"),
        (
            {"match": "power", "defenses": ("top-k:keep=0.2", "top-k:keep=0.1")},
            ParameterError,
            "top-k:keep=0.2 and top-k:keep=0.1 differ only in the strength, which --match chooses",
        ),
        ({"adaptive": "yes"}, ParameterError, "adaptive must be true or false, got 'yes'"),
        ({"defenses": ("top-k", "top-k:keep=0.2")}, ParameterError, "defense top-k:keep=0.2 is given twice"),
    ],
)
def test_bad_configs_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        AuditConfig(**fields)
