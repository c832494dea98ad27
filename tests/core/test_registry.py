import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.core.errors import ParameterError, UnknownNameError
from gradveil.core.registry import Registry, format_spec, parse_spec


def test_a_name_is_taken_once():
    registry = Registry[int]("number")
    registry.register("one")(lambda: 1)
    with pytest.raises(UnknownNameError, match=r"number 'one' is registered already"):
        registry.register("one")(lambda: 1)


def test_an_unknown_name_far_from_all_lists_them():
    registry = Registry[int]("number")
    registry.register("one")(lambda: 1)
    registry.register("two")(lambda: 2)
    with pytest.raises(UnknownNameError, match=r"unknown number 'zzzzz'; known: one, two"):
        registry.create("zzzzz")


names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda n: n not in ("true", "false", "null", "nan", "inf", "infinity")
)
values = st.one_of(
    st.integers(-1000, 1000), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(), names
)


@given(names, st.dictionaries(names, values, max_size=4))
def test_specs_survive_the_round_trip(name, parameters):
    assert parse_spec(format_spec(name, parameters)) == (name, parameters)


@pytest.mark.parametrize("text", ["", ":k=1", "top-k:", "top-k:keep", "top-k:=1", "top-k:keep=", "a:k=1,k=2"])
def test_malformed_specs_are_refused(text):
    with pytest.raises(ParameterError):
        parse_spec(text)


def test_packages_are_not_hidden_behind_functions():
    import gradveil
    import gradveil.attacks
    import gradveil.defenses

    assert gradveil.defenses.DEFENSES.names() == gradveil.list_defenses()
    assert gradveil.attacks.ATTACKS.names() == gradveil.list_attacks()
