"""The names that gradveil exports are there, although they are imported only when they are used."""

import gradveil


def test_every_exported_name_can_be_used():
    for name in {*gradveil.__all__, *gradveil._ORIGINS, *gradveil._PACKAGES}:
        assert getattr(gradveil, name) is not None
    assert set(gradveil.__all__) <= set(dir(gradveil))


def test_what_is_not_there_is_an_ordinary_attribute_error():
    assert not hasattr(gradveil, "fortune")
