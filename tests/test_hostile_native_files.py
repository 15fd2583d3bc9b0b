"""Risk: a damaged or hostile file of lowbit's own format that is taken, or refused without saying what is wrong."""

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowbit.checkpoint import native
from lowbit.checkpoint.safetensors_file import write
from lowbit.errors import FormatError
from lowbit.quantizers import quantize
from lowbit.tensor import QuantTensor

FORMAT1 = Path(__file__).parent / "golden" / "format1"


def split(data: bytes):
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join(header, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.fixture
def sample(tmp_path, rng):
    """The bytes of a small good file, and a function that loads other bytes in its place."""
    path = tmp_path / "w.safetensors"
    quantize(torch.randn(2, 21, generator=rng), "uint3", group_size=16).save(path, "up")

    def load(data: bytes):
        path.write_bytes(data)
        return native.load(path)

    return path.read_bytes(), load


def test_a_file_cut_anywhere_is_refused(sample):
    data, load = sample
    load(data)
    for length in range(len(data)):
        with pytest.raises(FormatError, match=r"^w\.safetensors: "):
            load(data[:length])


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_load_or_are_refused_but_nothing_else_happens(sample, changes):
    data, load = sample
    damaged = bytearray(data)
    for at, value in changes:
        damaged[at % len(data)] = value
    try:
        for qt in load(bytes(damaged)).values():
            assert qt.dequantize(torch.float64).isfinite().all()
    except FormatError as error:
        assert str(error).startswith("w.safetensors: ")


def header_change(**changes):
    """A sample whose header has these tensors' entries changed (None removes one)."""

    def change(header, body):
        for name, value in changes.items():
            key = name.replace("__", ".") if name != "__metadata__" else name
            if value is None:
                del header[key]
            else:
                header[key] = {**header.get(key, {}), **value} if isinstance(value, dict) else value
        return join(header, body)

    return change


def entry_change(change):
    """A sample whose ``lowbit`` entry went through change."""

    def apply(header, body):
        root = json.loads(header["__metadata__"]["lowbit"])
        root = change(root) or root
        header["__metadata__"]["lowbit"] = root if isinstance(root, str) else json.dumps(root)
        return join(header, body)

    return apply


def weight_change(**changes):
    return entry_change(lambda root: root["weights"]["up"].update(changes))


def body_change(name, offset, value: bytes):
    """A sample with some bytes of one tensor replaced."""

    def apply(header, body):
        at = header[name]["data_offsets"][0] + offset
        return join(header, body[:at] + value + body[at + len(value) :])

    return apply


NAN16 = np.float16("nan").tobytes()
HOSTILE = {
    "empty": (lambda h, b: b"", "not a safetensors file or cut off"),
    "pickle": (lambda h, b: pickle.dumps({"a": 1}), "looks like a pickle"),
    "zip": (lambda h, b: b"PK\x03\x04" + bytes(100), "looks like a pickle"),
    "huge header": (lambda h, b: struct.pack("<Q", 1 << 60) + b"{}", "not a safetensors file"),
    "header of no object": (lambda h, b: join(b"[1]", b""), "must be a JSON object"),
    "header of no JSON": (lambda h, b: join(b"{'a'}", b""), "not valid JSON"),
    "header not UTF-8": (lambda h, b: join(b'{"\xff": 1}', b""), "not valid JSON"),
    "half a surrogate": (lambda h, b: join(b'{"\\ud800": 1}', b""), "not valid JSON"),
    "deep header": (lambda h, b: join(b'{"a":' + b"[" * 100_000, b""), "not valid JSON"),
    "huge number": (lambda h, b: join(b'{"a":' + b"9" * 10_000 + b"}", b""), "not valid JSON"),
    "NaN in the header": (lambda h, b: join(b'{"a": NaN}', b""), "NaN is no JSON"),
    "key twice": (lambda h, b: join(json.dumps(h).encode()[:-1] + b',"up.scales":1}', b), "stands there twice"),
    "rest": (lambda h, b: join(h, b + b"\0"), "bytes that belong to no tensor"),
    "overlap": (header_change(up__zeros={"data_offsets": [4, 12]}), r"up\.zeros overlaps"),
    "hole": (header_change(up__scales=None), r"up\.zeros leaves a hole"),
    "backwards": (header_change(up__zeros={"data_offsets": [16, 8]}), r"up\.zeros: .*takes 8 bytes"),
    "three offsets": (header_change(up__zeros={"data_offsets": [8, 16, 16]}), r"up\.zeros: .*takes 8 bytes"),
    "float offsets": (header_change(up__zeros={"data_offsets": [8.0, 16.0]}), r"up\.zeros: its data_offsets"),
    "true as a size": (header_change(up__zeros={"shape": [True, 4]}), r"up\.zeros: its shape must be"),
    "negative size": (header_change(up__zeros={"shape": [-2, -2]}), r"up\.zeros: its shape must be"),
    "overflow": (header_change(up__zeros={"shape": [1 << 62, 1 << 62, 0], "data_offsets": [8, 8]}), "larger than any"),
    "size for size": (header_change(up__zeros={"shape": [4, 1]}), r"up: zeros must have shape \(2, 2\), got \(4, 1\)"),
    "unknown type": (header_change(up__zeros={"dtype": "F4"}), r"up\.zeros: its dtype must be one of"),
    "extra key": (header_change(up__zeros={"note": "x"}), r"up\.zeros: its entry must have dtype"),
    "metadata of numbers": (header_change(__metadata__={"lowbit": 1}), "must map text to text"),
    "no metadata": (header_change(__metadata__=None), "no 'lowbit' entry"),
    "codes as int8": (header_change(up__qweight={"dtype": "I8"}), r"up: codes must be uint8, got int8"),
    "zeros of another type": (header_change(up__zeros={"dtype": "BF16"}), r"up: zeros must be float16, got bfloat16"),
    "newer format": (entry_change(lambda r: r.update(format=2)), "format 2 needs a newer lowbit"),
    "format by name": (entry_change(lambda r: r.update(format="1")), "must state its format"),
    "format zero": (entry_change(lambda r: r.update(format=0)), "must state its format"),
    "format true": (entry_change(lambda r: r.update(format=True)), "must state its format"),
    "no format": (entry_change(lambda r: r.pop("format") and None), "must state its format"),
    "unknown field": (entry_change(lambda r: r.update(x=1)), "must have 'format' and 'weights'"),
    "entry no JSON": (entry_change(lambda r: "{"), "the 'lowbit' entry is not valid JSON"),
    "entry a list": (entry_change(lambda r: [r]), "must state its format"),
    "weight missing": (entry_change(lambda r: r["weights"].update(down=r["weights"]["up"])), "down: its entry lists"),
    "unknown weight type": (weight_change(dtype="int9"), "up: no weight type is called 'int9'"),
    "other width": (weight_change(dtype="uint4"), r"up: codes must have shape \(2, 11\), got \(2, 8\)"),
    "other shape": (weight_change(shape=[2, 22]), r"up: codes must have shape \(2, 9\)"),
    "huge shape": (weight_change(shape=[2, 1 << 70]), "up: codes must have shape"),
    "shape of text": (weight_change(shape="2x21"), "up: shape and tensors must be lists"),
    "negative shape": (weight_change(shape=[2, -21]), "up: shape must be"),
    "group size": (weight_change(group_size=17), "up: group_size must be one of"),
    "zero kind": (weight_change(zero_kind="none"), "up: zero_kind 'none' of uint3 goes with no zeros"),
    "zero kind null": (weight_change(zero_kind=None), "zero_kind a string"),
    "tensor unlisted": (weight_change(tensors=["qweight", "scales"]), "up: its entry lists"),
    "extra field": (weight_change(bits=3), "up: its entry must have"),
    "NaN scale": (body_change("up.scales", 2, NAN16), r"up\.scales: .*1 of 4 are NaN or infinite"),
    "infinite zero": (body_change("up.zeros", 0, np.float16("inf").tobytes()), r"up\.zeros: .*NaN or infinite"),
    "pad bits": (body_change("up.qweight", 7, b"\xff"), r"up\.qweight: bits behind"),
}  # fmt: skip


@pytest.mark.parametrize("change, words", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_by_name(sample, change, words):
    data, load = sample
    with pytest.raises(FormatError, match=rf"^w\.safetensors: .*{words}|^w\.safetensors: {words}"):
        load(change(*split(data)))


def test_codes_without_a_value_and_wrong_perms_are_refused(tmp_path, rng):
    path = tmp_path / "w.safetensors"
    w, perm = torch.randn(6, 50, generator=rng), torch.randperm(50, generator=rng).int()
    codes = torch.randint(8, w.shape, dtype=torch.uint8, generator=rng)
    c = QuantTensor.from_codes(codes, torch.ones(6, 1), dtype="uint3", group_size=-1, perm=perm, codebook=torch.ones(8))
    native.save(path, {"b": quantize(w, "float8_e4m3", group_size=-1), "c": c})
    header, body = split(path.read_bytes())
    for change, words in {
        body_change("b.qweight", 3, b"\x7f"): r"b\.qweight: .*NaN or infinity in float8_e4m3",
        body_change("c.perm", 4, struct.pack("<i", 50)): r"c\.perm: expected a permutation of 0\.\.49",
        body_change("c.codebook", 4, struct.pack("<f", float("nan"))): r"c\.codebook: .*1 of 8",
    }.items():
        path.write_bytes(change(header, body))
        with pytest.raises(FormatError, match=words):
            native.load(path)


def test_factors_of_rows_that_do_not_go_with_the_scales_are_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    narrow = native.load(FORMAT1 / "scales_of_8_bits.safetensors")
    rows = narrow["e4m3"].row_scales
    nan = torch.full((1,), 0xFF, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for name, changes, words in (
        ("e4m3", {"row_scales": None}, "e4m3: scales of float8_e4m3fn go with row_scales"),
        ("e4m3", {"row_scales": rows.half()}, "e4m3: row_scales must be float32, got float16"),
        ("e4m3", {"row_scales": rows[1:]}, r"e4m3: row_scales must have shape \(85, 1\), got \(84, 1\)"),
        ("e4m3", {"row_scales": rows / 0}, r"e4m3\.row_scales: expected finite numbers, 85 of 85 are NaN or infinite"),
        ("e8m0", {"row_scales": rows}, "e8m0: scales of float8_e8m0fnu go with no row_scales"),
        ("e8m0", {"scales": nan.expand(85, 3)}, r"e8m0\.scales: expected finite numbers, 255 of 255 are NaN"),
    ):
        tensors, entry = native.describe(name, narrow[name])
        for short, tensor in changes.items():
            tensors[f"{name}.{short}"] = tensor
        tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        entry["tensors"] = [key.rpartition(".")[2] for key in tensors]
        write(path, tensors, {"lowbit": json.dumps({"format": 1, "weights": {name: entry}})})
        with pytest.raises(FormatError, match=rf"^w\.safetensors: {words}"):
            native.load(path)
