"""Risk: a quantized layer loses or changes its weight on the way through what people do with modules."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import lowbit
import lowbit.nn
from lowbit import DeviceError, DtypeError, QuantizationError, SchemeError, ShapeError, reference

TYPES = ["int4", "uint3", "float6_e3m2", "int1"]


def linear(k=96, n=40, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=bias).to(dtype)


def layer(kind="int4", prepare=True, **options):
    return lowbit.Linear.from_linear(linear(**options), kind, group_size=32, method="rtn", prepare=prepare)


def with_perm():
    perm = torch.randperm(96, generator=torch.Generator().manual_seed(0)).int()
    qt = lowbit.quantize(linear().weight.detach(), "uint4", group_size=32, method="rtn")
    options = {"dtype": "uint4", "shape": (40, 96), "group_size": 32, "perm": perm}
    return lowbit.Linear.from_quant_tensor(lowbit.QuantTensor(qt.codes, qt.scales, qt.zeros, **options))


X = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))


def same_weight(a, b):
    return a.quant_tensor() == b.quant_tensor()


@pytest.mark.parametrize("kind", TYPES)
def test_layer_is_the_product_with_its_dequantized_weight(kind):
    made = layer(kind)
    qt = lowbit.quantize(linear().weight.detach(), kind, group_size=32, method="rtn")
    assert made.quant_tensor() == qt and torch.equal(made.dequantize(), qt.dequantize(torch.float32))
    expected = reference.matmul(X, qt, linear().bias)
    assert (made(X).double() - expected).norm() < 1e-5 * expected.norm()
    made.act = "int8"
    expected = reference.matmul(X, qt, linear().bias, "int8")
    assert (made(X).double() - expected).norm() < 1e-5 * expected.norm()


def test_parameters_are_frozen_and_named():
    made = layer("uint4")
    assert isinstance(made, nn.Linear) and (made.in_features, made.out_features) == (96, 40)
    assert dict.fromkeys(made._parameters) == dict.fromkeys(
        ["weight", "qweight", "scales", "zeros", "perm", "codebook", "row_scales", "bias"]
    )
    assert made._parameters["weight"] is None
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert trained == {"bias"} and not any(p.requires_grad for p in made.requires_grad_(False).parameters())
    assert {name for name, p in made.requires_grad_().named_parameters() if p.requires_grad} == {"bias"}
    assert all(isinstance(p, nn.Parameter) for p in made.parameters()) and not list(made.buffers())
    assert made.qweight.dtype == torch.uint8 and made.scales.dtype == made.zeros.dtype == torch.float16
    for text in ("uint4", "group_size=32", "in_features=96", "out_features=40", "layout='cpu'"):
        assert text in repr(made)


def test_weight_answers_type_and_device_and_refuses_products():
    made = layer(dtype=torch.bfloat16)
    assert made.weight.dtype == torch.bfloat16 and made.weight.device == torch.device("cpu")
    assert made.weight.numel() == 0 and isinstance(made.weight, torch.Tensor)
    for product in (lambda w: nn.functional.linear(X, w), lambda w: X @ w, lambda w: torch.matmul(w, X)):
        with pytest.raises(SchemeError, match="use layer.dequantize"):
            product(made.weight)


def test_one_copy_of_the_weight():
    made = layer("int4", k=2048, n=512)
    held = sum(p.numel() * p.element_size() for p in made.parameters())
    assert held <= 1.05 * (512 * 2048 // 2 + 512 * 64 * 2 + 512 * 4)
    tensors = [v for v in vars(made).values() if isinstance(v, torch.Tensor)]
    assert not tensors


@pytest.mark.parametrize("make", [layer, with_perm, lambda: layer("uint3"), lambda: layer(prepare=False)])
def test_copies_keep_the_weight(make):
    made, (again, by_file) = make(), (None, io.BytesIO())
    torch.save(made, by_file)
    by_file.seek(0)
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.load(by_file, weights_only=False)):
        assert same_weight(again, made) and again.layout == made.layout and again.scheme == made.scheme
        assert torch.equal(again(X), made(X))
        for name, parameter in again.named_parameters():
            assert parameter.data_ptr() != dict(made.named_parameters())[name].data_ptr()


@pytest.mark.parametrize("prepare", [True, False])
@pytest.mark.parametrize(
    "change", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.bfloat16), nn.Module.double]
)
def test_change_of_float_type_leaves_the_weight_alone(change, prepare):
    made = layer("uint4", prepare=prepare)
    before = {name: p.clone() for name, p in made.named_parameters() if name != "bias"}
    model = change(nn.Sequential(made))
    assert model[0] is made and made.bias.dtype == made.weight.dtype != torch.float32
    for name, value in before.items():
        assert torch.equal(getattr(made, name), value) and getattr(made, name).dtype == value.dtype
    assert not made.scales.requires_grad


def test_other_changes_of_a_module():
    made = layer()
    expected = made(X)
    made.share_memory()
    assert made.qweight.is_shared() and made.scales.is_shared() and torch.equal(made(X), expected)
    away = copy.deepcopy(made).to("meta")
    assert away.layout is None and away.qweight.shape == (40, 48) and away.qweight.is_meta
    back = away.to_empty(device="cpu")
    back.load_state_dict(made.state_dict())
    assert same_weight(back, made) and torch.equal(back.prepare()(X), expected)


# ---- state_dict -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [layer, with_perm, lambda: layer("uint3", bias=False)])
def test_state_dict_is_canonical_and_loads_into_either_form(make):
    made = make()
    state, qt = made.state_dict(), made.quant_tensor()
    for name, tensor in (("qweight", qt.codes), ("scales", qt.scales), ("zeros", qt.zeros), ("perm", qt.perm)):
        assert torch.equal(state[name], tensor) if tensor is not None else name not in state
    canonical = copy.deepcopy(made)
    canonical.unprepare()
    assert canonical.layout is None and list(canonical.state_dict()) == list(state)
    for target in (copy.deepcopy(made), copy.deepcopy(canonical)):
        for p in target.parameters():
            p.data.zero_()
        layout = target.layout
        assert str(target.load_state_dict(state)) == "<All keys matched successfully>"
        assert target.layout == layout and same_weight(target, made) and torch.equal(target.prepare()(X), made(X))


@pytest.mark.parametrize("assign", [True, False])
def test_state_dict_loads_inside_a_model(assign):
    def net(seed):
        torch.manual_seed(seed)
        return lowbit.quantize_model(
            nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 8)), "int5", group_size=16
        )

    first, second = net(0), net(1)
    assert not torch.equal(first(X), second(X))
    second.load_state_dict(first.state_dict(), assign=assign)
    assert torch.equal(first(X), second(X)) and second[0].layout == "cpu"


def test_state_that_does_not_fit_is_refused_and_changes_nothing():
    made, good = layer(), layer().state_dict()
    expected = made(X)
    for change, words in (
        ({"scales": good["scales"].float()}, "scales must be float16, got float32"),
        ({"qweight": good["qweight"].int()}, "qweight must be uint8, got int32"),
        ({"qweight": good["qweight"][:, :40]}, "size mismatch for qweight"),
        ({"weight": torch.zeros(40, 96)}, "Unexpected key"),
        ({"qweight": None}, "Missing key"),
    ):
        state = {name: value for name, value in {**good, **change}.items() if value is not None}
        with pytest.raises(RuntimeError, match=words):
            made.load_state_dict(state)
        assert made.layout == "cpu" and torch.equal(made(X), expected)


@pytest.mark.parametrize("index, value", [(slice(None), 0), (slice(None), 10**6), (3, -1)], ids=str)
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("prepared", [True, False])
def test_order_of_columns_that_is_none_is_not_loaded(prepared, assign, index, value):
    made = with_perm()
    expected, state = made(X), made.state_dict()
    state["perm"] = state["perm"].clone()
    state["perm"][index] = value
    if not prepared:
        made.unprepare()
    layout = made.layout
    with pytest.raises(RuntimeError, match=r"perm must be a permutation of 0\.\.95"):
        made.load_state_dict(state, assign=assign)
    assert made.layout == layout and torch.equal(made.prepare()(X), expected)


# ---- prepare --------------------------------------------------------------------------------------------------------


def test_layer_that_is_not_packed_is_right_and_says_once_that_it_is_slow(monkeypatch):
    monkeypatch.setattr(lowbit.nn, "_warned", set())
    monkeypatch.setattr(lowbit.nn, "_SCRATCH_BYTES", 4 * 96 * 17)  # 17 rows of weight at a time
    made = layer("uint3", prepare=False)
    with pytest.warns(UserWarning, match="call lowbit.prepare") as caught:
        y = made(X)
    assert len(caught) == 1 and made.layout is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(made(X), y)
    x = X.clone().requires_grad_()
    made(x).sum().backward()
    torch.testing.assert_close(x.grad, made.dequantize().sum(0).expand(3, 96))
    assert lowbit.prepare(made) is made and made.layout == "cpu"
    torch.testing.assert_close(made(X), y, rtol=1e-5, atol=1e-5)
    packed = made.qweight.data_ptr()
    assert lowbit.prepare(made).qweight.data_ptr() == packed  # once


@pytest.mark.filterwarnings("ignore:a lowbit.Linear is not packed")
def test_unprepare_gives_the_stored_form_back_and_prepare_packs_again():
    stored = [layer("uint3", prepare=False).quant_tensor(), with_perm().quant_tensor()]
    model = nn.Sequential(layer("uint3"), nn.Sequential(with_perm()))
    inside, expected = [model[0], model[1][0]], [model[0](X), model[1](X)]
    held = [id(parameter) for parameter in model.parameters()]
    assert [made.layout for made in inside] == ["cpu", "cpu"]
    assert lowbit.unprepare(lowbit.unprepare(model)) is model
    for made, qt, y in zip(inside, stored, expected):
        assert made.layout is None and torch.equal(made.qweight, qt.codes) and made.quant_tensor() == qt
        torch.testing.assert_close(made(X), y, rtol=1e-5, atol=1e-5)
    assert [id(parameter) for parameter in model.parameters()] == held
    lowbit.prepare(model)
    assert all(made.layout == "cpu" and torch.equal(made(X), y) for made, y in zip(inside, expected))
    with pytest.raises(DtypeError, match="expected an nn.Module, got int"):
        lowbit.unprepare(3)


def test_prepare_replaces_the_bytes_inside_the_parameters():
    model = nn.Sequential(layer(prepare=False), nn.Tanh(), layer(k=40, n=8, prepare=False))
    held = dict(model.named_parameters())
    with torch.inference_mode():
        lowbit.prepare(model)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in held.items()}
    assert model[0].layout == model[2].layout == "cpu"
    model(X).sum().backward()  # what was packed under inference_mode trains


def test_layer_refuses_what_it_cannot_be_made_of():
    with pytest.raises(DtypeError, match="nn.Linear with a float weight"):
        lowbit.Linear.from_linear(layer(), "int4")
    with pytest.raises(DtypeError, match="expected a QuantTensor, got Tensor"):
        lowbit.Linear.from_quant_tensor(torch.ones(4, 4))
    with pytest.raises(SchemeError, match="act must be None"):
        lowbit.Linear.from_linear(linear(), "int4", act="int7")
    with pytest.raises(QuantizationError):
        lowbit.Linear.from_linear(linear().requires_grad_(False).apply(lambda m: m.weight[0].fill_(float("nan"))))
    with pytest.raises(DtypeError, match="expected an nn.Module, got int"):
        lowbit.prepare(3)


@pytest.mark.parametrize(
    "bias, error, words",
    [
        (torch.ones(41), ShapeError, r"\(40,\), the N of the weight, got \(41,\)"),
        (torch.ones(1, 40), ShapeError, r"got \(1, 40\)"),
        (torch.ones(40).int(), DtypeError, "bias must be one of float32, float16, bfloat16, got int32"),
        (torch.ones(40, device="meta"), DeviceError, "device of the weight, cpu, got meta"),
        ([1] * 40, DtypeError, "bias must be a torch.Tensor or None, got list"),
        (1.0, DtypeError, "got float"),
        ("x", DtypeError, "got str"),
        (True, DtypeError, "got bool"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_layer_refuses_a_bias_that_it_could_not_add(bias, error, words):
    with pytest.raises(error, match=words):
        lowbit.Linear.from_quant_tensor(layer().quant_tensor(), bias)


@pytest.mark.parametrize("dtype", ["float16", 5, True, torch.int8])
def test_layer_refuses_what_is_no_type_of_numbers(dtype):
    made = layer()
    for make in (
        lambda: lowbit.Linear.from_quant_tensor(made.quant_tensor(), dtype=dtype),
        lambda: lowbit.Linear(4, 4, scheme=made.scheme, dtype=dtype),
    ):
        with pytest.raises(DtypeError, match="dtype must be a floating torch.dtype, got"):
            make()


@pytest.mark.parametrize("sizes", [("4", 4), (4.0, 4), (4, True), (True, 4), (0, 4), (4, None)], ids=str)
def test_new_layer_refuses_what_is_no_size(sizes):
    with pytest.raises(ShapeError, match="in_features and out_features must be whole numbers from 1, got"):
        lowbit.Linear(*sizes, scheme=layer().scheme)


def test_new_layer_refuses_what_its_scheme_or_this_machine_lacks():
    scheme = layer("int4").scheme
    with pytest.raises(SchemeError, match="a codebook goes with a uint type such as uint4, got int4"):
        lowbit.Linear(4, 4, scheme=scheme, codebook=True)
    for device in ("foo", 1.5, "cuda:99"):
        with pytest.raises(DeviceError, match="expected a device"):
            lowbit.Linear(4, 4, scheme=scheme, device=device)
    assert lowbit.Linear(4, 4, scheme=scheme, device="meta").qweight.is_meta


@pytest.mark.parametrize("prepare", [True, False])
def test_layer_refuses_an_x_that_is_no_tensor(prepare):
    for x in (None, [1.0] * 96):
        with pytest.raises(DtypeError, match="x must be a torch.Tensor, got"):
            layer(prepare=prepare)(x)


def test_no_group_size_is_refused():
    for make in (lowbit.Linear.from_linear, lambda m, **o: lowbit.quantize_model(nn.Sequential(m), **o)):
        with pytest.raises(SchemeError, match="group_size must be a whole number, got None"):
            make(linear(), dtype="int4", group_size=None)


def test_fused_transformer_layers_still_work():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = encoder(x)
        torch.testing.assert_close(
            lowbit.quantize_model(encoder, "int8", group_size=32)(x), expected, rtol=0.05, atol=0.05
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layer_made_on_a_gpu_works_there_and_is_packed_when_it_moves_to_the_cpu():
    made = lowbit.Linear.from_linear(linear().cuda().half(), "int8", group_size=16)
    weight = made.quant_tensor().cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this version has no kernels for CUDA
        there = made(X.half().cuda()).cpu()
    made.cpu()
    assert made.layout == "cpu" and made.bias.device.type == "cpu" and made.quant_tensor() == weight
    torch.testing.assert_close(made(X.half()), there, rtol=5e-3, atol=5e-3)
    assert made.cuda().quant_tensor() == weight


@pytest.mark.parametrize("tool", ["parametrize", "prune"])
def test_a_bias_that_another_tool_computes_is_used(tool):
    made, x = layer(), torch.randn(2, 96)
    plain = made(x) - made.bias
    if tool == "parametrize":
        parametrize.register_parametrization(made, "bias", nn.Softplus())
    else:
        prune.l1_unstructured(made, "bias", amount=30)
        assert (made.bias == 0).sum() == 30
    assert "bias" not in made._parameters
    torch.testing.assert_close(made(x), plain + made.bias)
