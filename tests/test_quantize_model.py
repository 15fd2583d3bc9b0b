"""Risk: quantize_model changes layers nobody named, misses some, or leaves a model half changed."""

import warnings

import pytest
import torch
from torch import nn

import lowbit
from lowbit import DtypeError, QuantizationError, SchemeError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down_proj(torch.relu(self.up_proj(x)))


class Net(nn.Module):
    """A small language model: embedding, twelve blocks, an output layer."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.lm_head = nn.Linear(32, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


TOKENS = torch.arange(10).view(2, 5)


def net(**options):
    torch.manual_seed(0)
    return Net(**options)


def types(model):
    """Name -> weight type, for every Linear; None for a float one."""
    return {
        name: module.scheme.weight.name if isinstance(module, lowbit.Linear) else None
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


def fingerprint(model):
    return {name: (id(module), type(module)) for name, module in model.named_modules()}, model(TOKENS)


def test_every_linear_but_the_head():
    model = net()
    before = model(TOKENS)
    assert lowbit.quantize_model(model, "int8", group_size=32) is model
    found = types(model)
    assert found.pop("lm_head") is None and set(found.values()) == {"int8"} and len(found) == 24
    torch.testing.assert_close(model(TOKENS), before, rtol=0.05, atol=0.05)
    assert all(m.layout == "cpu" for m in model.modules() if isinstance(m, lowbit.Linear))
    canonical = lowbit.quantize_model(net(), "int8", group_size=32, prepare=False)
    assert all(m.layout is None for m in canonical.modules() if isinstance(m, lowbit.Linear))
    assert torch.equal(lowbit.prepare(canonical)(TOKENS), model(TOKENS))


def test_dynamic_settings_choose_by_name_or_expression():
    dynamic = {
        r"\.down_proj$": {"dtype": "uint3", "group_size": 16, "zero_kind": "min"},
        "layers.1": None,
        "lm_head": {"act": "int8"},
    }
    model = lowbit.quantize_model(net(), "int4", group_size=32, method="rtn", skip=[r"layers\.2\.up"], dynamic=dynamic)
    found = types(model)
    assert found["layers.3.up_proj"] == "int4" and found["layers.3.down_proj"] == "uint3"
    assert found["layers.1.up_proj"] is None  # a dotted part of the name
    assert found["layers.1.down_proj"] == "uint3"  # the earlier entry wins
    assert found["layers.11.up_proj"] == found["layers.10.up_proj"] == "int4"  # which layers.1 is no part of
    assert found["layers.2.up_proj"] is None and found["layers.2.down_proj"] == "uint3"
    assert found["lm_head"] == "int4" and model.lm_head.act == "int8" and model.layers[3].up_proj.act is None
    down = model.layers[3].down_proj
    assert (down.scheme.group_size, down.scheme.zero_kind) == (16, "min")


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"dtype": "int9"}, SchemeError, "int9"),
        ({"group_size": 48}, SchemeError, "got 48"),
        ({"method": "best"}, SchemeError, "best"),
        ({"act": "int9"}, SchemeError, "int9"),
        ({"skip": ["lm_heads"]}, SchemeError, "skip entry 'lm_heads' matches no nn.Linear; near: lm_head"),
        ({"skip": ["("]}, SchemeError, "is not a regular expression"),
        ({"skip": [3]}, DtypeError, "names or regular expressions, got int"),
        ({"skip": 5}, DtypeError, "skip must be names or regular expressions, got int"),
        ({"method": ["mse"]}, SchemeError, "method must be the name of one, got ['mse']"),
        ({"progress": 5}, DtypeError, "progress must be a function or None, got int"),
        ({"dynamic": {"layers.12": None}}, SchemeError, "dynamic entry 'layers.12' matches no"),
        ({"dynamic": {"layers.3": {"bits": 3}}}, SchemeError, "no setting 'bits'"),
        ({"dynamic": {"layers.3": "int3"}}, DtypeError, "must be settings or None, got str"),
        ({"dynamic": ["layers.3"]}, DtypeError, "got list"),
        ({"dynamic": {"layers.11.down_proj": {"dtype": "uint3", "group_size": 7}}}, SchemeError, "layers.11.down_proj"),
        ({"skip": ["layers", "lm_head"]}, SchemeError, "nn.Linear to quantize, got none: the model has 25"),
    ],
)
def test_bad_settings_change_nothing(options, error, words):
    model = net()
    before, y = fingerprint(model)
    with pytest.raises(error) as caught:
        lowbit.quantize_model(model, **{"dtype": "int4", "group_size": 32, "method": "rtn", **options})
    assert words in str(caught.value) and "\n" not in str(caught.value)
    after, z = fingerprint(model)
    assert after == before and torch.equal(y, z)


def test_hooks_that_are_lost_are_named():
    model = net()
    model.layers[3].up_proj.register_forward_hook(lambda *_: None)
    model.lm_head.register_forward_pre_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"hooks of layers\.3\.up_proj are gone"):
        lowbit.quantize_model(model, "int4", group_size=32, skip="lm_head")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowbit.quantize_model(net(), "int4", group_size=32, skip=None)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_bad_weight_in_the_last_layer_changes_nothing_and_is_named(poison):
    model = net()
    with torch.no_grad():
        model.layers[11].down_proj.weight[3, 3] = poison
    before = fingerprint(model)[0]
    with pytest.raises(QuantizationError, match=r"^layers\.11\.down_proj: .*finite"):
        lowbit.quantize_model(model, "int4", group_size=32)
    assert fingerprint(model)[0] == before


def test_interruption_changes_nothing():
    model = net()
    before = fingerprint(model)[0]

    def interrupt(done, total, name):
        assert total == 24 and name.startswith("layers.")
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lowbit.quantize_model(model, "int4", group_size=32, method="rtn", progress=interrupt)
    assert fingerprint(model)[0] == before


def test_tied_output_layer_stays_tied_and_is_named():
    model = net(tied=True)
    with pytest.warns(UserWarning, match="lm_head stays as it is: its weight is also that of embed"):
        lowbit.quantize_model(model, "int4", group_size=32, skip=[])
    assert model.lm_head.weight is model.embed.weight and types(model)["layers.0.up_proj"] == "int4"


def test_module_used_in_several_places_is_quantized_once():
    model = net()
    model.layers[5].up_proj = model.layers[4].up_proj
    lowbit.quantize_model(model, "int4", group_size=32, method="rtn")
    assert isinstance(model.layers[4].up_proj, lowbit.Linear) and model.layers[5].up_proj is model.layers[4].up_proj
    # Left alone under one of its names, left alone.
    model = net()
    model.layers[5].up_proj = model.layers[4].up_proj
    lowbit.quantize_model(model, "int4", group_size=32, method="rtn", skip=["layers.5.up_proj"])
    assert type(model.layers[4].up_proj) is nn.Linear and model.layers[5].up_proj is model.layers[4].up_proj


def test_only_plain_linear_layers_are_replaced():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(32, 8), nn.Bilinear(8, 8, 8), nn.MultiheadAttention(32, 4), nn.Linear(8, 8))
    lowbit.quantize_model(model, "int4", group_size=32)
    assert type(model[0]) is Special and type(model[3]) is lowbit.Linear
    assert not isinstance(model[2].out_proj, lowbit.Linear)
    with pytest.raises(SchemeError, match="got none: the model has 0"):  # what is quantized already stays
        lowbit.quantize_model(model, "int8")
    with pytest.raises(SchemeError, match="got one itself"):
        lowbit.quantize_model(nn.Linear(4, 4))
    with pytest.raises(DtypeError, match="expected an nn.Module, got list"):
        lowbit.quantize_model([nn.Linear(4, 4)])


def test_training_flag_and_float_type_are_kept():
    model = lowbit.quantize_model(net().bfloat16().eval(), "int4", group_size=32)
    layer = model.layers[0].up_proj
    assert not layer.training and layer.bias.dtype == layer.weight.dtype == layer.scales.dtype == torch.bfloat16
    assert model(TOKENS).dtype == torch.bfloat16
