import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradveil.core.errors import DataError
from gradveil.data._pickles import read_pickled_arrays


@pytest.fixture
def read_bytes(tmp_path):
    def read(content):
        (tmp_path / "p").write_bytes(content)
        return read_pickled_arrays(tmp_path / "p")

    return read


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("pickles") / "p"


@given(
    array=hnp.arrays(st.sampled_from(["|b1", "|u1", "<i4", ">i8", "<f4", "<f8"]), hnp.array_shapes(min_dims=0)),
    fortran=st.booleans(),
    protocol=st.sampled_from([2, 3, 4]),
)
def test_arrays_are_the_same_as_with_pickle(file, array, fortran, protocol):
    array = np.asfortranarray(array) if fortran else array
    content = {"a": {"deep": [(array,)]}, b"number": 3, "none": None}
    file.write_bytes(pickle.dumps(content, protocol=protocol))
    read = read_pickled_arrays(file)
    (got,) = read["a"]["deep"][0]
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)
    assert (read[b"number"], read["none"]) == (3, None)


@pytest.mark.parametrize(
    "name",
    [
        b"builtins\neval",
        b"builtins\ngetattr",
        b"numpy\nload",
        b"numpy\nfromfile",
        b"numpy.core\nmultiarray",
        b"numpy.core.multiarray\nfromfile",
        b"codecs\nopen",
        b"os\nsystem",
        b"posix\nsystem",
    ],
)
def test_refuses_other_globals(read_bytes, name):
    with pytest.raises(DataError, match="was not run"):
        read_bytes(b"\x80\x02c" + name + b"\n.")


def test_encodes_text_only_as_latin1(read_bytes):
    with pytest.raises(DataError, match="'zlib' is not part of a plain array"):
        read_bytes(b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x04\0\0\0zlib\x86R.")


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "M8[s]", "i4,f4", "c8"])
def test_refuses_arrays_of_anything_but_numbers(read_bytes, dtype):
    with pytest.raises(DataError, match="expected a pickle of plain numpy arrays"):
        read_bytes(pickle.dumps({"a": np.zeros(2, dtype)}, protocol=3))


@pytest.mark.parametrize(
    "state",
    [
        (1, (2, 2), np.dtype("u1"), False, b"abc"),  # too short
        (1, (2, 2), np.dtype("u1"), False, b"abcde"),  # too long
        (1, (2**62, 2**62), np.dtype("u1"), False, b""),  # the product overflows
        (1, (-2, -2), np.dtype("u1"), False, b"abcd"),
        (1, (2, 2), "u1", False, b"abcd"),
        (1, (2, 2), np.dtype("u1"), False, ["a"] * 4),
        (1, (2, 2)),
    ],
)
def test_refuses_malformed_arrays(read_bytes, state):
    """States that numpy itself refuses, or crashes on."""

    class Malformed:
        def __reduce__(self):
            return np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), state

    with pytest.raises(DataError, match="expected a pickle of plain numpy arrays"):
        read_bytes(pickle.dumps({"a": Malformed()}, protocol=3))


@pytest.mark.parametrize("value", [[1], 3, "text", np.zeros(2, np.uint8), None])
def test_refuses_anything_but_a_dict(read_bytes, value):
    with pytest.raises(DataError, match="not a dict"):
        read_bytes(pickle.dumps(value, protocol=3))


def test_refuses_a_container_that_holds_itself(read_bytes):
    cyclic = {}
    cyclic["again"] = cyclic
    with pytest.raises(DataError, match="occurs in several places, or in itself"):
        read_bytes(pickle.dumps(cyclic))
