"""The shipped checkpoint and `lowbit demo`: relations that must hold on real text, and what bad input is told.

No absolute quality and no time is asserted. The oracle of the kernels' path is a float model whose weights are the
slow reference's reading of the quantized ones.
"""

import argparse
import copy
import json
import shutil

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the demo needs the extra hf")

import lowbit  # noqa: E402
from lowbit import reference  # noqa: E402
from lowbit.cli import main  # noqa: E402
from lowbit.commands import demo  # noqa: E402
from lowbit.commands.corpus import CHECKPOINT, HELD_OUT, sentences  # noqa: E402
from lowbit.commands.measure import CausalMeter, EncoderMeter, load, size_as_saved  # noqa: E402
from lowbit.commands.progress import Progress  # noqa: E402

BITS = (8, 4, 3, 2, 1)
LINEARS = 28  # 4 layers x (q, k, v, o, gate, up, down)


def arguments(*words) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.fixture(scope="module")
def shipped():
    return load(CHECKPOINT, "causal")


@pytest.fixture(scope="module")
def meter(shipped):
    return CausalMeter(*shipped, HELD_OUT.read_bytes()[:12_000].decode())


@pytest.fixture(scope="module")
def rows(shipped, meter):
    """Bits -> what the demo measures; 0 is the float model."""
    model, found = shipped[0], {}
    found[0] = meter.quality(model, None, Progress(1))
    for bits in BITS:
        quantized = copy.deepcopy(model)
        lowbit.quantize_model(quantized, f"int{bits}", group_size=64, method="mse", skip=["lm_head"])
        found[bits] = {**meter.quality(quantized, model, Progress(1)), **size_as_saved(quantized, 2)}
    return found


def test_the_checkpoint_is_small_and_loads_with_plain_transformers():
    files = [path for path in CHECKPOINT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
    assert model.dtype == torch.float16
    raw = HELD_OUT.read_bytes()
    assert tokenizer(raw.decode(), add_special_tokens=False)["input_ids"] == list(raw)
    assert tokenizer.decode(list(raw)) == raw.decode()


def test_the_checkpoint_is_trained(shipped, meter, rows):
    # An untrained model pays 8 bits a byte; this loop shares no code with the meter.
    model, tokenizer = shipped
    text = HELD_OUT.read_bytes()[:12_000].decode()
    ids, total = [12, *text.encode()], 0.0
    for start in range(0, len(ids) - 1, 256):
        window = torch.tensor([ids[start : start + 257]])
        with torch.no_grad():
            log_p = torch.log2(torch.softmax(model(window[:, :-1]).logits.double(), -1))
        total -= sum(float(log_p[0, i, token]) for i, token in enumerate(window[0, 1:].tolist()))
    assert rows[0]["bits_a_byte"] == pytest.approx(total / (len(ids) - 1), abs=1e-4)
    assert rows[0]["bits_a_byte"] < 2.5


def test_eight_bits_are_as_good_as_float(rows):
    assert abs(rows[8]["bits_a_byte"] - rows[0]["bits_a_byte"]) < 1e-3


def test_fewer_bits_never_come_closer_to_float(rows):
    distances = [rows[bits]["kl"] for bits in BITS]
    assert distances == sorted(distances)
    assert 0 <= distances[0] < 1e-3 < distances[-1]
    agreement = [rows[bits]["same"] for bits in BITS]
    assert agreement == sorted(agreement, reverse=True)


@pytest.mark.parametrize("bits", [4, 1])
def test_the_kernels_compute_what_the_reference_reads(shipped, meter, rows, bits):
    plain = copy.deepcopy(shipped[0])
    replaced = 0
    for name, module in plain.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            quantized = lowbit.quantize(module.weight.data, f"int{bits}", group_size=64, method="mse")
            module.weight.data = reference.dequantize(quantized, torch.float32)
            replaced += 1
    assert replaced == LINEARS
    expected = meter.quality(plain, shipped[0], Progress(1))
    assert abs(expected["bits_a_byte"] - rows[bits]["bits_a_byte"]) < 1e-3
    assert abs(expected["kl"] - rows[bits]["kl"]) < 1e-4


def test_predictions_too_large_to_keep_are_made_again(shipped, meter, rows):
    small = CausalMeter(*shipped, HELD_OUT.read_bytes()[:2000].decode())
    quantized = lowbit.quantize_model(copy.deepcopy(shipped[0]), "int2", group_size=64)
    small.quality(shipped[0], None, Progress(1))
    kept = small.quality(quantized, shipped[0], Progress(1))
    small.keep, small.float_log_p = False, []
    assert small.quality(quantized, shipped[0], Progress(1)) == pytest.approx(kept, rel=1e-5)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_tokens_are_timed_with_a_cache_that_transformers_knows(shipped, meter):
    assert meter.speed(shipped[0]) > 0


def test_the_size_counts_codes_and_scales_once(shipped, rows):
    weights = sum(p.numel() for n, p in shipped[0].named_parameters() if "proj" in n)
    others = sum(p.numel() for n, p in shipped[0].named_parameters() if "proj" not in n)  # tied: the embedding once
    for bits in BITS:
        assert rows[bits]["linear_weights"] == weights
        assert rows[bits]["linear_bytes"] == weights * bits // 8 + weights // 64 * 2
        assert rows[bits]["total_bytes"] == rows[bits]["linear_bytes"] + 2 * others


def test_the_command_prints_the_table_and_writes_json(tmp_path, capsys):
    target = tmp_path / "table.json"
    words = ("--dtype", "uint4,float4_e2m1", "--bytes", 2000, "--json", target, "--threads", 1, "--group-size", 32)
    threads = torch.get_num_threads()
    assert main(["demo", *map(str, words)]) == 0
    assert torch.get_num_threads() == threads
    printed = capsys.readouterr().out
    report = json.loads(target.read_text())
    assert [row["type"] for row in report["rows"]] == ["float", "uint4", "float4_e2m1"]
    assert [row["bits_a_weight"] for row in report["rows"]] == [16.0, 5.0, 4.5]
    for row in report["rows"]:
        assert row["rate"] > 0
        assert f"{row['bits_a_byte']:.4f}" in printed
    assert report["text"]["bytes"] == 2000 and report["group_size"] == 32 and report["environment"]["threads"] == 1
    assert list(tmp_path.iterdir()) == [target]


def small_encoder(folder):
    """An untrained BERT of one layer with the byte tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.BertConfig(vocab_size=256, max_position_embeddings=64, initializer_range=0.3, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.pad_token = "Ā"  # how byte-level tokenizers write byte 0
    tokenizer.save_pretrained(folder)


def test_an_encoder_is_compared_by_its_embeddings(tmp_path):
    small_encoder(tmp_path)
    report = demo.measure(arguments("--model", tmp_path, "--bits", "8,4,2", "--bytes", 20_000))
    table = {row["type"]: row for row in report["rows"]}
    cosines = [table[name]["cosine"] for name in ("int8", "int4", "int2")]
    assert 0.999 < cosines[0] <= 1.0001 and cosines == sorted(cosines, reverse=True)
    assert all(table[name]["worst"] <= table[name]["cosine"] for name in ("int8", "int4", "int2"))
    assert "cosine" in demo.render(report)


def test_an_embedding_does_not_depend_on_the_padding_of_its_batch(tmp_path):
    small_encoder(tmp_path)
    model, tokenizer = load(tmp_path, "encoder")
    together = EncoderMeter(model, tokenizer, HELD_OUT.read_bytes()[:4000].decode())
    rows = together.embed(model, together.batches)
    assert len(rows) >= 8 and not bool(together.batches[0]["attention_mask"].all())
    for i, mask in enumerate(together.batches[0]["attention_mask"]):
        alone = {name: t[i : i + 1, : int(mask.sum())] for name, t in together.batches[0].items()}
        assert torch.allclose(together.embed(model, [alone])[0], rows[i], atol=1e-5)


def test_sentences_are_whole_and_different():
    text = "A first sentence that is long enough to be kept here. " * 3 + "\n\nshort one.\f"
    text += " ".join(f"Sentence number {i} goes over\ntwo lines and ends here." for i in range(9))
    found = sentences(text, 9)
    assert found[0] == "A first sentence that is long enough to be kept here."
    assert found[1] == "Sentence number 0 goes over two lines and ends here." and len(found) == 9


def broken_checkpoint(folder, kind):
    if kind == "missing":
        return folder / "nothing"
    if kind == "empty":
        return folder
    shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if kind == "no json":
        config.write_text("{")
    elif kind == "no weights":
        weights.unlink()
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:1_000_000])
    elif kind == "tensor missing":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        del tensors["model.layers.2.mlp.up_proj.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif kind == "quantized":
        config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"bits": 4}}))
    return folder


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("missing", "does not exist"),
        ("empty", "no readable config.json"),
        ("no json", "not JSON"),
        ("no weights", "safetensors"),
        ("truncated", "does not load"),
        ("tensor missing", "model.layers.2.mlp.up_proj.weight"),
        ("quantized", "already quantized"),
    ],
)
def test_a_bad_checkpoint_gets_one_sentence_and_code_2(tmp_path, capsys, kind, expected):
    folder = broken_checkpoint(tmp_path, kind)
    assert main(["demo", "--model", str(folder), "--bytes", "2000"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1
    assert expected in shown.err and str(folder) in shown.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--bits", "4,9"), "1 to 8"),
        (("--bits", ""), "1 to 8"),
        (("--dtype", "int9"), "int9"),
        (("--group-size", "48"), "48"),
        (("--method", "magic"), "magic"),
        (("--bytes", "10"), "at least 1000"),
        (("--threads", "0"), "at least 1"),
        (("--text", "no/such/file"), "no/such/file"),
        (("--text", CHECKPOINT / "model.safetensors"), "UTF-8"),
        (("--json", "no/such/folder/x.json"), "no/such/folder"),
    ],
)
def test_a_bad_option_gets_one_sentence_and_code_2(capsys, words, expected):
    assert main(["demo", *map(str, words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.splitlines()[-1].startswith("lowbit demo: ") and expected in shown.err


def test_without_transformers_the_demo_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert main(["demo", "--bytes", "2000"]) == 2
    assert "pip install 'lowbit[hf]'" in capsys.readouterr().err
