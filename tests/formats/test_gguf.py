"""Risk: a bit of a GGUF block goes to the wrong weight, or a hostile file crashes the reader or eats the memory."""

import random
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowbit import FormatError, reference
from lowbit.checkpoint.formats import gguf
from lowbit.checkpoint.formats.gguf_file import TYPES as KNOWN

from .gguf_values import TYPES


def data_of(kind: str, blocks: int, seed=0) -> bytes:
    """Random blocks; the fp16 numbers in them are finite, the exponents of MXFP4 in the middle."""
    _, _, size, halves, _ = TYPES[kind]
    pick, made = random.Random(f"{kind}{seed}"), b""
    for _ in range(blocks):
        block = bytearray(pick.randbytes(size))
        for at in halves:
            struct.pack_into("<e", block, at, pick.uniform(-0.1, 0.1))
        if kind == "MXFP4":
            block[0] = pick.randint(100, 150)
        if kind == "TQ2_0":
            block[:64] = bytes(sum(pick.randint(0, 2) << shift for shift in (0, 2, 4, 6)) for _ in range(64))
        made += bytes(block)
    return made


def values_of(kind: str, data: bytes, n: int, k: int) -> torch.Tensor:
    _, per, size, _, meaning = TYPES[kind]
    flat = [meaning(data[at : at + size], i) for at in range(0, len(data), size) for i in range(per)]
    return torch.tensor(flat, dtype=torch.float64).view(n, k)


def string(text) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def file(tensors: dict, pairs: list | None = None, version=3, align=32, magic=b"GGUF") -> bytes:
    """A file of tensors: name -> (number of type, shape with the innermost last, bytes)."""
    pairs = [("general.architecture", 8, string("llama")), ("n", 4, struct.pack("<I", 7))] if pairs is None else pairs
    head = magic + struct.pack("<IQQ", version, len(tensors), len(pairs))
    for key, kind, value in pairs:
        head += string(key) + struct.pack("<I", kind) + value
    body = b""
    for name, (kind, shape, data) in tensors.items():
        body += bytes(-len(body) % align)
        head += string(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", d) for d in reversed(shape))
        head += struct.pack("<IQ", kind, len(body))
        body += data
    return head + bytes(-len(head) % align) + body


@pytest.mark.parametrize("kind", TYPES)
def test_every_bit_of_a_block_goes_to_its_weight(kind):
    number, per, size, _, _ = TYPES[kind]
    assert KNOWN[number] == (kind, per, size)
    n, k = 6, 2 * per
    data = data_of(kind, 12)
    qt = gguf.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), kind, n, k).validate()
    assert torch.equal(reference.dequantize(qt), values_of(kind, data, n, k))


@pytest.mark.parametrize("kind", TYPES)
def test_the_library_reads_the_same_weight(kind):
    quants = pytest.importorskip("gguf.quants", reason="gguf is not installed")
    number, per, _, _, _ = TYPES[kind]
    data = torch.frombuffer(bytearray(data_of(kind, 40, seed=1)), dtype=torch.uint8)
    expected = quants.dequantize(data.view(20, -1).numpy(), number)
    qt = gguf.decode(data, kind, 20, 2 * per)
    assert torch.equal(qt.dequantize(torch.float32), torch.from_numpy(expected))


@pytest.fixture
def sample():
    data = data_of("Q4_K", 4)
    tensors = {
        "blk.0.up.weight": (12, (2, 512), data),
        "norm.weight": (0, (5,), struct.pack("<5f", 1, 2, 3, 4, 5)),
        "experts": (8, (2, 3, 32), data_of("Q8_0", 6)),
        "bf16": (30, (2, 3), bytes(12)),
        "text": (19, (1, 256), bytes(50)),
    }
    words = string("a") + string("b")
    pairs = [
        ("general.architecture", 8, string("llama")),
        ("tokens", 9, struct.pack("<IQ", 8, 2) + words),
        ("scores", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
        ("nested", 9, struct.pack("<IQIQ2B", 9, 1, 0, 2, 5, 6)),
        ("flag", 7, b"\1"),
    ]
    return tensors, pairs


def opened(tmp_path, data: bytes):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return gguf.GgufFile(path)


@pytest.mark.parametrize("version", [2, 3])
def test_files_are_read_whole(sample, version, tmp_path):
    tensors, pairs = sample
    with opened(tmp_path, file(tensors, pairs, version)) as made:
        assert made.metadata == {
            "general.architecture": "llama",
            "tokens": ["a", "b"],
            "scores": [1, 2, 3],
            "nested": [[5, 6]],
            "flag": True,
        }
        assert list(made.entries) == list(tensors) and made.entries["experts"].shape == (2, 3, 32)
        expected = values_of("Q4_K", tensors["blk.0.up.weight"][2], 2, 512)
        assert torch.equal(reference.dequantize(made.weight("blk.0.up.weight")), expected)
        assert made.weight("experts").shape == (6, 32) and made.is_quantized("experts")
        assert made.plain("norm.weight").tolist() == [1, 2, 3, 4, 5] and not made.is_quantized("bf16")
        assert made.plain("bf16").dtype == torch.bfloat16 and made.plain("bf16").shape == (2, 3)
        with pytest.raises(FormatError, match="text: expected a type out of Q4_0, .* got 'IQ1_S'"):
            made.weight("text")
        with pytest.raises(FormatError, match="experts: expected a tensor of floats or integers, got Q8_0"):
            made.plain("experts")
        with pytest.raises(FormatError, match=r"norm.weight: a quantized weight must be \[N, K\]"):
            made.weight("norm.weight")


def test_another_alignment(sample, tmp_path):
    tensors, _ = sample
    pairs = [("general.alignment", 4, struct.pack("<I", 64))]
    with opened(tmp_path, file(tensors, pairs, align=64)) as made:
        assert made.plain("norm.weight").tolist() == [1, 2, 3, 4, 5]


def test_a_file_cut_anywhere_is_refused(sample, tmp_path):
    data = file(*sample)
    path = tmp_path / "m.gguf"
    for length in range(0, len(data), 3):
        path.write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"^m\.gguf: "):
            gguf.GgufFile(path)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_load_or_are_refused_but_nothing_else_happens(sample, tmp_path, changes):
    damaged = bytearray(file(*sample))
    for at, value in changes:
        damaged[at] = value
    try:
        with opened(tmp_path, bytes(damaged)) as made:
            for name in made.entries:
                if made.is_quantized(name):
                    assert made.weight(name).dequantize().isfinite().all()
    except FormatError as error:
        assert "m.gguf: " in str(error)


HUGE = struct.pack("<Q", 1 << 62)
F32 = (0, (5,), bytes(20))
HOSTILE = {
    "another magic": (file({}, magic=b"GGML"), "does not begin with GGUF"),
    "a pickle": (b"\x80\x04K\x01." + bytes(50), "does not begin with GGUF"),
    "version 1": (file({}, version=1), "expected version 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "in little-endian order, got 50331648"),
    "2^62 tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), "do not fit in 0 bytes"),
    "2^62 pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62), "do not fit in 0 bytes"),
    "a huge string": (file({}, [("a", 8, HUGE)]), "claims 4611686018427387904 bytes"),
    "a huge array": (file({}, [("a", 9, struct.pack("<I", 4) + HUGE)]), "a has 4611686018427387904 values"),
    "a huge array of text": (file({}, [("a", 9, struct.pack("<I", 8) + HUGE)]), "a has 4611686018427387904 values"),
    "deep arrays": (file({}, [("a", 9, struct.pack("<IQ", 9, 1) * 1000)]), "a has a value of type 9"),
    "an unknown value": (file({}, [("a", 13, bytes(8))]), "a value of type 13"),
    "a key twice": (file({}, [("a", 0, b"1"), ("a", 0, b"1")]), "'a' stands there twice"),
    "no UTF-8": (file({}, [(b"\xff", 0, b"1")]), "is not UTF-8"),
    "alignment 0": (file({}, [("general.alignment", 4, bytes(4))]), "general.alignment must be"),
    "alignment of text": (file({}, [("general.alignment", 8, string("x"))]), "general.alignment must be"),
    "an unknown type": (file({"a": (99, (5,), bytes(20))}), "a is of type 99"),
    "five dimensions": (file({"a": (0, (1, 1, 1, 1, 1), bytes(4))}), "at most 4 dimensions, got 5"),
    "half a block": (file({"a": (12, (2, 100), bytes(288))}), r"a of Q4_K in blocks of 256 cannot have"),
    "overflowing": (file({"a": (0, (1 << 40, 1 << 40), bytes(4))}), "cannot have the dimensions"),
    "larger than the file": (file({"a": (0, (30,), bytes(20))}), "needs .* bytes of file"),
    "overlapping": (file({"a": (0, (16,), bytes(20)), "b": (0, (16,), bytes(64))}), "b at byte 32 .* overlaps"),
}  # fmt: skip


@pytest.mark.parametrize("data, words", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_by_name(data, words, tmp_path):
    with pytest.raises(FormatError, match=rf"^m\.gguf: .*{words}"):
        opened(tmp_path, data)


def test_values_that_are_no_numbers_are_refused():
    data = bytearray(data_of("Q4_0", 2))
    struct.pack_into("<e", data, 0, float("nan"))
    with pytest.raises(FormatError, match="scales: expected finite numbers"):
        gguf.decode(torch.frombuffer(data, dtype=torch.uint8), "Q4_0", 2, 32).validate()
    with pytest.raises(
        FormatError, match=r"Q4_0 of shape \(2, 64\) has blocks of 32 weights in 18 bytes, got 36 bytes"
    ):
        gguf.decode(torch.frombuffer(data, dtype=torch.uint8), "Q4_0", 2, 64)
