"""The example app as a real deployment: servers, TLS, keys. Minutes long: run it with `make test-deployment`."""

import importlib.util
import re
import shutil
import socket
import ssl
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower" / "run_deployment.py"
pytestmark = [pytest.mark.slow, pytest.mark.deployment]


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("run_deployment", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def processes_of(folder: Path) -> list[str]:
    """Commands of all processes that were started with this folder, or one in it, as Flower's home."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it has ended, or belongs to another user
    return found


def until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.5)
    return condition()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_training_survives_a_dead_node_and_a_stranger_is_refused(example, tmp_path):
    with example.Deployment(tmp_path, seconds=600) as deployment:
        host, port = deployment.address.split(":")
        trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        with (
            socket.create_connection((host, int(port))) as plain,
            trusting.wrap_socket(plain, server_hostname=host) as line,
        ):
            assert line.version() == "TLSv1.3"
        with (
            socket.create_connection((host, int(port))) as plain,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            ssl.create_default_context().wrap_socket(plain, server_hostname=host)

        strangers = {"unregistered": example.make_node_key(tmp_path, "unregistered"), "keyless": None}
        for name, key in strangers.items():
            stranger = deployment.start_node(name, key, 0)
            assert until(lambda stranger=stranger: stranger.poll() is not None, 90), deployment.log(name).read_text()
            assert stranger.returncode != 0
            assert "could not establish a connection to the SuperLink" in deployment.log(name).read_text()

        numbers = {}
        for index in range(example.NODES):
            key = example.make_node_key(tmp_path, f"node{index}")
            numbers[f"node{index}"] = deployment.register(key)
            deployment.start_node(f"node{index}", key, index)
        run = deployment.run("rounds=4", "nodes=3", "round-timeout=90.0")
        for line in run:
            if "[ROUND 2/" in line:
                deployment.kill("node2")
        log = "\n".join(run.lines)

        assert "[ROUND 1/4]\nINFO :      configure_train: Sampled 3 nodes (out of 3)" in log
        assert f"refused: round 2, client {numbers['node2']}: missing: " in log
        assert re.search(rf"node {numbers['node2']} failed in [123] rounds", log)
        assert not re.search(rf"refused: round \d, client ({numbers['node0']}|{numbers['node1']})", log)
        accuracy = float(re.search(r"accuracy ([\d.]+) after 4 rounds", log)[1])
        assert accuracy > 0.7
        sent, dense = re.search(r"a client sent ([\d,]+) bytes a round; the whole model has ([\d,]+)", log).groups()
        assert int(sent.replace(",", "")) < 0.3 * int(dense.replace(",", ""))
    assert until(lambda: not processes_of(tmp_path), 30), processes_of(tmp_path)


HOSTILE_SERVER = """
import time
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from gradveil_example.task import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    while len(list(grid.get_node_ids())) < context.run_config["nodes"]:
        time.sleep(1)
    result = FedAvg(fraction_evaluate=0.0).start(
        grid, ArrayRecord(make_model().state_dict()), num_rounds=1, timeout=context.run_config["round-timeout"]
    )
    print(f"{len(result.arrays)} arrays came back")
"""


def test_nodes_train_the_accepted_app_and_refuse_it_without_the_mod(example, tmp_path):
    hostile = tmp_path / "hostile"
    shutil.copytree(EXAMPLE.parent, hostile, ignore=shutil.ignore_patterns("__pycache__"))
    client = hostile / "gradveil_example" / "client_app.py"
    without, count = re.subn(r"ClientApp\(mods=\[.*\]\)", "ClientApp()", client.read_text())
    assert count == 1
    client.write_text(without)
    (hostile / "gradveil_example" / "server_app.py").write_text(HOSTILE_SERVER)
    home = tmp_path / "home"
    home.mkdir()
    with example.Deployment(home, seconds=400) as deployment:
        nodes = [f"node{index}" for index in range(2)]
        for index, name in enumerate(nodes):
            key = example.make_node_key(home, name)
            deployment.register(key)
            deployment.start_node(name, key, index)

        stolen = "\n".join(deployment.run("nodes=2", "round-timeout=90.0", app=hostile))
        assert "Received 0 results and 2 failures" in stolen, stolen
        assert stolen.count("The FAB could not be verified.") == 2
        assert "0 arrays came back" in stolen
        for name in nodes:
            words = f"expected an accepted app, got one with SHA-256 {example.app_hash(hostile)}"
            assert words in deployment.log(name).read_text()
        assert not list(home.glob("gradveil-supernode-*/apps/*"))  # none of it was unpacked

        trained = "\n".join(deployment.run("rounds=2", "nodes=2", "round-timeout=90.0"))
        assert "refused:" not in trained, trained
        assert float(re.search(r"accuracy ([\d.]+) after 2 rounds", trained)[1]) > 0.6
        unpacked = {folder.name.rpartition(".")[2] for folder in home.glob("gradveil-supernode-*/apps/*")}
        assert unpacked == {deployment.accepted[:8]}
    assert until(lambda: not processes_of(home), 30), processes_of(home)


REPEATING_SERVER = """
import time
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from gradveil_example.task import DEFENSE, LR, make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(1)
    arrays = ArrayRecord(make_model().state_dict())
    asked = ConfigRecord({"round": 1, "lr": LR, "defense": DEFENSE, "announce": False, "used": 0})
    contents = [{"arrays": arrays, "config": ConfigRecord({"copy": n}), "gradveil": asked} for n in range(3)]
    messages = [Message(RecordDict(content), nodes[0], "train") for content in contents]
    replies = list(grid.send_and_receive(messages, timeout=150))
    refusals = [reply.error.reason for reply in replies if reply.has_error()]
    print(f"{len(replies) - len(refusals)} answers, {len(refusals)} refusals:", *refusals)
"""


def test_messages_that_arrive_together_get_one_answer(example, tmp_path):
    """Each process of the node knows which rounds earlier processes have answered."""
    app, home = tmp_path / "app", tmp_path / "home"
    shutil.copytree(EXAMPLE.parent, app, ignore=shutil.ignore_patterns("__pycache__"))
    (app / "gradveil_example" / "server_app.py").write_text(REPEATING_SERVER)
    home.mkdir()
    with example.Deployment(home, seconds=300) as deployment:
        deployment.accepted = example.app_hash(app)
        key = example.make_node_key(home, "node0")
        deployment.register(key)
        deployment.start_node("node0", key, 0)
        log = "\n".join(deployment.run(app=app))
        assert "1 answers, 2 refusals:" in log, log + deployment.log("node0").read_text()
        assert log.count("expected a round after 1, got round 1 again") == 2


def test_the_same_app_runs_under_the_simulation(example, tmp_path):
    with example.Deployment(tmp_path, seconds=600, simulation=True) as deployment:
        run = deployment.run("rounds=2", "nodes=3")
        log = "\n".join(run)
    assert "[ROUND 2/2]\nINFO :      configure_train: Sampled 3 nodes (out of 3)" in log, log
    assert float(re.search(r"accuracy ([\d.]+) after 2 rounds", log)[1]) > 0.6
    assert "refused:" not in log
