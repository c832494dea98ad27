import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradveil
from gradveil.errors import DataError
from gradveil.federation import ClientMemories


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
    """Against plain dicts, for any order of reading, writing and deleting."""
    plain = {client: {} for client in range(4)}
    memories = ClientMemories(ram_bytes=ram)
    for number, (client, key, what) in enumerate(steps):
        mine, his = memories[client], plain[client]
        if what == "set":
            mine[key] = his[key] = torch.full((10,), float(number))
        elif what == "grow":
            mine[key] = his[key] = torch.cat([his.get(key, torch.zeros(0)), torch.zeros(7), torch.tensor([-0.0, 1.0])])
        elif what == "delete" and key in his:
            del mine[key], his[key]
        assert sorted(mine) == sorted(his)
        assert sum(value.nbytes for c in memories.resident for value in plain[c].values()) <= max(
            ram, sum(value.nbytes for value in his.values())
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
    assert file.stat().st_size < 100 * 100 + 2000  # a hundredth is not zero, and a place takes as much as a value
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
    with pytest.raises(DataError, match="client-7-0.safetensors beside the checkpoint"):
        again.restore({7: 0})


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
