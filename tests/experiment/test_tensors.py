"""The types and names of leaves are the same in files and messages."""

import numpy as np
import pytest
import safetensors.numpy

from personax.experiment.tensors import DTYPE_NAMES, DTYPES, leaves_by_name, read_tensors
from personax.live.messages import Layout
from personax.sharing import dotted


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_written_is_read_with_its_bits(name):
    dtype = DTYPES[name]
    array = np.frombuffer(bytes(range(2 * dtype.itemsize)), np.uint8).copy()
    array = (array % 2).astype(bool) if name == "BOOL" else array.view(dtype)
    assert DTYPE_NAMES[dtype] == name
    contents = [safetensors.numpy.save({"a.b": array})]
    if name == "C64":
        with pytest.raises(ValueError, match=r"`a\.b` must have a real type that safetensors supports, got complex64"):
            Layout.of({"a": {"b": array}})
    else:
        contents.append(Layout.of({"a": {"b": array}}).encode({"a": {"b": array}}))
    for content in contents:
        found = read_tensors(content)["a.b"]
        assert found.dtype == dtype and found.tobytes() == array.tobytes()


def test_leaves_have_the_names_of_their_keys():
    tree = {"dense": {"kernel": 1, "bias": 2}, "scales": [3, 4]}
    assert leaves_by_name(tree, dotted) == {"dense.bias": 2, "dense.kernel": 1, "scales.0": 3, "scales.1": 4}
    with pytest.raises(ValueError, match=r"Duplicate leaf name 'a\.b'"):
        leaves_by_name({"a": {"b": 1}, "a.b": 2}, dotted)
