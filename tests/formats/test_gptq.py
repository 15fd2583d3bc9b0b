"""Risk: GPTQ weights are read with a wrong order of bits, zeros off by one, or groups mixed up."""

import random

import pytest
import torch

from lowbit import FormatError, InexactError, reference
from lowbit.checkpoint.formats import find

from .words import floats, int32, only, planes, stream, table, transposed


def checkpoint(bits, n=32, k=96, size=32, version="gptq", sym=False, order=None, dtype=torch.float16, zeros=None):
    """``(config, tensors by role, the weight float64)``, written as the format says, number by number."""
    reach = k if size == -1 else size
    groups = -(-k // reach)
    q = table(k, n, 0, (1 << bits) - 1, seed=bits)
    low = 1 if version == "gptq" else 0
    z = zeros or table(groups, n, low, (1 << bits) - 1 + low, seed=1)
    if sym:
        z = [[1 << (bits - 1)] * n for _ in range(groups)]
    scales = floats(groups, n, dtype)
    g_idx = [j // reach for j in range(k)]
    if order is not None:
        g_idx = [g_idx[order[j]] for j in range(k)]
    weight = torch.zeros(n, k, dtype=torch.float64)
    for j in range(k):
        for row in range(n):
            weight[row, j] = scales[g_idx[j], row].double() * (q[j][row] - z[g_idx[j]][row])
    words = planes if version == "gptq_p" else stream
    tensors = {
        "qweight": int32(transposed([words(column, bits) for column in transposed(q)])),
        "qzeros": int32([words([number - low for number in row], bits) for row in z]),
        "scales": scales,
        "g_idx": torch.tensor(g_idx, dtype=torch.int32),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "checkpoint_format": version}
    return {**config, "desc_act": order is not None}, tensors, weight


def shuffled(k, seed=3):
    order = list(range(k))
    random.Random(seed).shuffle(order)
    return order


WIDTHS = {"gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "gptq_p": (2, 3, 4, 5, 6, 7, 8)}


@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize(("version", "bits"), [(version, bits) for version in WIDTHS for bits in WIDTHS[version]])
def test_every_width_is_exact(bits, version, sym):
    config, tensors, weight = checkpoint(bits, version=version, sym=sym)
    qt = only(find(config), tensors)
    assert qt.dtype.name == ("int" if sym else "uint") + str(bits) and qt.perm is None
    assert torch.equal(reference.dequantize(qt), weight)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 48, 80, 96, -1])
@pytest.mark.parametrize("act_order", [False, True])
def test_groups_of_any_size_and_order_are_exact(size, act_order):
    order = shuffled(96) if act_order else None
    config, tensors, weight = checkpoint(4, size=size, order=order)
    qt = only(find(config), tensors)
    assert (qt.perm is not None) == (act_order and size not in (96, 128, -1))
    assert torch.equal(reference.dequantize(qt), weight) and torch.equal(qt.dequantize(torch.float64), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_of_2_to_the_b_are_kept_in_every_type_of_scales(dtype):
    config, tensors, weight = checkpoint(8, dtype=dtype, zeros=[[256, 255] * 16] * 3)
    qt = only(find(config), tensors)
    assert qt.zeros.max() == 256 and torch.equal(reference.dequantize(qt), weight)


@pytest.mark.parametrize("bits", [5, 6, 7])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_widths_that_have_no_layout_are_refused(bits, version):
    config, tensors, _ = checkpoint(bits, version="gptq_p")
    with pytest.raises(FormatError, match=f"{bits} bits have a layout in checkpoint_format gptq_p alone"):
        only(find({**config, "checkpoint_format": version}), tensors)


@pytest.mark.parametrize("n, k", [(48, 96), (32, 80)])
def test_planes_are_of_32_numbers(n, k):
    config, tensors, _ = checkpoint(6, n=64, k=96, size=-1, version="gptq_p")
    cut = {"qweight": tensors["qweight"][: k * 6 // 32, :n], "scales": tensors["scales"][:, :n]}
    cut |= {"qzeros": tensors["qzeros"][:, : n * 6 // 32], "g_idx": tensors["g_idx"][:k]}
    with pytest.raises(FormatError, match="multiple of"):
        only(find(config), cut)


def test_without_g_idx_groups_lie_in_order():
    config, tensors, weight = checkpoint(4)
    del tensors["g_idx"]
    assert torch.equal(reference.dequantize(only(find(config), tensors)), weight)


def test_old_files_and_nested_configs_are_found():
    config, tensors, weight = checkpoint(3, sym=True)
    old = {key: config[key] for key in ("bits", "group_size", "sym", "desc_act")}
    nested = ({"quantization_config": config}, {"text_config": {"quantization_config": config}, "model_type": "x"})
    for written in (old, *nested):
        assert torch.equal(reference.dequantize(only(find(written), tensors)), weight)


def test_dynamic_overrides_a_layer():
    config, tensors, weight = checkpoint(4, size=16, sym=True)
    dynamic = {r"+:m\.up": {"bits": 4, "group_size": 16, "sym": True}, r"-:m\.down": {}}
    fmt = find({**config, "bits": 8, "group_size": 128, "sym": False, "dynamic": dynamic})
    assert torch.equal(reference.dequantize(only(fmt, tensors)), weight)
    with pytest.raises(FormatError, match=r"m\.down: dynamic.*says that it is not quantized"):
        only(fmt, tensors, "m.down")


def test_layers_are_found_among_other_tensors():
    config, tensors, _ = checkpoint(4)
    keys = ["model.embed.weight", *(f"a.0.{role}" for role in tensors), *(f"a.1.{r}" for r in tensors), "a.0.bias"]
    layers = find(config).layers(keys)
    assert [layer.name for layer in layers] == ["a.0", "a.1"]
    assert layers[1].tensors == {role: f"a.1.{role}" for role in tensors}
    with pytest.raises(FormatError, match=r"a\.1: .*expected 'a\.1\.scales', got none"):
        find(config).layers([key for key in keys if key != "a.1.scales"])


def test_a_group_order_that_is_not_even_asks_for_requantize():
    config, tensors, _ = checkpoint(4, order=shuffled(96))
    tensors["g_idx"][:] = torch.arange(96) % 3
    tensors["g_idx"][0] = 1
    with pytest.raises(InexactError, match="m.up: g_idx must give every group.*--requantize") as caught:
        only(find(config), tensors)
    q = tensors["scales"]
    assert caught.value.dequantize().shape == (32, 96) and q.shape == (3, 32)


def test_groups_smaller_than_16_give_their_values_to_requantize():
    config, tensors, weight = checkpoint(4, size=8)
    with pytest.raises(InexactError, match="got 8; `lowbit convert --requantize TYPE` quantizes") as caught:
        only(find(config), tensors)
    assert torch.equal(caught.value.dequantize().double(), weight)


def change(role, make):
    return lambda config, tensors: tensors.update({role: make(tensors[role])})


BAD = {
    "qweight cut": (change("qweight", lambda t: t[:-1]), "qweight of 4 bits has a multiple of 4 rows of words, got 11"),
    "qweight of fewer inputs": (change("qweight", lambda t: t[:8]), "scales of 64 inputs in groups of 32 have 2 rows"),
    "qweight narrower": (
        change("qweight", lambda t: t[:, :-1]),
        r"qweight must have shape \(any, 32\), got \(12, 31\)",
    ),
    "qweight of int64": (change("qweight", lambda t: t.long()), "qweight must be int32, got int64"),
    "qweight flat": (change("qweight", lambda t: t.flatten()), r"qweight must have shape \(any, 32\), got \(384,\)"),
    "qzeros cut": (change("qzeros", lambda t: t[:-1]), r"qzeros must have shape \(3, 4\), got \(2, 4\)"),
    "scales of integers": (
        change("scales", lambda t: t.int()),
        "scales must be float16 or bfloat16 or float32, got int32",
    ),
    "scales that are NaN": (change("scales", lambda t: t * float("nan")), "scales: expected finite numbers"),
    "g_idx outside": (change("g_idx", lambda t: t + 1), r"g_idx must lie in 0\.\.2, the groups of scales, got 1\.\.3"),
    "g_idx negative": (change("g_idx", lambda t: t - 1), r"g_idx must lie in 0\.\.2"),
    "g_idx cut": (change("g_idx", lambda t: t[1:]), r"g_idx must have shape \(96,\), got \(95,\)"),
    "wrong bits": (lambda c, t: c.update(bits=8), "qweight of 8 bits has a multiple of 8 rows of words, got 12"),
    "wrong group size": (lambda c, t: c.update(group_size=64), "in groups of 64 have 2 rows, got 3"),
    "sym against its zeros": (lambda c, t: c.update(sym=True), "sym says that every zero is 8"),
    "bits of text": (lambda c, t: c.update(bits="4"), "bits must be one of 2, 3, 4, 5, 6, 7, 8, got '4'"),
    "bits nobody has": (lambda c, t: c.update(bits=9), "bits must be one of"),
    "group size zero": (lambda c, t: c.update(group_size=0), "group_size must be a whole number from 1, or -1"),
    "marlin": (
        lambda c, t: c.update(checkpoint_format="marlin"),
        "checkpoint_format must be one of gptq, gptq_v2, gptq_p",
    ),
    "other words": (lambda c, t: c.update(pack_dtype="int64"), "pack_dtype must be int32"),
    "dynamic of text": (lambda c, t: c.update(dynamic="all"), "dynamic must be dict"),
    "dynamic no expression": (lambda c, t: c.update(dynamic={"+:(": {}}), "is not a regular expression"),
}


@pytest.mark.parametrize("damage, words", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name(damage, words):
    config, tensors, _ = checkpoint(4)
    damage(config, tensors)
    with pytest.raises(FormatError, match=words):
        only(find(config), tensors)


def test_v1_read_as_v2_is_noticed_where_sym_tells():
    config, tensors, _ = checkpoint(4, sym=True)
    with pytest.raises(FormatError, match="every zero is 8, 96 of 96 are not, such as 7"):
        only(find({**config, "checkpoint_format": "gptq_v2"}), tensors)


def test_unknown_formats_are_refused_and_float_models_are_none():
    with pytest.raises(FormatError, match="no known format is called 'gptk'; did you mean gptq"):
        find({"quantization_config": {"quant_method": "gptk"}})
    assert find({"model_type": "llama", "hidden_size": 64}) is None and find({}) is None
    assert find({"quantization_config": {"quant_method": "lowbit"}}) is None
    with pytest.raises(FormatError, match="must be a JSON object"):
        find({"quantization_config": [1]})
