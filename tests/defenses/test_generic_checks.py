"""The checks that every defense passes. A new defense gets all of them with one row in CASES."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradveil
from gradveil.core.errors import InputError, ParameterError, UnknownNameError


@dataclass(frozen=True)
class Case:
    """What the generic checks need to know about a defense."""

    name: str
    strong: dict[str, Any] = field(default_factory=dict)  # parameters at which it does something
    identity: dict[str, Any] | None = None  # parameters at which it does nothing; None: there are none
    random: bool = False
    bad: tuple[tuple[dict[str, Any], str], ...] = ()  # refused parameters and the message
    changes: bool = True  # False if it shares the plain update
    untouched: tuple[str, ...] = ()  # layers of the tiny task that the method does not change, as documented
    excused: str = ""  # why there is no identity


CASES = [
    Case("none", identity={}, changes=False),
    Case("secure-aggregation", identity={}, changes=False),  # it acts on what the server sees, not on what is shared
    Case(
        "quantization",
        {"bits": 2},
        excused="even 2^28 values are not all values",
        bad=(
            ({"bits": 0}, "quantization: bits must be a whole number from 1 to 28, got 0"),
            ({"bits": 29}, "quantization: bits must be a whole number from 1 to 28, got 29"),
            ({"rounding": "up"}, "quantization: rounding must be one of nearest, stochastic, got 'up'"),
        ),
    ),
    Case(
        "gaussian-noise",
        {"std": 0.1},
        {"std": 0.0},
        random=True,
        bad=(
            ({"std": -1}, "gaussian-noise: std must be a number of at least 0, got -1"),
            ({"std": "big"}, r"gaussian-noise: std must be a number of at least 0, got 'big' \(str\)"),
            ({"std": float("nan")}, "gaussian-noise: std must be a number of at least 0, got nan"),
            ({"std": True}, r"got True \(bool\)"),
        ),
    ),
    Case(
        "laplace-noise",
        {"std": 0.1},
        {"std": 0.0},
        random=True,
        bad=(({"std": -0.5}, "laplace-noise: std must be a number of at least 0, got -0.5"),),
    ),
    Case(
        "top-k",
        {"keep": 0.3},
        {"keep": 1.0},
        bad=(
            ({"keep": 0}, "top-k: keep must be a number above 0 and at most 1, got 0"),
            ({"keep": 1.5}, "top-k: keep must be a number above 0 and at most 1, got 1.5"),
            ({"form": "local"}, "top-k: form must be one of layer, global, got 'local'"),
        ),
    ),
    Case(
        "coordinate-dp-sgd",
        {"clip": 1.0, "std": 0.1},
        {"clip": 1e9, "std": 0.0},
        random=True,
        bad=(
            ({"clip": 0}, "coordinate-dp-sgd: clip must be a number above 0, got 0"),
            ({"std": -1}, "coordinate-dp-sgd: std must be a number of at least 0, got -1"),
        ),
    ),
    Case(
        "dual-pruning",
        {"k1": 0.1, "k2": 0.5},
        {"k1": 0.0, "k2": 0.0},
        bad=(
            ({"k1": 0.4, "k2": 0.75}, r"dual-pruning: k1 \+ k2 must be below 1, got 0.4 \+ 0.75 = 1.15"),
            ({"k1": -0.1}, "dual-pruning: k1 must be a number of at least 0, got -0.1"),
            ({"k2": None}, r"dual-pruning: k2 must be a number of at least 0, got None \(NoneType\)"),
        ),
    ),
    Case(
        "aligned-dual-pruning",
        {"k1": 0.1, "keep": 0.3},
        {"k1": 0.0, "keep": 1.0},
        bad=(
            ({"k1": 1}, "aligned-dual-pruning: k1 must be a number of at least 0 and below 1, got 1"),
            ({"keep": 0}, "aligned-dual-pruning: keep must be a number above 0 and at most 1, got 0"),
        ),
    ),
    Case(
        "gradient-dropout",
        {"keep": 0.5, "std": 0.1},
        {"keep": 1.0},
        random=True,
        bad=(
            ({"scale": "global"}, "gradient-dropout: scale must be one of absolute, layer, got 'global'"),
            ({"keep": 0.0}, "gradient-dropout: keep must be a number above 0 and at most 1, got 0.0"),
            ({"std": -1}, "gradient-dropout: std must be a number of at least 0, got -1"),
        ),
    ),
]

# Defenses that need the client's data, or public data first. They are checked through `share`.
DATA_CASES = [
    Case(
        "risk-slicing",
        {"ratio": 1.0, "std": 0.1, "compensate": False},
        {"std": 0.0},
        random=True,
        bad=(
            ({"slices": 0}, "risk-slicing: slices must be a whole number of at least 1, got 0"),
            ({"ratio": 0}, "risk-slicing: ratio must be a number above 0 and at most 1, got 0"),
            ({"std": -1}, "risk-slicing: std must be a number of at least 0, got -1"),
            ({"clip": 0}, "risk-slicing: clip must be a number above 0, got 0"),
            ({"compensate": 1}, r"risk-slicing: compensate must be true or false, got 1 \(int\)"),
            ({"aspect": 0.5}, "risk-slicing: aspect must be a number of at least 1, got 0.5"),
            (
                {"balance": "x"},
                "risk-slicing: balance must be one of risk-share, layer-risk, size, consecutive, got 'x'",
            ),
        ),
    ),
    Case(
        "optimal-noise",
        {"std": 0.1},
        {"std": 0.0},
        random=True,
        bad=(
            ({"std": -1}, "optimal-noise: std must be a number of at least 0, got -1"),
            ({"directions": 0}, "optimal-noise: directions must be a whole number of at least 1, got 0"),
            ({"form": "both"}, "optimal-noise: form must be one of local, global, got 'both'"),
            ({"cap": 0.5}, "optimal-noise: cap must be a number of at least 1, got 0.5"),
            ({"every": 0}, "optimal-noise: every must be a whole number of at least 1, got 0"),
            ({"scale_by": "u2"}, "optimal-noise: scale_by must be one of power, frobenius, got 'u2'"),
        ),
    ),
    Case(
        "optimal-dp-sgd",
        {"clip": 1.0, "std": 0.1},
        {"clip": 1e9, "std": 0.0},
        random=True,
        bad=(({"clip": 0}, "optimal-dp-sgd: clip must be a number above 0, got 0"),),
    ),
    Case(
        "optimal-pruning",
        {"rate": 0.7, "layerwise": True},
        {"rate": 0.0},
        random=True,  # the sensitivity is estimated from random directions
        bad=(
            ({"rate": 1.5}, "optimal-pruning: rate must be a number from 0 to 1, got 1.5"),
            ({"std": -1}, "optimal-pruning: std must be a number of at least 0, got -1"),
        ),
    ),
    Case(
        "refiner",
        {"epsilon": 0.1},
        {"epsilon": 0.0},
        random=True,
        bad=(
            ({"epsilon": -1}, "refiner: epsilon must be a number of at least 0, got -1"),
            ({"blend": 1.5}, "refiner: blend must be a number from 0 to 1, got 1.5"),
            ({"balance": "much"}, r"refiner: balance must be a number of at least 0, got 'much' \(str\)"),
            ({"iterations": 0}, "refiner: iterations must be a whole number of at least 1, got 0"),
            ({"decay": 0}, "refiner: decay must be a number above 0 and at most 1, got 0"),
        ),
    ),
    Case(
        "recup",
        {"epsilon": 0.1},
        {"epsilon": 0.0},
        bad=(
            ({"epsilon": -1}, "recup: epsilon must be a number of at least 0, got -1"),
            ({"iterations": 0}, "recup: iterations must be a whole number of at least 1, got 0"),
        ),
    ),
    Case(
        "soteria",
        {"rate": 0.5},
        {"rate": 0.0},
        bad=(
            ({"rate": 1.5}, "soteria: rate must be a number from 0 to 1, got 1.5"),
            ({"directions": -1}, "soteria: directions must be a whole number of at least 0, got -1"),
        ),
        untouched=("0.weight", "0.bias", "3.bias"),  # it prunes the classifier's weight only
    ),
    Case(
        "dp-sgd",
        {"clip": 0.1, "noise_multiplier": 1.0},
        random=True,
        excused="a sum of per-example gradients is rounded in a different order than the gradient of the mean",
        bad=(
            ({"clip": 0}, "dp-sgd: clip must be a number above 0, got 0"),
            ({"noise_multiplier": -1}, "dp-sgd: noise_multiplier must be a number of at least 0, got -1"),
            ({"delta": 1}, "dp-sgd: delta must be a number above 0 and below 1, got 1"),
        ),
    ),
    Case(
        "outpost",
        {"decay": 0.0},
        {"scale": 0.0, "pruned": 0.0},
        random=True,
        bad=(
            ({"scale": -1}, "outpost: scale must be a number of at least 0, got -1"),
            ({"noised": 2}, "outpost: noised must be a number from 0 to 1, got 2"),
            ({"pruned": 1}, "outpost: pruned must be a number of at least 0 and below 1, got 1"),
            ({"decay": -1}, "outpost: decay must be a number of at least 0, got -1"),
        ),
    ),
    Case(
        "ats",
        {"policy": "invert|flip>solarize@64"},
        random=True,  # the policy of each image is drawn
        excused="a policy of no transforms is no policy, and images are rounded to 8 bits",
        bad=(
            ({"policy": "invert>rotat@15"}, "ats: unknown transform 'rotat@15'; did you mean rotate@15"),
            ({"candidates": 3}, "ats: candidates must be a whole number of at least 6, got 3"),
            ({"kept": 0}, "ats: kept must be a whole number of at least 1, got 0"),
        ),
    ),
    Case(
        "precode",
        {"width": 4},
        random=True,
        excused="it trains a different model",
        bad=(
            ({"width": 0}, "precode: width must be a whole number of at least 1, got 0"),
            ({"beta": -1}, "precode: beta must be a number of at least 0, got -1"),
        ),
    ),
]

# Wrappers and other parameters are checked like the defenses themselves, but are built from specs.
WRAPPED = [
    "quantization:bits=3,rounding=stochastic",
    "dual-pruning:k1=0.1,k2=0.5+error-feedback",
    "dual-pruning:k1=0.1,k2=0.5+error-feedback:decay=0.9,clip=0.75",
    "aligned-dual-pruning:k1=0.1,keep=0.3+error-feedback",
    "gradient-dropout:keep=0.5,std=1.0,scale=layer",
    "top-k:keep=0.3,form=global",
    "top-k:keep=0.3,form=global+error-feedback",
    "coordinate-dp-sgd:clip=0.5,std=0.1+top-k:keep=0.3",
    "top-k:keep=0.3+gaussian-noise:std=0.1",
    "top-k:keep=0.3+gaussian-noise:std=0.1+error-feedback",
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
changing_case = pytest.mark.parametrize("case", [c for c in CASES if c.changes], ids=lambda case: case.name)
every_spec = pytest.mark.parametrize(
    "defense",
    [gradveil.defense(case.name, **case.strong) for case in CASES] + [gradveil.defense(spec) for spec in WRAPPED],
    ids=str,
)


def gradients(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"conv.weight": (6, 3, 5, 5), "conv.bias": (12,), "fc.weight": (10, 30), "fc.bias": (10,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_every_registered_defense_has_a_row():
    assert sorted(case.name for case in CASES + DATA_CASES) == gradveil.list_defenses()


@every_spec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_shapes_and_types_are_kept_and_the_input_is_not_touched(defense, dtype):
    given_gradients = gradients(dtype)
    copies = {name: value.clone() for name, value in given_gradients.items()}
    result = defense.perturb(given_gradients, generator=seeded(), memory={})
    assert list(result) == list(given_gradients)
    for name, value in result.items():
        assert value.shape == given_gradients[name].shape
        assert value.dtype == dtype
        assert torch.isfinite(value).all()
        assert value.data_ptr() != given_gradients[name].data_ptr()
    assert same(given_gradients, copies)


@every_case
def test_zero_strength_is_the_identity(case):
    if case.excused:
        pytest.skip(case.excused)
    assert case.identity is not None, f"{case.name}: say in `excused` why it has no identity"
    result = gradveil.defense(case.name, **case.identity).perturb(gradients(), generator=seeded())
    assert same(result, gradients())


@changing_case
def test_every_layer_is_changed(case):
    result = gradveil.defense(case.name, **case.strong).perturb(gradients(), generator=seeded())
    for name, value in gradients().items():
        assert not torch.equal(result[name], value), name


@every_case
def test_the_generator_decides(case):
    defense = gradveil.defense(case.name, **case.strong)
    first = defense.perturb(gradients(), generator=seeded(1))
    assert same(first, defense.perturb(gradients(), generator=seeded(1)))
    assert same(first, defense.perturb(gradients(), generator=seeded(2))) != case.random
    # Without a generator the entropy is fresh each time: a server cannot replay it.
    assert same(defense.perturb(gradients()), defense.perturb(gradients())) != case.random


@every_case
def test_a_batch_of_clients_equals_the_loop(case):
    defense = gradveil.defense(case.name, **case.strong)
    clients = [gradients(seed=seed) for seed in range(3)]
    stacked = {name: torch.stack([client[name] for client in clients]) for name in clients[0]}
    together = defense.perturb_clients(stacked, generators=[seeded(10 + i) for i in range(3)])
    for index, client in enumerate(clients):
        alone = defense.perturb(client, generator=seeded(10 + index))
        assert same(alone, {name: value[index] for name, value in together.items()})
    with pytest.raises(InputError, match=r"expected one generator per client \(3\), got 1"):
        defense.perturb_clients(stacked, generators=[seeded()])


@every_spec
def test_odd_layers_survive(defense):
    odd = {
        "empty": torch.zeros(0, 3),
        "one": torch.tensor([2.0]),
        "scalar": torch.tensor(3.0),
        "zeros": torch.zeros(4, 4),
        "equal": torch.full((9,), 0.5),
        "large": torch.tensor([1e30, -1e-30, 0.0]),
        "strided": torch.randn(4, 6, generator=seeded()).t(),
    }
    result = defense.perturb(odd, generator=seeded(), memory={})
    for name, value in odd.items():
        assert result[name].shape == value.shape
        assert torch.isfinite(result[name]).all()


@every_spec
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused(defense, poison):
    poisoned = gradients()
    poisoned["conv.bias"][3] = poison
    with pytest.raises(InputError, match=r"gradients must be finite, got NaN or Inf in 'conv.bias'"):
        defense.perturb(poisoned, generator=seeded(), memory={})


@every_spec
def test_integers_and_missing_gradients_are_refused(defense):
    with pytest.raises(InputError, match="gradients must be floating-point"):
        defense.perturb({"w": torch.ones(3, dtype=torch.long)}, generator=seeded(), memory={})
    with pytest.raises(InputError, match="got NoneType for 'w'; leave out parameters that are not trained"):
        defense.perturb({"w": None}, generator=seeded(), memory={})
    with pytest.raises(InputError, match="expected gradients by parameter name, got none"):
        defense.perturb({}, generator=seeded(), memory={})


def nested(masks: list[torch.Tensor]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that these tensors are a prototype
        return torch.nested.nested_tensor(masks)


def lies(layers: dict[str, torch.Tensor], seed: int) -> Any:
    """An announcement that no honest client makes, or one that it may make, of any content."""
    draw = seeded(seed)
    name = list(layers)[int(torch.randint(len(layers), (), generator=draw))]
    honest = {key: torch.rand(value.shape, generator=draw) < 0.6 for key, value in layers.items()}
    mask = honest[name]
    instead = [
        torch.zeros_like(mask),
        torch.ones_like(mask),
        torch.rand(mask.shape, generator=draw) < 0.01,
        mask.float(),
        mask.float() * torch.nan,
        mask.to(torch.int8),
        mask.to(torch.complex64),
        mask.flatten()[:-1],
        mask[None],
        mask.to("meta"),
        mask.to_sparse(),
        nested([mask.flatten(), mask.flatten()[:1]]),
        mask.tolist(),
        mask.numpy(),
        None,
        "everything",
    ]
    wholes = [
        {},
        [],
        "everything",
        7,
        torch.ones(3, dtype=torch.bool),
        {**honest, "another": torch.ones(3, dtype=torch.bool)},
        {**honest, 3: torch.ones(3, dtype=torch.bool)},
        {None: mask, 3: mask},
        {key: value for key, value in honest.items() if key != name},
    ]
    choices = [*wholes, *({**honest, name: value} for value in instead)]
    return choices[seed % len(choices)]


ANNOUNCING = [case for case in CASES if gradveil.defense(case.name, **case.strong).announces]


@pytest.mark.parametrize("case", ANNOUNCING, ids=lambda case: case.name)
@pytest.mark.parametrize("wrapped", ["alone", "chain", "error-feedback"])
@pytest.mark.parametrize("seed", range(25))
def test_an_announcement_of_any_content_is_refused_or_used(case, wrapped, seed):
    defense = gradveil.defense(case.name, **case.strong)
    if wrapped == "chain":
        defense = gradveil.Chain(defense, gradveil.defense("top-k"))
    if wrapped == "error-feedback":
        defense = gradveil.ErrorFeedback(defense)
    own = {**gradients(), "long": torch.randn(5000, generator=seeded())}  # longer than what is sorted at once
    memory: dict[str, torch.Tensor] = {}
    announced = lies(own, seed)
    try:
        defense.check_announced(announced, own)
    except InputError:
        with pytest.raises(InputError):
            defense.perturb(own, memory=memory, announced=announced)
        with pytest.raises(InputError):
            defense.aggregate([gradveil.Update(own)], announced=announced)
        assert not memory  # a refused announcement changes nothing
        return
    sent = defense.perturb(own, memory=memory, announced=announced)
    assert all(torch.isfinite(value).all() for value in sent.values())
    defense.aggregate([sent], announced=announced)


@pytest.mark.parametrize("case", ANNOUNCING, ids=lambda case: case.name)
def test_what_an_honest_client_announces_is_used(case):
    defense = gradveil.defense(case.name, **case.strong)
    odd = {"empty": torch.zeros(0, 3), "one": torch.tensor([2.0]), "scalar": torch.tensor(3.0), "equal": torch.ones(9)}
    for own in (odd, {"long": torch.zeros(5000)}, gradients()):
        announced = defense.publish(own)
        defense.check_announced(announced, own)
        assert list(defense.aggregate([defense.perturb(own, announced=announced)], announced=announced)) == list(own)


@pytest.mark.parametrize(
    ("name", "parameters", "message"), [(case.name, *bad) for case in CASES + DATA_CASES for bad in case.bad], ids=str
)
def test_parameters_out_of_range_are_refused(name, parameters, message):
    with pytest.raises(ParameterError, match=message):
        gradveil.defense(name, **parameters)


@every_case
def test_unknown_parameters_are_refused(case):
    with pytest.raises(UnknownNameError, match=f"{case.name}: unknown parameter 'strength'"):
        gradveil.defense(case.name, strength=1)


@every_spec
def test_repr_and_str_build_the_same_defense_again(defense):
    again = eval(repr(defense), {"gradveil": gradveil})
    assert again == defense
    assert repr(again) == repr(defense)
    assert gradveil.defense(str(defense)) == defense


@every_spec
def test_it_shares_and_aggregates(defense, tiny_task, tiny_batch):
    update = defense.share(tiny_task, *tiny_batch, generator=seeded(), memory={})
    assert list(update) == list(tiny_task.parameters)
    assert update.meta.samples == 3
    mean = defense.aggregate([update, update])
    for name in update:
        torch.testing.assert_close(mean[name], update[name])
    [seen] = defense.visible([update])
    assert same(seen, update)
    assert defense.prepare(tiny_task) == (defense, tiny_task)


@every_spec
@given(seed=st.integers(0, 1000), size=st.integers(1, 60))
def test_layers_of_any_size_are_accepted(defense, seed, size):
    value = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    result = defense.perturb({"w": value}, generator=seeded(seed), memory={})["w"]
    assert result.shape == value.shape
    assert torch.isfinite(result).all()


# -- defenses that need data -----------------------------------------------------------------------------------------

every_data_case = pytest.mark.parametrize("case", DATA_CASES, ids=lambda case: case.name)
every_data_spec = pytest.mark.parametrize(
    "spec",
    [str(gradveil.defense(case.name, **case.strong)) for case in DATA_CASES]
    + [
        "risk-slicing:ratio=1,compensate=false,clip=2",
        "optimal-noise:form=global,layerwise=true",
        "optimal-dp-sgd:form=global,cap=null",
        "optimal-pruning:form=global",
        "optimal-noise:scale_by=frobenius",
        "optimal-pruning:rate=0.5,std=0.1",
        "optimal-pruning:rate=0.5,std=0.1,form=global",
        "optimal-noise:every=2",
        "optimal-pruning:rate=0.5+gaussian-noise:std=0.1",
        "soteria:rate=0.5,directions=3",
        "dp-sgd:clip=0.1+top-k:keep=0.5",
        "ats:policy=flip+quantization:bits=3",
        "precode:width=3,beta=0.5+top-k:keep=0.3",
    ],
)


def shared(defense: Any, task: Any, batch: Any, generator: torch.Generator | None = None, local: Any = None) -> Any:
    """What a client shares in its first round, after the defense was prepared."""
    defense, prepared = defense.prepare(task, public=batch, generator=seeded(7))
    return prepared, defense.share(prepared, *batch, generator=generator, memory={}, local=local)


@every_data_spec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("local", [None, gradveil.LocalSteps(epochs=2, batch_size=2, lr=0.1)], ids=["sgd", "avg"])
def test_shared_keys_shapes_and_types_are_kept_and_nothing_is_touched(spec, dtype, local, tiny_task, tiny_batch):
    task, batch = tiny_task.to(dtype), (tiny_batch[0].to(dtype), tiny_batch[1])
    copies = batch[0].clone(), {name: value.clone() for name, value in task.parameters.items()}
    defense = gradveil.defense(spec)
    prepared, update = shared(defense, task, batch, seeded(), local)
    expected = {name: (value.shape, dtype) for name, value in prepared.parameters.items()}
    assert {name: (value.shape, value.dtype) for name, value in update.items()} == expected
    assert all(torch.isfinite(value).all() for value in update.values())
    assert torch.equal(batch[0], copies[0])
    assert same(task.parameters, copies[1])
    assert (update.meta.samples, update.meta.local) == (3, local)
    mean = defense.aggregate([update, update])
    for name in update:
        torch.testing.assert_close(mean[name], update[name])
    assert defense.visible([update]) == [update]


@every_data_case
def test_shared_at_zero_strength_is_the_gradient(case, tiny_task, tiny_batch):
    if case.excused:
        pytest.skip(case.excused)
    _, sent = shared(gradveil.defense(case.name, **case.identity), tiny_task, tiny_batch)
    assert same(sent, tiny_task.gradients(*tiny_batch))


@every_data_case
def test_every_shared_layer_is_changed(case, tiny_task, tiny_batch):
    prepared, sent = shared(gradveil.defense(case.name, **case.strong), tiny_task, tiny_batch)
    for name, value in prepared.gradients(*tiny_batch).items():
        assert torch.equal(sent[name], value) == (name in case.untouched), name


@every_data_case
def test_the_generator_decides_what_is_shared(case, tiny_task, tiny_batch):
    defense = gradveil.defense(case.name, **case.strong)
    batch = tuple(part.repeat(8, *[1] * (part.ndim - 1)) for part in tiny_batch)  # 24 draws if there is one per image
    _, first = shared(defense, tiny_task, batch, seeded(1))
    assert same(first, shared(defense, tiny_task, batch, seeded(1))[1])
    assert same(first, shared(defense, tiny_task, batch, seeded(2))[1]) != case.random
    fresh = [shared(defense, tiny_task, batch)[1] for _ in range(2)]
    assert same(*fresh) != case.random


@every_data_spec
def test_a_client_needs_memory_only_for_its_own_images(spec, tiny_task, tiny_batch):
    """The engine hands out views of all images of a round, and torch makes the tangent of a view as large as those."""
    round_images = torch.cat([torch.zeros(50_000, 1, 6, 6, dtype=torch.float64), tiny_batch[0]])
    defense = gradveil.defense(spec)
    defense, prepared = defense.prepare(tiny_task, public=tiny_batch, generator=seeded(7))
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiled:
        sent = defense.share(prepared, round_images[-3:], tiny_batch[1], generator=seeded(), memory={})
    assert same(sent, shared(defense, tiny_task, tiny_batch, seeded())[1])
    assert 0 < max(event.self_cpu_memory_usage for event in profiled.events()) < round_images.nbytes


@every_data_spec
def test_data_that_is_not_finite_is_refused(spec, tiny_task, tiny_batch):
    defense = gradveil.defense(spec)
    defense, prepared = defense.prepare(tiny_task, public=tiny_batch, generator=seeded(7))
    with pytest.raises(InputError, match="inputs must be finite"):
        defense.share(prepared, tiny_batch[0] * torch.nan, tiny_batch[1], memory={})


@every_data_case
def test_it_says_that_it_needs_data(case, tiny_task, tiny_batch):
    if gradveil.defense(case.name, **case.strong).gradient_only:
        pytest.skip("it needs public data only")
    with pytest.raises(InputError, match=f"{case.name}: needs the client's data; call share"):
        gradveil.defense(case.name, **case.strong).perturb(tiny_task.gradients(*tiny_batch))


@every_data_spec
def test_repr_and_str_build_the_same_data_defense_again(spec):
    defense = gradveil.defense(spec)
    assert eval(repr(defense), {"gradveil": gradveil}) == defense
    assert gradveil.defense(str(defense)) == defense


@pytest.mark.parametrize("name", ["ats", "precode", "recup", "risk-slicing", "optimal-noise:form=global"])
def test_a_defense_that_needs_preparing_refuses_to_share_before(name, tiny_task, tiny_batch):
    with pytest.raises(InputError, match="call prepare"):
        gradveil.defense(name).share(tiny_task, *tiny_batch, memory={})
