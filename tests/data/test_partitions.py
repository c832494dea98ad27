import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.core.errors import InputError, ParameterError
from gradveil.data import partition

LABELS = torch.arange(600) % 10


def held_classes(labels, share):
    return set(torch.as_tensor(labels)[share].tolist())


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    clients=st.integers(1, 12),
    scheme=st.sampled_from(["iid", "dirichlet"]),
    alpha=st.floats(5e-324, 1e6),
    seed=st.integers(0, 2**40),
)
def test_every_sample_goes_to_one_client_and_every_client_has_one(labels, clients, scheme, alpha, seed):
    if clients > len(labels):
        with pytest.raises(ParameterError, match="clients must be at most"):
            partition(labels, clients, scheme, alpha, seed=seed)
        return
    shares = partition(labels, clients, scheme, alpha, seed=seed)
    assert len(shares) == clients
    assert all(share.dtype == torch.int64 and len(share) for share in shares)
    assert sorted(torch.cat(shares).tolist()) == list(range(len(labels)))


@given(
    clients=st.integers(1, 30),
    classes_per_client=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_classes_scheme_gives_each_client_exactly_that_many_classes(clients, classes_per_client, seed):
    shares = partition(LABELS, clients, "classes", classes_per_client=classes_per_client, seed=seed)
    together = torch.cat(shares)
    assert len(together) == len(together.unique())
    assert all(len(held_classes(LABELS, share)) == classes_per_client for share in shares)
    holders = [sum(label in held_classes(LABELS, share) for share in shares) for label in range(10)]
    assert max(holders) - min(holders) <= 1
    for label, count in enumerate(holders):
        used = (LABELS[together] == label).sum().item()
        assert used == (60 if count else 0)


def test_iid_shares_differ_by_at_most_one_and_mix_the_classes():
    shares = partition(LABELS, clients=7)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) == 1
    assert all(held_classes(LABELS, share) == set(range(10)) for share in shares)


@pytest.mark.parametrize("scheme", ["iid", "dirichlet", "classes"])
def test_seed_decides_the_partition(scheme):
    first, again, other = (partition(LABELS, 5, scheme, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_dirichlet_shares_have_the_variance_of_the_distribution(alpha):
    clients, samples, draws = 8, 20_000, 300
    labels = np.zeros(samples, dtype=np.int64)
    shares = [
        [len(share) / samples for share in partition(torch.from_numpy(labels), clients, "dirichlet", alpha, seed=s)]
        for s in range(draws)
    ]
    expected = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert np.mean(shares) == pytest.approx(1 / clients)
    assert np.var(shares) == pytest.approx(expected, rel=0.15)


def test_dirichlet_leaves_no_client_empty_even_if_the_draw_does():
    shares = partition(LABELS, clients=100, scheme="dirichlet", alpha=0.01)
    assert min(len(share) for share in shares) == 1
    assert len(torch.cat(shares).unique()) == len(LABELS)


def test_shares_come_in_random_order():
    sorted_labels = LABELS.sort().values
    share = partition(sorted_labels, clients=2)[0]
    assert not torch.equal(share, share.sort().values)


def test_labels_may_have_gaps():
    labels = torch.tensor([7, 7, 100, 100])
    shares = partition(labels, clients=2, scheme="classes", classes_per_client=1)
    assert sorted(tuple(labels[share].tolist()) for share in shares) == [(7, 7), (100, 100)]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"clients": 0}, "partition: clients must be a whole number of at least 1, got 0"),
        ({"clients": 2.5}, "partition: clients must be a whole number"),
        ({"clients": 601}, "partition: clients must be at most 600, the number of samples, got 601"),
        ({"scheme": "random"}, "partition: scheme must be one of iid, dirichlet, classes, got 'random'"),
        ({"alpha": 0}, "partition: alpha must be a number above 0 and at most 1e.06, got 0"),
        ({"alpha": 1e308}, "partition: alpha must be a number above 0 and at most 1e.06, got 1e.308"),
        ({"alpha": float("nan")}, "partition: alpha must be a number above 0 and at most 1e.06, got nan"),
        (
            {"classes_per_client": 0},
            "partition: classes_per_client must be a whole number of at least 1, got 0",
        ),
        (
            {"scheme": "classes", "classes_per_client": 11},
            "partition: classes_per_client must be at most 10, the number of classes, got 11",
        ),
        (
            {"scheme": "classes", "clients": 400},
            r"partition: class 0 has 60 samples for 80 clients; lower clients or classes_per_client",
        ),
        ({"seed": -1}, "partition: seed must be a whole number of at least 0, got -1"),
    ],
)
def test_refuses_parameters_out_of_range(parameters, message):
    with pytest.raises(ParameterError, match=message):
        partition(LABELS, **parameters)


@pytest.mark.parametrize("scheme", ["iid", "dirichlet", "classes"])
@pytest.mark.parametrize("labels", [[], 3])
def test_refuses_anything_but_a_list_of_labels(labels, scheme):
    with pytest.raises(InputError, match="labels must be a list of whole numbers"):
        partition(labels, scheme=scheme)


@pytest.mark.parametrize("labels", [[0.5, 1.0], [[0, 1], [1, 1]]])
def test_samples_without_one_class_each_can_only_be_divided_evenly(labels):
    assert sorted(torch.cat(partition(labels, clients=2)).tolist()) == [0, 1]
    for scheme in ("dirichlet", "classes"):
        with pytest.raises(InputError, match="must be a list of whole numbers .* by the scheme iid"):
            partition(labels, clients=2, scheme=scheme)
