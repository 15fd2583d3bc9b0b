"""Risk: the eight outputs of a word of AWQ are taken in a wrong order, for weights or for zeros."""

import pytest
import torch

from lowbit import FormatError, reference
from lowbit.checkpoint.formats import find

from .words import floats, int32, only, table

# Which column of a word each nibble holds, from the lowest.
COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]


def words(row):
    return [sum(row[at + COLUMN_OF_NIBBLE[i]] << (4 * i) for i in range(8)) for at in range(0, len(row), 8)]


def checkpoint(n=24, k=96, size=32, dtype=torch.float16):
    reach = k if size == -1 else size
    groups = -(-k // reach)
    q, z, scales = table(k, n, 0, 15), table(groups, n, 0, 15, seed=1), floats(groups, n, dtype)
    weight = torch.zeros(n, k, dtype=torch.float64)
    for j in range(k):
        for row in range(n):
            weight[row, j] = scales[j // reach, row].double() * (q[j][row] - z[j // reach][row])
    tensors = {"qweight": int32(list(map(words, q))), "qzeros": int32(list(map(words, z))), "scales": scales}
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": size, "zero_point": True}
    return config, tensors, weight


@pytest.mark.parametrize("size", [16, 32, 64, 128, 48, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_exact(size, dtype):
    config, tensors, weight = checkpoint(size=size, dtype=dtype)
    qt = only(find(config), tensors)
    assert qt.dtype.name == "uint4" and torch.equal(reference.dequantize(qt), weight)


def test_old_configs_are_found():
    _, tensors, weight = checkpoint()
    fmt = find({"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"})
    assert torch.equal(reference.dequantize(only(fmt, tensors)), weight)


def test_without_zero_point_the_type_is_symmetric():
    config, tensors, _ = checkpoint()
    config["zero_point"] = False
    with pytest.raises(FormatError, match="every zero must be 8"):
        only(find(config), tensors)
    tensors["qzeros"].fill_(-0x77777778)  # eights
    qt = only(find(config), tensors)
    del tensors["qzeros"]
    assert qt.dtype.name == "int4" and qt == only(find(config), tensors)


BAD = {
    "no qzeros": (lambda c, t: t.pop("qzeros"), "expected qzeros, got none"),
    "other version": (lambda c, t: c.update(version="gemv"), "version of AWQ must be gemm, got 'gemv'"),
    "other bits": (lambda c, t: c.update(bits=8), "bits must be one of 4, got 8"),
    "no group size": (lambda c, t: c.pop("group_size"), "group_size must be int, got None"),
    "other group size": (lambda c, t: c.update(group_size=64), "in groups of 64 have 2 rows, got 3"),
    "cut": (lambda c, t: t.update(qweight=t["qweight"][:, 1:]), r"qweight must have shape \(any, 3\), got \(96, 2\)"),
    "of int64": (lambda c, t: t.update(qzeros=t["qzeros"].long()), "qzeros must be int32"),
    "narrow scales": (lambda c, t: t.update(scales=t["scales"][:, 1:]), "a multiple of 8 columns, got 23"),
}


@pytest.mark.parametrize("damage, sentence", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(damage, sentence):
    config, tensors, _ = checkpoint()
    damage(config, tensors)
    with pytest.raises(FormatError, match=sentence):
        only(find(config), tensors)
