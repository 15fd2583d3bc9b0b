"""Risk: a file that another version cannot read, a crash that leaves half a file."""

import os
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from lowbit import reference
from lowbit.checkpoint import native
from lowbit.checkpoint.safetensors_file import Reader, write
from lowbit.dtypes import WEIGHT_TYPES
from lowbit.errors import DtypeError, FormatError
from lowbit.quantizers import quantize
from lowbit.tensor import QuantTensor

GOLDEN = Path(__file__).parent / "golden"
FORMAT1 = GOLDEN / "format1"


@pytest.mark.parametrize("name", [*(t.name for t in WEIGHT_TYPES), "extras", "scales_of_8_bits"])
def test_golden_files_of_format_1_keep_their_values(name):
    weights = native.load(FORMAT1 / f"{name}.safetensors")
    values = FORMAT1 / f"{name}.npz" if name == "scales_of_8_bits" else FORMAT1 / "expected.npz"
    with np.load(values, allow_pickle=False) as expected:
        whole = name in ("extras", "scales_of_8_bits")
        mine = [key for key in expected.files if key.startswith(f"{name}.") or (whole and "." not in key)]
        assert set(weights) == set(mine) and mine
        for key, qt in weights.items():
            assert torch.equal(qt.dequantize(torch.float64), torch.from_numpy(expected[key]))
            assert torch.equal(reference.dequantize(qt), torch.from_numpy(expected[key]))


def test_golden_files_hold_what_their_script_makes():
    made = runpy.run_path(str(GOLDEN / "make.py"))["files"]()
    for name, weights in made.items():
        assert native.load(FORMAT1 / f"{name}.safetensors") == weights


@pytest.fixture
def weights(rng):
    w = torch.randn(6, 50, generator=rng)
    perm = torch.randperm(50, generator=rng).int()
    a = quantize(w, "uint3", group_size=16)
    b = quantize(w.bfloat16(), "float8_e4m3", group_size=-1)
    c = QuantTensor(
        a.codes,
        a.scales,
        dtype="uint3",
        shape=(6, 50),
        group_size=16,
        perm=perm,
        codebook=torch.randn(8, generator=rng),
    )
    return {"a.b": a, "b": b, "c": c}


def test_round_trip(weights, tmp_path):
    path = tmp_path / "w.safetensors"
    native.save(path, weights)
    assert native.load(path) == weights
    first = path.read_bytes()
    native.save(str(path), weights)
    assert path.read_bytes() == first
    weights["b"].save(path)
    assert QuantTensor.load(path) == weights["b"] and native.load(path).keys() == {"weight"}
    native.save(path, weights)
    with pytest.raises(FormatError, match="expected one weight, got 3"):
        QuantTensor.load(path)
    native.save(path, {})
    assert native.load(path) == {}


def test_the_safetensors_package_reads_our_files_and_we_read_its(weights, tmp_path):
    theirs = pytest.importorskip("safetensors.torch")
    safe_open = pytest.importorskip("safetensors").safe_open
    path = tmp_path / "w.safetensors"
    native.save(path, weights)
    tensors = theirs.load_file(path)
    assert torch.equal(tensors["a.b.qweight"], weights["a.b"].codes)
    assert torch.equal(tensors["b.scales"], weights["b"].scales) and tensors["b.scales"].dtype == torch.bfloat16
    assert set(tensors) >= {"c.perm", "c.codebook", "a.b.zeros"} and len(tensors) == 9
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    extra = {"norm": torch.ones(3), "empty": torch.ones(0, 4), "scalar": torch.tensor(2.0)}
    theirs.save_file({**tensors, **extra}, path, metadata)
    assert native.load(path) == weights
    with Reader(path) as reader:
        for name, tensor in extra.items():
            assert torch.equal(reader.read(name), tensor)
    write(path, extra, {})
    assert {k: v.tolist() for k, v in theirs.load_file(path).items()} == {k: v.tolist() for k, v in extra.items()}


@pytest.fixture
def narrow():
    """Weights with scales of 8 bits: those of the golden file."""
    return native.load(FORMAT1 / "scales_of_8_bits.safetensors")


def test_scales_of_8_bits_and_factors_of_rows_go_both_ways(narrow, tmp_path):
    assert narrow["e8m0"].scales.view(torch.uint8).flatten().tolist() == list(range(255))
    path = tmp_path / "w.safetensors"
    native.save(path, narrow)
    assert native.load(path) == narrow
    theirs = pytest.importorskip("safetensors.torch")
    tensors = theirs.load_file(path)
    assert len(tensors) == 5 and tensors["e4m3.row_scales"].dtype == torch.float32
    for name, dtype in (("e8m0", torch.float8_e8m0fnu), ("e4m3", torch.float8_e4m3fn)):
        assert tensors[f"{name}.scales"].dtype == dtype
        assert torch.equal(tensors[f"{name}.scales"].view(torch.uint8), narrow[name].scales.view(torch.uint8))
    with Reader(path) as reader:
        metadata = reader.metadata
    theirs.save_file(tensors, path, metadata)
    assert native.load(path) == narrow


def test_what_could_not_be_read_back_is_not_written(weights, tmp_path):
    path = tmp_path / "w.safetensors"
    weights["b"].scales[0, 0] = float("nan")
    with pytest.raises(FormatError, match=r"b\.scales"):
        native.save(path, weights)
    with pytest.raises(DtypeError, match="got Tensor under 'x'"):
        native.save(path, {"x": torch.ones(3)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(weights, tmp_path, monkeypatch, step):
    path = tmp_path / "w.safetensors"
    native.save(path, weights["a.b"])
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, step, full_disk)
    with pytest.raises(OSError, match="no space left"):
        native.save(path, weights)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_missing_file_keeps_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        native.load(tmp_path / "none.safetensors")
