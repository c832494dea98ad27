import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradveil
from gradveil.core.errors import DataError
from gradveil.core.storage import save_atomically
from gradveil.federation import ClientMemories
from gradveil.federation.memory import MemoryFile


def test_the_least_recently_used_go_to_disk(tmp_path):
    memories = ClientMemories(tmp_path, ram_bytes=1000)
    for client in range(5):
        memories[client]["r"] = torch.full((100,), float(client))  # 400 bytes
    assert memories.resident == [3, 4]
    assert [int(memories[client]["r"][0]) for client in range(5)] == [0, 1, 2, 3, 4]
    assert memories.resident == [3, 4]
    memories[3]["r"]
    memories[0]["r"]
    assert memories.resident == [3, 0]
    assert list(memories) == [0, 1, 2, 3, 4]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.sampled_from(["set", "delete", "grow", "read"])),
        max_size=40,
    ),
    st.sampled_from([0, 100, 250, 10_000]),
)
def test_it_behaves_like_dicts_whatever_happens(steps, ram):
    """Compared with plain dicts, for any order of reading, writing and deleting."""
    plain = {client: {} for client in range(4)}
    memories = ClientMemories(ram_bytes=ram)
    for number, (client, key, action) in enumerate(steps):
        memory, expected = memories[client], plain[client]
        if action == "set":
            memory[key] = expected[key] = torch.full((10,), float(number))
        elif action == "grow":
            before = expected.get(key, torch.zeros(0))
            memory[key] = expected[key] = torch.cat([before, torch.zeros(7), torch.tensor([-0.0, 1.0])])
        elif action == "delete" and key in expected:
            del memory[key], expected[key]
        assert sorted(memory) == sorted(expected)
        assert sum(value.nbytes for c in memories.resident for value in plain[c].values()) <= max(
            ram, sum(value.nbytes for value in expected.values())
        )
    for client, expected in plain.items():
        assert memories[client].keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(memories[client][key], value)
            assert torch.equal(memories[client][key].signbit(), value.signbit())


def test_what_is_mostly_zero_is_stored_sparsely(tmp_path):
    memories = ClientMemories(tmp_path, ram_bytes=0)
    values = {
        "sparse": torch.zeros(100, 100).index_fill(0, torch.tensor([3]), 2.5),
        "dense": torch.rand(50, dtype=torch.float64),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "half": torch.zeros(1000, dtype=torch.float16),
    }
    memories[0].update(values)
    memories[1]["other"] = torch.ones(1)  # pushes the first one out
    assert memories.resident == [1]
    [file] = tmp_path.glob("client-0-*")
    assert file.stat().st_size < 100 * 100 + 2000  # 1 % is not zero, and a position takes as many bytes as a value
    for key, value in values.items():
        back = memories[0][key]
        assert back.dtype == value.dtype
        assert torch.equal(back, value)


def test_versions_of_a_checkpoint_survive_until_the_next(tmp_path):
    memories = ClientMemories(tmp_path, ram_bytes=0)
    memories[0]["r"], memories[1]["r"] = torch.tensor([1.0]), torch.tensor([2.0])
    saved = memories.flush()
    memories.keep(saved)
    memories[0]["r"] = torch.tensor([10.0])
    memories.flush()
    again = ClientMemories(tmp_path)
    again.restore(saved)
    assert again[0]["r"].item() == 1
    assert len(list(tmp_path.iterdir())) == 2  # the newer version is gone
    with pytest.raises(DataError, match=r"client-7-0.safetensors: .* got no such file"):
        again.restore({7: MemoryFile(0, 64 * "0")})
    assert len(list(tmp_path.iterdir())) == 2


def sparse(places, values, shape, **changes):
    """The content of a memory file with one sparse tensor."""
    tensors = {"places/r": torch.tensor(places, dtype=torch.int32), "values/r": torch.tensor(values)}
    return tensors, {"order": ["r"], "sparse": {"r": shape}, **changes}


HOSTILE = {
    "too far": (sparse([0, 12], [1.0, 2.0], [3, 4]), "places are not increasing from 0 to 11"),
    "negative": (sparse([-1, 3], [1.0, 2.0], [3, 4]), "places are not increasing"),
    "unsorted": (sparse([3, 0], [1.0, 2.0], [3, 4]), "places are not increasing"),
    "twice": (sparse([3, 3], [1.0, 2.0], [3, 4]), "places are not increasing"),
    "huge": (sparse([0, 3], [1.0, 2.0], [2**20, 2**20]), "2 places cannot be those of a shape"),
    "huge and empty": (sparse([], [], [2**62]), "0 places cannot be those of a shape"),
    "fewer values": (sparse([0, 3], [1.0], [3, 4]), "places are"),
    "nested places": (sparse([[0, 3]], [[1.0, 2.0]], [3, 4]), "places are"),
    "negative shape": (sparse([0], [1.0], [-3, -4]), "the shape of 'r' is"),
    "shape of text": (sparse([0], [1.0], "12"), "the shape of 'r' is"),
    "shape of truths": (sparse([0], [1.0], [True]), "the shape of 'r' is"),
    "no order": (({}, {"sparse": {}}), "its metadata is not that of a memory"),
    "a list": (({}, [1]), "its metadata is not that of a memory"),
    "number as key": (sparse([0], [1.0], [1], order=[1]), "its keys are"),
    "key twice": (sparse([0], [1.0], [1], order=["r", "r"]), "its keys are"),
    "shape of another key": (sparse([0], [1.0], [1], order=[]), "shapes of other keys"),
    "missing tensor": (({}, {"order": ["r"], "sparse": {}}), "'dense/r'. are missing or unexpected"),
    "extra tensor": (({"x": torch.ones(1)}, {"order": [], "sparse": {}}), "'x'. are missing or unexpected"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_gradveil_file_that_is_not_a_memory_is_refused_with_a_reason(tmp_path, case):
    """Even with the right digest: no IndexError, and nothing huge is allocated."""
    (tensors, about), words = HOSTILE[case]
    digest = save_atomically(tmp_path / "client-0-0.safetensors", tensors, about)
    memories = ClientMemories(tmp_path)
    memories.restore({0: MemoryFile(0, digest)})
    with pytest.raises(DataError, match=words):
        dict(memories[0])


def test_a_memory_changed_on_disk_while_a_training_runs_is_refused(tmp_path):
    memories = ClientMemories(tmp_path, ram_bytes=0)
    memories[0]["r"], memories[1]["r"] = torch.tensor([1.0]), torch.tensor([2.0])
    [path] = tmp_path.glob("client-0-*")
    shutil.copy(*tmp_path.glob("client-0-*"), tmp_path / "copy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="was damaged or changed since"):
        memories[0]["r"]
    shutil.copy(tmp_path / "copy", path)
    assert memories[0]["r"].item() == 1


def test_missing_entries_are_missing():
    memories = ClientMemories()
    with pytest.raises(KeyError):
        memories[0]["r"]
    with pytest.raises(KeyError):
        del memories[0]["r"]
    assert len(memories[0]) == 0
    assert memories[0].get("r") is None


def test_error_feedback_works_on_it(tmp_path):
    defense = gradveil.defense("top-k:keep=0.2+error-feedback")
    generator = torch.Generator().manual_seed(0)
    plain, memories = [{}, {}], ClientMemories(tmp_path, ram_bytes=0)
    for _ in range(4):
        for client in (0, 1):
            gradients = {"w": torch.randn(30, generator=generator), "b": torch.randn(5, generator=generator)}
            expected = defense.perturb(gradients, memory=plain[client])
            got = defense.perturb(gradients, memory=memories[client])
            assert all(torch.equal(got[name], expected[name]) for name in expected)
