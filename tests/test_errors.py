"""Risk: bad input runs, crashes, or is refused by a sentence that does not say what to do."""

import pytest
import torch

import lowbit
from lowbit import DeviceError, DtypeError, SchemeError, ShapeError
from lowbit.ops.schema import QUANTIZED_IDS

PW = lowbit.pack_weight(lowbit.quantize(torch.ones(40, 96), "int4", group_size=32, method="rtn"))
X = torch.ones(3, 96)
META = torch.ones(3, 96, device="meta")
SHARED = torch.zeros(400)

BAD = [
    # what, call, error, words of its sentence
    ("integer x", lambda: (X.int(), PW), DtypeError, "float32, float16, bfloat16, got int32"),
    ("bool x", lambda: (X.bool(), PW), DtypeError, "got bool"),
    ("complex x", lambda: (X.cfloat(), PW), DtypeError, "got complex64"),
    ("float64 x", lambda: (X.double(), PW), DtypeError, "got float64"),
    ("float8 x", lambda: (X.to(torch.float8_e4m3fn), PW), DtypeError, "got float8_e4m3fn"),
    ("e8m0 x", lambda: (X.to(torch.float8_e8m0fnu), PW), DtypeError, "got float8_e8m0fnu"),
    (
        "another K",
        lambda: (torch.ones(3, 97), PW),
        ShapeError,
        "end in 96 values, the K of the weight, got shape (3, 97",
    ),
    ("K transposed", lambda: (X.T, PW), ShapeError, "got shape (96, 3)"),
    ("a number for x", lambda: (torch.tensor(1.0), PW), ShapeError, "got shape ()"),
    ("x on another device", lambda: (META, PW), DeviceError, "weight, cpu, got meta"),
    ("bias too long", lambda: (X, PW, torch.ones(41)), ShapeError, "(40,), the N of the weight, got (41,)"),
    ("bias of two dimensions", lambda: (X, PW, torch.ones(1, 40)), ShapeError, "got (1, 40)"),
    ("integer bias", lambda: (X, PW, torch.ones(40).long()), DtypeError, "bias must be one of float32"),
    ("float64 bias", lambda: (X, PW, torch.ones(40).double()), DtypeError, "got float64"),
    ("bias elsewhere", lambda: (X, PW, META[0, :40]), DeviceError, "bias must be on the device"),
    ("misspelt act", lambda: (X, PW, None, {"act": "int9"}), SchemeError, "None or 'int8', got 'int9'"),
    ("act without a kernel", lambda: (X, PW, None, {"act": "float16"}), SchemeError, "got 'float16'"),
    ("act of another type", lambda: (X, PW, None, {"act": 8}), SchemeError, "got 8"),
    (
        "out of another type",
        lambda: (X, PW, None, {"out": torch.empty(3, 40).half()}),
        DtypeError,
        "float32, got float16",
    ),
    ("out of another shape", lambda: (X, PW, None, {"out": torch.empty(40, 3)}), ShapeError, "(3, 40), got (40, 3)"),
    ("out elsewhere", lambda: (X, PW, None, {"out": META[:, :40]}), DeviceError, "device of x, cpu, got meta"),
    ("expanded out", lambda: (X, PW, None, {"out": torch.empty(1, 40).expand(3, 40)}), ShapeError, "overlap itself"),
]
EAGER_ONLY = [
    ("no tensor", lambda: ([1.0] * 96, PW), DtypeError, "torch.Tensor, got list"),
    ("bias no tensor", lambda: (X, PW, 1.0), DtypeError, "None, got float"),
    ("weight not packed", lambda: (X, PW.unpack()), DtypeError, "lowbit.pack_weight(qt)"),
    (
        "float weight",
        lambda: (X, torch.ones(40, 96)),
        DtypeError,
        "a PackedWeight (lowbit.pack_weight makes one), got Tensor",
    ),
    (
        "packed for another device",
        lambda: (X, lowbit.pack_weight(PW.unpack(), layout="nvidia")),
        DeviceError,
        "'nvidia'",
    ),
    (
        "out over x",
        lambda: (SHARED[:288].view(3, 96), PW, None, {"out": SHARED[280:].view(3, 40)}),
        ShapeError,
        "share memory",
    ),
    (
        "out within x",
        lambda: (SHARED[:288].view(3, 96), PW, None, {"out": SHARED[:288].view(3, 96)[:, :40]}),
        ShapeError,
        "share memory",
    ),
    (
        "out over the bias",
        lambda: (X, PW, SHARED[40:80], {"out": SHARED[:120].view(3, 40)}),
        ShapeError,
        "share memory with bias",
    ),
    (
        "out whose rows overlap",
        lambda: (X, PW, None, {"out": torch.zeros(400).as_strided((3, 40), (20, 1))}),
        ShapeError,
        "out must not overlap itself, got shape (3, 40) and strides (20, 1)",
    ),
    (
        "out that wants a gradient",
        lambda: (X, PW, None, {"out": torch.zeros(3, 40, requires_grad=True)}),
        SchemeError,
        "but out requires one",
    ),
    ("sparse x", lambda: (X.to_sparse(), PW), DtypeError, "x must be a dense tensor, got layout sparse_coo"),
    (
        "out and gradients",
        lambda: (X.clone().requires_grad_(), PW, None, {"out": torch.empty(3, 40)}),
        SchemeError,
        "without gradients",
    ),
]


def call(x, pw, bias=None, options=None):
    return lowbit.matmul(x, pw, bias, **(options or {}))


@pytest.mark.parametrize("make, error, words", [c[1:] for c in BAD + EAGER_ONLY], ids=[c[0] for c in BAD + EAGER_ONLY])
def test_bad_call_is_a_typed_error_of_one_sentence(make, error, words):
    with pytest.raises(error) as caught:
        call(*make())
    assert (
        isinstance(caught.value, TypeError if error is DtypeError else ValueError)
        and words in str(caught.value)
        and "\n" not in str(caught.value)
    )


@pytest.mark.parametrize("make, error, words", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_call_says_the_same_when_compiled(make, error, words):
    torch._dynamo.reset()
    with pytest.raises(error) as caught:
        torch.compile(call, backend="eager")(*make())
    assert words in str(caught.value)
    torch._dynamo.reset()
    # One graph cannot raise an error of ours, but must quote it.
    with pytest.raises(RuntimeError) as caught:
        torch.compile(call, backend="eager", fullgraph=True)(*make())
    assert words in str(caught.value) and error.__name__ in str(caught.value)


# ---- torch.ops.lowbit.matmul_out: called without matmul's checks ----------------------------------------------------

GOOD = {
    "x": X, "codes": PW.codes, "scales": PW.scales, "zeros": None, "bias": torch.ones(40), "n": 40, "k": 96,
    "weight": 3, "group_size": 32, "zero_kind": 0, "act": 0, "out": torch.zeros(3, 40),
}  # fmt: skip
HOSTILE = [
    ("codes too short", {"codes": PW.codes[:2]}, "codes must have shape [3, 3, 256], got [2, 3, 256]"),
    ("codes of another type", {"codes": PW.codes.to(torch.int8)}, "codes must be uint8"),
    ("codes strided", {"codes": PW.codes.transpose(0, 1)}, "codes must be contiguous"),
    ("scales too few", {"scales": PW.scales[:, :2]}, "scales must have shape [3, 3, 16], got [3, 2, 16]"),
    ("scales of another type", {"scales": PW.scales.double()}, "scales must be float32, float16 or bfloat16"),
    ("float8 scales", {"scales": PW.scales.to(torch.float8_e5m2)}, "scales must be float32, float16 or bfloat16"),
    ("zeros of another type", {"zero_kind": 1, "zeros": PW.scales.float()}, "zeros must have the type of scales"),
    ("zeros missing", {"zero_kind": 1}, "zeros go with zero_kind 1 to 3"),
    ("zeros unasked", {"zeros": PW.scales}, "zeros go with zero_kind 1 to 3"),
    ("n too large", {"n": 49, "out": torch.zeros(3, 49)}, "codes must have shape [4, 3, 256]"),
    ("negative n", {"n": -40}, "n and k must be 1 to 2^31 - 512, got -40 and 96"),
    ("huge k", {"k": 2**62}, "n and k must be 1 to 2^31 - 512"),
    ("a k that padding makes 2^31", {"k": 2**31 - 100}, "n and k must be 1 to 2^31 - 512"),
    ("k of zero", {"k": 0}, "n and k must be 1 to 2^31 - 512, got 40 and 0"),
    ("weight id too large", {"weight": 99}, "weight must be 0 to 25, got 99"),
    ("negative weight id", {"weight": -1}, "weight must be 0 to 25, got -1"),
    ("weight id of another width", {"weight": 7}, "codes must have shape [3, 3, 512], got [3, 3, 256]"),
    ("group size outside the list", {"group_size": 33}, "group_size must be -1, 16, 32, 64, 128 or 256, got 33"),
    ("group size zero", {"group_size": 0}, "group_size must be -1, 16"),
    ("zero kind outside the list", {"zero_kind": 20}, "zero_kind must be 0 to 19, got 20"),
    ("zeros beside even scales", {"zero_kind": 4, "zeros": PW.scales}, "zeros go with zero_kind 1 to 3"),
    ("act of another x type", {"act": 1}, "act must be the number of x's type, 0"),
    ("act outside the list", {"act": 9}, "or that of int8, got 9"),
    ("x of another K", {"x": torch.ones(3, 95)}, "x must end in 96 columns, got shape [3, 95]"),
    ("x strided", {"x": torch.ones(96, 3).T}, "x must be contiguous, or have two dimensions"),
    ("float64 x", {"x": X.double()}, "x must be float32, float16 or bfloat16"),
    ("out of fewer rows", {"out": torch.zeros(2, 40)}, "out must have the rows of x, 3, got 2"),
    ("out of another type", {"out": torch.zeros(3, 40).half()}, "out must have the type of x"),
    ("out over itself", {"out": torch.zeros(1, 40).expand(3, 40)}, "out must not overlap itself, got row stride 0"),
    ("bias too short", {"bias": torch.ones(39)}, "bias must have shape [40], got [39]"),
    ("integer bias", {"bias": torch.ones(40).int()}, "bias must be float32, float16 or bfloat16"),
]  # fmt: skip


def test_good_arguments_of_the_op_are_good():
    torch.ops.lowbit.matmul_out(**{**GOOD, "out": (out := torch.zeros(3, 40))})
    assert torch.equal(out, lowbit.matmul(X, PW, torch.ones(40)))
    assert set(QUANTIZED_IDS.values()) == {3}


@pytest.mark.parametrize("change, words", [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_op_refuses_hostile_arguments_before_it_reads_memory(change, words):
    out = {**GOOD, **change}["out"]
    before = out.clone()
    with pytest.raises(RuntimeError) as caught:
        torch.ops.lowbit.matmul_out(**{**GOOD, **change})
    assert words in str(caught.value)
    assert torch.equal(out, before)


@pytest.mark.parametrize("change, words", [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_fake_refuses_what_the_kernel_refuses(change, words):
    strides_only = ("strided", "contiguous", "overlap")
    if any(word in words for word in strides_only):
        pytest.skip("a matter of strides, which tracing settles itself")
    arguments = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in {**GOOD, **change}.items()}
    with pytest.raises(lowbit.LowbitError):
        torch.ops.lowbit.matmul_out(**arguments)
