import dataclasses

import pytest
import torch

import gradveil
from gradveil.attacks import ATTACKS
from gradveil.core.errors import ParameterError
from gradveil.core.parameters import Strength, choice, declared, flag, integer, meanings, number, state, text
from gradveil.core.registry import Method
from gradveil.core.tensors import Tensors
from gradveil.defenses import DEFENSES

METHODS = [(registry, name) for registry in (DEFENSES, ATTACKS) for name in registry.names()]
IDS = [f"{registry.kind}-{name}" for registry, name in METHODS]


@dataclasses.dataclass(frozen=True, repr=False)
class Made(Method):
    """A method with one parameter of every kind.

    Args:
        size: a number.
        most: a number
            that may be missing.
        count: a whole number.
        on, form: two more.
        words: a text.
    """

    name, factory = "made", "gradveil.made"

    size: float = number(0.5, above=0, high=2, strength=(0.1, 2.0), log=True)
    most: float | None = number(None, low=1)
    count: int = integer(3, low=1, high=9)
    on: bool = flag(True)
    form: str = choice("a", ("a", "b"))
    words: str = text("x")
    measured: Tensors | None = state()


def test_parameters_are_checked_and_kept_in_their_type():
    made = Made(size=1, most=4)
    assert (made.size, made.most) == (1.0, 4.0)
    assert isinstance(made.size, float)
    assert made.parameters == {"size": 1.0, "most": 4.0, "count": 3, "on": True, "form": "a", "words": "x"}
    assert str(made) == "made:size=1.0,most=4.0,count=3,on=true,form=a,words=x"
    assert Made(most=None).most is None


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"size": 0}, "made: size must be a number above 0 and at most 2, got 0"),
        ({"size": None}, "made: size must be a number"),
        ({"most": 0.5}, "made: most must be a number of at least 1, got 0.5"),
        ({"count": 2.5}, "made: count must be a whole number from 1 to 9"),
        ({"on": 1}, "made: on must be true or false, got 1"),
        ({"form": "c"}, "made: form must be one of a, b, got 'c'"),
        ({"words": 3}, "made: words must be a string, got 3"),
    ],
)
def test_bad_values_are_refused(parameters, words):
    with pytest.raises(ParameterError, match=words):
        Made(**parameters)


def test_meanings_of_parameters_come_from_the_docstring():
    assert meanings(Made) == {
        "size": "a number.",
        "most": "a number that may be missing.",
        "count": "a whole number.",
        "on": "two more.",
        "form": "two more.",
        "words": "a text.",
    }


def test_state_is_not_a_parameter_but_counts_for_equality():
    before, after = Made(), Made(measured=Tensors({"w": torch.ones(2)}))
    assert before != after
    assert after == Made(measured=Tensors({"w": torch.ones(2)}))
    assert after != Made(measured=Tensors({"w": torch.zeros(2)}))
    assert str(before) == str(after)
    assert "measured" not in declared(Made)
    assert len({before, after, Made()}) == 2


def test_a_parameter_that_came_later_is_in_the_spec_only_if_it_is_not_the_default():
    """Seeded random numbers are derived from specs, so that of what a method did before must not change."""
    assert str(gradveil.defense("top-k")) == "top-k:keep=0.2"
    assert str(gradveil.defense("optimal-pruning")) == (
        "optimal-pruning:rate=0.8,directions=10,form=local,every=1,layerwise=false"
    )
    for spec in ("top-k:form=global", "optimal-noise:scale_by=frobenius", "optimal-pruning:std=0.5"):
        defense = gradveil.defense(spec)
        assert spec.partition(":")[2] in str(defense)
        assert gradveil.defense(str(defense)) == defense


def test_an_undeclared_field_is_refused():
    @dataclasses.dataclass(frozen=True, repr=False)
    class Undeclared(Method):
        name, factory = "undeclared", "-"
        size: float = 0.5

    with pytest.raises(TypeError, match="Undeclared: the field size is not declared; write size: float = number"):
        Undeclared()


@pytest.mark.parametrize(("registry", "name"), METHODS, ids=IDS)
def test_every_parameter_of_every_method_is_declared_described_and_frozen(registry, name):
    method = registry.create(name)
    described = meanings(type(method))
    for parameter in method.parameters:
        assert described.get(parameter), f"{name}: {parameter} is not described under Args"
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, parameter, -5)
    assert registry.create(name) == method
    assert hash(registry.create(name)) == hash(method)


@pytest.mark.parametrize(("registry", "name"), METHODS, ids=IDS)
def test_every_value_just_outside_its_range_is_refused(registry, name):
    for parameter, kind in declared(registry.get(name)).items():
        for value in kind.refused:
            with pytest.raises(ParameterError, match=rf"^{name}: {parameter} must be .*, got "):
                registry.create(name, **{parameter: value})


def test_strengths_are_the_declared_ones():
    assert gradveil.defense("gaussian-noise").strength == Strength("std", 1e-4, 10.0, log=True)
    assert gradveil.defense("quantization").strength == Strength("bits", 16, 1, whole=True)
    assert gradveil.defense("none").strength is None
    with pytest.raises(ParameterError, match="none: has no parameter that makes it stronger or weaker"):
        gradveil.defense("none").with_strength(1)
