"""The SuperNode that runs only accepted apps, around Flower's own functions and state; no servers."""

import hashlib
import importlib
import os
import sys
import threading
import types
from pathlib import Path

import pytest
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate import NodeStateFactory

from gradveil.core.errors import MissingPackageError, ParameterError
from gradveil.federation import supernode
from gradveil.federation.supernode import Gate, app_hash

APP = Path(__file__).parents[2] / "examples" / "flower"
INTERNALS = importlib.import_module("flwr.supernode.start_client_internal")
HANDLERS = importlib.import_module("flwr.supernode.servicer.runtime.runtime_handlers")


@pytest.fixture(scope="module")
def accepted() -> bytes:
    return build_fab_from_disk(APP)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Undo what `install` changes in Flower's modules."""
    for module, names in {
        INTERNALS: ["_pull_and_store_message"],
        HANDLERS: ["acquire_task", "push_task_output"],
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Node:
    """A SuperNode's state, and a SuperLink that sends it a message of a run."""

    def __init__(self) -> None:
        stores = ObjectStoreFactory()
        self.state, self.store = NodeStateFactory(objectstore_factory=stores).state(), stores.store()
        self.state.set_node_id(7)

    def pull(self, content: bytes, *, number: int = 1, hash_str: str | None = None, **about: str) -> list[Message]:
        """What the node answers immediately; if it accepts a task, that is in its state."""
        message = Message(RecordDict(), 7, "train")
        message.metadata.__dict__.update(_run_id=number, _message_id=f"{number}")
        known = {"fab_id": "gradveil/gradveil-example", "fab_version": "1.0.0", "fab_hash": digest(content), **about}
        run = Run.create_empty(number)
        run.__dict__.update(known, series_id=number)
        INTERNALS._pull_and_store_message(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: (message, get_object_tree(message)),
            get_run=lambda _run_id: run,
            get_fab=lambda _hash, _run_id: Fab(hash_str or digest(content), content, {}),
            pull_object=lambda _run_id, object_id: get_all_nested_objects(message)[object_id].deflate(),
            confirm_message_received=lambda _run_id, _message_id: None,
            trusted_entities=None,
        )
        return list(self.state.get_messages_legacy(is_reply=True))

    def tasks(self) -> int:
        return len(self.state.get_tasks())


def test_an_accepted_app_gets_in_and_another_one_is_answered_with_an_error(accepted):
    supernode.install(Gate([digest(accepted).upper()]))
    node = Node()
    [refusal] = node.pull(b"PK the same app without the mod", number=1)
    assert refusal.error.reason == "The FAB could not be verified."
    assert (node.tasks(), node.state.get_run(1)) == (0, None)
    assert node.state.get_fab(digest(b"PK the same app without the mod")) is None
    assert node.pull(accepted, number=2) == []
    assert (node.tasks(), node.state.get_fab(digest(accepted)).content) == (1, accepted)
    [again] = node.pull(b"PK the same app without the mod", number=1)
    assert again.has_error()
    assert node.tasks() == 1


def test_without_the_gate_anything_gets_in(accepted):
    """What Flower does by itself; if this fails, Flower has got a gate of its own."""
    node = Node()
    assert node.pull(accepted) == []
    assert node.tasks() == 1


@pytest.mark.parametrize(
    "lie",
    [
        {"hash_str": "0" * 64},
        {"fab_hash": "0" * 64},
        {"fab_id": "gradveil/another-app"},
        {"fab_version": "0.9.0"},
        {"fab_version": "1.0.0/../../elsewhere"},
        {"primary_task_type": "flwr-agentapp"},
    ],
    ids=lambda lie: "-".join(lie),
)
def test_an_accepted_file_does_not_open_the_door_for_another_app(accepted, lie):
    """What the run says decides from which folder the client's process loads the app."""
    supernode.install(Gate([digest(accepted)]))
    node = Node()
    [refusal] = node.pull(accepted, **lie)
    assert refusal.has_error()
    assert (node.tasks(), node.state.get_run(1)) == (0, None)


def test_runs_are_counted(accepted):
    supernode.install(Gate([digest(accepted)], runs=2))
    node = Node()
    assert [len(node.pull(accepted, number=number)) for number in (1, 2, 2, 3, 1)] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("accept", "runs", "words"),
    [
        ([], None, "expected --accept SHA256, at least once"),
        (["abc"], None, "must be a SHA-256 of 64 hexadecimal digits, got 'abc'"),
        (["g" * 64], None, "must be a SHA-256"),
        (["a" * 64, ""], None, "must be a SHA-256"),
        (["a" * 64], 0, "--runs must be at least 1, got 0"),
    ],
)
def test_a_gate_with_bad_arguments_is_not_built(accept, runs, words):
    with pytest.raises(ParameterError, match=words):
        Gate(accept, runs)


def test_a_supernode_that_we_do_not_know_is_not_started(monkeypatch):
    monkeypatch.setattr(INTERNALS, "_pull_and_store_message", lambda state, get_fab: None)  # noqa: ARG005
    with pytest.raises(MissingPackageError, match=r"whose <lambda> takes .*, got \('state', 'get_fab'\)"):
        supernode.install(Gate(["a" * 64]))
    monkeypatch.delattr(INTERNALS, "_pull_and_store_message")
    with pytest.raises(MissingPackageError, match="needs the SuperNode of Flower 1.41"):
        supernode.install(Gate(["a" * 64]))


def test_messages_are_processed_one_after_the_other():
    """Flower sends a reply before it saves the context; the next message must not begin in between."""
    running, threads = [], []

    def acquire_task(_request, _state):
        running.append("running")
        return "a task"

    def push_task_output(_request, _state, _task):
        running.clear()
        threads.append(threading.Thread(target=handlers.acquire_task, args=(None, state)))
        threads[0].start()
        threads[0].join(0.2)
        return list(running)  # tasks handed out after the last one ended and before its context was saved

    handlers = types.SimpleNamespace(
        acquire_task=acquire_task, push_task_output=push_task_output, AcquireTaskResponse=lambda: "nothing to do"
    )
    supernode.serialise(handlers)
    state = types.SimpleNamespace(get_tasks=lambda statuses, limit: [s for s in running if s in statuses][:limit])
    assert handlers.acquire_task(None, state) == "a task"
    assert handlers.acquire_task(None, state) == "nothing to do"
    assert handlers.push_task_output(None, state, None) == []
    threads[0].join()
    assert running == ["running"]


def test_a_node_state_knows_which_tasks_are_running(accepted):
    """`serialise` on Flower's own state."""
    supernode.install(Gate([digest(accepted)]))
    node = Node()
    for number in (1, 2):
        node.pull(accepted, number=number)
    request = HANDLERS.AcquireTaskRequest(supported_task_types=["flwr-clientapp"])
    first = HANDLERS.acquire_task(request, node.state)
    assert first.token
    assert not HANDLERS.acquire_task(request, node.state).token
    node.state.finish_task(first.task.task_id, "failed", "")
    assert HANDLERS.acquire_task(request, node.state).token


def test_it_is_flowers_supernode_with_a_folder_of_its_own(monkeypatch, tmp_path):
    seen = []

    def started():
        seen.append((sys.argv, os.environ["FLWR_HOME"], list(Path(os.environ["FLWR_HOME"]).iterdir())))

    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", started)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "apps").mkdir()
    supernode.main(["--accept", "a" * 64, "--superlink", "127.0.0.1:1", "--insecure"])
    [(argv, home, files)] = seen
    assert argv == ["flower-supernode", "--superlink", "127.0.0.1:1", "--insecure"]
    assert Path(home).parent == tmp_path
    assert files == []


def test_without_a_hash_it_does_not_start(monkeypatch, capsys):
    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", lambda: pytest.fail("it started"))
    with pytest.raises(SystemExit, match="2"):
        supernode.main(["--superlink", "127.0.0.1:1"])
    assert "without it no app could run" in capsys.readouterr().err


def test_the_hash_is_that_of_the_file(accepted, tmp_path):
    (tmp_path / "app.fab").write_bytes(accepted)
    assert app_hash(APP) == app_hash(tmp_path / "app.fab") == digest(accepted)
