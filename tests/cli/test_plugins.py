"""Methods from outside the package, by --plugin and by entry points: audited, resumed, reported; broken ones named."""

import json
import re
import sys
from pathlib import Path

import pytest

from gradveil.attacks import ATTACKS
from gradveil.core import plugins
from gradveil.data.loader import SOURCES
from gradveil.defenses import DEFENSES
from gradveil.metrics import METRICS
from gradveil.modality import MODALITIES

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
(PLUGIN,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
NAMES = {"gradveil.defenses": "halving", "gradveil.attacks": "grey", "gradveil.metrics": "largest_difference"}
QUICK = (
    "--model mlp --defense halving:part=0.25 --attack grey --victims 2 --rounds 2 --clients 2 --client-batch 4 --plain "
    "--games 0"
).split()

pytestmark = pytest.mark.filterwarnings("ignore:LPIPS is left out")


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    for registry in (DEFENSES, ATTACKS, MODALITIES):
        monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setattr(METRICS, "_metrics", dict(METRICS._metrics))
    for name in ("_files", "_packages", "_tried"):
        monkeypatch.setattr(plugins, name, {})
    plugins.installed.cache_clear()
    yield
    plugins.installed.cache_clear()
    for module in [name for name in sys.modules if name.endswith("_plugin")]:
        del sys.modules[module]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package on the path whose entry points name what a module registers."""

    def put(module="halving_plugin", code=PLUGIN, names=NAMES):
        site = tmp_path / f"site-{module}"
        about = site / f"{module}-1.2.dist-info"
        about.mkdir(parents=True)
        (site / f"{module}.py").write_text(code)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n")
        lines = [f"[{group}]\n{name} = {module}\n" for group, name in names.items()]
        (about / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(site)
        plugins.installed.cache_clear()

    return put


def check_audit(folder):
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    attacked = [row for row in rows if row["attack"] == "grey"]
    assert {row["defense_spec"] for row in attacked} == {"none", "halving:part=0.25"}
    assert all(0.5 <= row["largest_difference"] <= 1 for row in attacked)
    page = (folder / "report.html").read_text()
    for words in ("halving:part=0.25", "grey", "Largest difference"):
        assert words in page


def test_a_file_is_audited_resumed_and_reported(gradveil_command, file, tmp_path):
    folder = tmp_path / "out"
    code, _, err = gradveil_command("audit", *QUICK, "--plugin", file, "--out", folder)
    assert code == 0, err
    check_audit(folder)
    config = json.loads((folder / "config.json").read_text())
    assert list(config["plugin_files"]) == [str(file)]
    assert config["command"].endswith(f"--plugin {file}")
    # An unfinished audit goes on, and only with the same plugin.
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join(lines[:-2]))
    code, _, err = gradveil_command("audit", "--resume", "--out", folder, "--plugin", file)
    assert code == 0, err
    # Rows are sealed with what they hold; times differ between runs.
    assert len((folder / "results.jsonl").read_text().splitlines()) == len(lines)
    check_audit(folder)


def test_going_on_runs_no_code_that_was_not_named(gradveil_command, file, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    file.write_text(PLUGIN[: PLUGIN.index("@metric(")])
    assert gradveil_command("audit", *QUICK, "--plugin", file, "--out", folder)[0] == 0
    monkeypatch.setattr(plugins, "_files", {})
    code, _, err = gradveil_command("audit", "--resume", "--out", folder)
    assert code == 2
    assert f"was begun with the plugin {file}, a file whose code would run" in err
    assert f"add --plugin {file}" in err
    file.write_text(file.read_text().replace('"halving"', '"halving-2"').replace('"grey"', '"grey-2"'))
    code, _, err = gradveil_command("audit", "--resume", "--out", folder, "--plugin", file)
    assert code == 2
    assert f"was begun with other plugins: {file} has changed since" in err
    monkeypatch.setattr(plugins, "_files", {})
    other = tmp_path / "other.py"
    other.write_text("")
    code, _, err = gradveil_command("audit", "--resume", "--out", folder, "--plugin", other)
    assert code == 2
    assert f"was begun with the plugin {file}" in err


def test_a_folder_says_which_plugin_its_metric_is_from(gradveil_command, file, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    assert gradveil_command("audit", *QUICK, "--plugin", file, "--out", folder)[0] == 0
    monkeypatch.setattr(METRICS, "_metrics", {n: m for n, m in METRICS._metrics.items() if n != NAMES[METRICS.group]})
    code, _, err = gradveil_command("audit", "--resume", "--out", folder)
    assert code == 2
    assert "unknown metric 'largest_difference'" in err
    assert f"the audit was made with --plugin {file}" in err


def test_an_installed_package_is_audited_resumed_and_reported(gradveil_command, install, tmp_path):
    install()
    folder = tmp_path / "out"
    code, _, err = gradveil_command("audit", *QUICK, "--out", folder)
    assert code == 0, err
    check_audit(folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["plugin_files"], config["plugin_packages"]) == ({}, {"halving_plugin": "1.2"})
    before = (folder / "results.jsonl").read_bytes()
    code, _, err = gradveil_command("audit", "--resume", "--out", folder)
    assert code == 0, err
    assert (folder / "results.jsonl").read_bytes() == before


def test_both_are_listed_and_trained(gradveil_command, install, file, tmp_path):
    install(code=PLUGIN.replace('"halving"', '"thirds"'), names={"gradveil.defenses": "thirds"})
    file.write_text(PLUGIN.replace('"grey"', '"black"').replace('"largest_difference"', '"widest"'))
    # The package's module registers an attack and a metric too, which its entry points do not name.
    code, out, err = gradveil_command("list", "--json", "--plugin", file)
    assert code == 0, err
    listed = json.loads(out)
    assert {"halving", "thirds", "top-k"} <= {row["name"] for row in listed["defenses"]}
    assert {"black", "grey"} <= {row["name"] for row in listed["attacks"]}
    halving = next(row for row in listed["defenses"] if row["name"] == "halving")
    assert (halving["parameters"], halving["meanings"]) == ({"part": 0.5}, {"part": "the factor."})
    words = "train --model mlp --defense halving --rounds 2 --clients 2 --batch-size 4 --json".split()
    code, out, err = gradveil_command(*words, "--plugin", file, "--out", tmp_path / "trained")
    assert code == 0, err
    assert json.loads(out)["defense"] == "halving:part=0.5"
    code, out, err = gradveil_command("train", "--resume", "--out", tmp_path / "trained", "--plugin", file)
    assert code == 0, err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import not_there", "line 1: ModuleNotFoundError: No module named 'not_there'; fix it, or leave it out"),
        ("x = 1\n\nx.y", "line 3: AttributeError: 'int' object has no attribute 'y'"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        (PLUGIN.replace('"halving"', '"top-k"'), "UnknownNameError: defense 'top-k' is registered already, by TopK"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_broken_file_gets_one_line(gradveil_command, tmp_path, code, message):
    path = tmp_path / "broken.py"
    path.write_text(code)
    status, _, err = gradveil_command("audit", "--plugin", path, "--out", tmp_path / "out")
    assert status == 2
    assert err.startswith(f"error: plugin {path}")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there(gradveil_command, tmp_path):
    status, _, err = gradveil_command("list", "--plugin", tmp_path / "none.py")
    assert (status, "no such file" in err) == (2, True)


def test_a_broken_package_gets_one_line(gradveil_command, install):
    install("broken_plugin", "import not_there", {"gradveil.defenses": "halving"})
    install("empty_plugin", "", {"gradveil.attacks": "grey"})
    broken = "plugin halving of the package broken_plugin 1.2 (broken_plugin): ModuleNotFoundError: No module named"
    status, _, err = gradveil_command("audit", "--defense", "halving")
    assert status == 2
    assert f"error: {broken} 'not_there'; fix the package, or uninstall it" in err
    status, _, err = gradveil_command("audit", "--attack", "grey")
    assert status == 2
    assert "expected it to register 'grey' among the attacks, but it did not" in err


@pytest.mark.filterwarnings("default")
def test_a_broken_package_does_not_hide_the_others_from_a_list(gradveil_command, install):
    install("broken_plugin", "import not_there", {"gradveil.defenses": "broken"})
    install()
    status, out, err = gradveil_command("list", "defenses", "--json")
    assert status == 0
    assert {"halving", "top-k"} <= {row["name"] for row in json.loads(out)["defenses"]}
    assert err.count("note: plugin broken of the package broken_plugin 1.2") == 1


def test_what_says_nothing_of_itself_is_listed_too(gradveil_command, file, monkeypatch):
    """Neither a paper nor a docstring is needed to be listed, and a data set is listed like a method."""
    monkeypatch.setattr(SOURCES, "_factories", dict(SOURCES._factories))
    code = PLUGIN.replace('    paper, adds_noise = "-", False', "    adds_noise = False")
    file.write_text(code + '\n\nfrom gradveil.data.loader import SOURCES\n\nSOURCES.register("mine")(lambda: None)\n')
    status, out, err = gradveil_command("list", "--json", "--plugin", file)
    assert status == 0, err
    listed = json.loads(out)
    assert next(row for row in listed["defenses"] if row["name"] == "halving")["source"] == "-"
    assert next(row for row in listed["datasets"] if row["name"] == "mine")["summary"] == ""
