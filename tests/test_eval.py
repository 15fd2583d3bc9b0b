"""Risk: `lowbit eval` that prints a wrong number, compares models that do not compare, or fails without a sentence."""

import json
import math
import shutil

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="eval needs the extra hf")

from lowbit.cli import main  # noqa: E402
from lowbit.commands.corpus import CHECKPOINT, HELD_OUT  # noqa: E402
from lowbit.commands.evaluation import calibration_tokens, evaluate, load_causal  # noqa: E402

BYTES = 3000


@pytest.fixture(scope="module")
def shipped():
    return load_causal(CHECKPOINT, torch.float32)


def slow(model, data: bytes, window: int):
    """(bits, log probabilities in bits of every next byte) of a text, one window after the other, float64."""
    ids, bits, rows = [12, *data], 0.0, []
    for start in range(0, len(data), window):
        part = torch.tensor([ids[start : start + window + 1]])
        with torch.no_grad():
            log_p = torch.log2(torch.softmax(model(part[:, :-1]).logits[0].double(), -1))
        bits -= float(log_p.gather(1, part[0, 1:, None]).sum())
        rows.append(log_p)
    return bits, torch.cat(rows)


def test_the_numbers_are_those_of_a_slow_loop(shipped, tmp_path, capsys):
    target = tmp_path / "eval.json"
    words = ["--bytes", BYTES, "--window", 100, "--dtype", "int2", "--group-size", 64, "--json", target, "--threads", 1]
    threads = torch.get_num_threads()
    assert main(["eval", "byte_llama", *map(str, words)]) == 0
    assert torch.get_num_threads() == threads and list(tmp_path.iterdir()) == [target]
    printed, report = capsys.readouterr().out, json.loads(target.read_text())
    plain, row = report["rows"]
    data = HELD_OUT.read_bytes()[:BYTES]

    import copy

    import lowbit

    model = shipped[0]
    quantized = lowbit.quantize_model(copy.deepcopy(model), "int2", group_size=64)
    for found, measured in ((plain, model), (row, quantized)):
        bits, _ = slow(measured, data, 100)
        assert found["bits_a_byte"] == pytest.approx(bits / BYTES, rel=1e-4)
        assert found["perplexity"] == pytest.approx(2 ** (bits / BYTES), rel=1e-4)
        assert f"{found['bits_a_byte']:.4f}" in printed and f"{found['perplexity']:.3f}" in printed
        assert found["rate"] > 0 and found["tokens"] == BYTES and found["window"] == 100
    p, q = slow(model, data, 100)[1], slow(quantized, data, 100)[1]
    assert row["kl"] == pytest.approx(float((p.exp2() * (p - q)).sum()) / BYTES, rel=1e-3)
    assert row["same"] == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()), abs=2 / BYTES)
    assert "kl" not in plain and row["bits_a_weight"] == 2.25
    assert row["linear_bytes"] == row["linear_weights"] * 2.25 / 8


def test_a_reference_is_measured_beside(shipped, tmp_path, capsys):
    model, tokenizer = shipped
    other = tmp_path / "other"
    changed = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    with torch.no_grad():
        changed.model.norm.weight *= 0.5
    changed.save_pretrained(other)
    tokenizer.save_pretrained(other)
    assert main(["eval", str(other), "--reference", "byte_llama", "--bytes", str(BYTES)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split()[0] == "byte_llama" or "byte_llama" in lines[5]
    both = [("a", model, CHECKPOINT), ("b", changed.float(), CHECKPOINT)]
    rows = evaluate(both, tokenizer, HELD_OUT.read_bytes()[:BYTES].decode())
    assert rows[1]["kl"] > 0.01 and rows[1]["perplexity"] > rows[0]["perplexity"] > 1
    assert math.isclose(rows[0]["total_bytes"], sum(2 * p.numel() for p in model.parameters()))


def test_calibrated_methods_need_a_text(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(HELD_OUT.read_bytes()[60_000:70_000])
    words = ["--bytes", "2000", "--dtype", "int3", "--group-size", "64", "--threads", "1"]
    assert main(["eval", "byte_llama", *words, "--method", "gptq", "--calibration", str(text)]) == 0
    assert "method gptq" in capsys.readouterr().out
    assert main(["eval", "byte_llama", *words, "--method", "gptq"]) == 2
    assert "gptq without it" in capsys.readouterr().err
    assert main(["eval", "byte_llama", *words, "--calibration", str(text)]) == 2
    assert "mse with it" in capsys.readouterr().err


def test_calibration_samples_are_the_same_for_a_seed(shipped):
    ids = list(range(256)) * 40
    one, two, other = (calibration_tokens(ids, shipped[0], samples=9, length=64, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other) and one.shape == (9, 64)
    whole = calibration_tokens(ids, shipped[0])
    assert whole.shape == (40, 256)  # as long as the model reads, as many as there are
    assert sorted(whole.flatten().tolist()) == sorted(ids)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("no/such/folder",), "does not exist"),
        (("byte_llama", "--bytes", "10"), "--bytes must be at least 1000"),
        (("byte_llama", "--window", "1"), "--window must be at least 2"),
        (("byte_llama", "--threads", "0"), "--threads must be at least 1"),
        (("byte_llama", "--text", "no/such/file"), "no/such/file"),
        (("byte_llama", "--dtype", "int9"), "int9"),
        (("byte_llama", "--method", "rtn"), "--method and --calibration go with --dtype, which is missing"),
        (("byte_llama", "--group-size", "64"), "go with --dtype, which is missing"),
        (("byte_llama", "--dtype", "int4", "--group-size", "48"), "48"),
        (("byte_llama", "--dtype", "int4", "--method", "magic"), "magic"),
        (("byte_llama", "--dtype", "int4", "--reference", "byte_llama"), "got both"),
        (("byte_llama", "--device", "nowhere"), "--device nowhere cannot be used"),
        (("byte_llama", "--device", "meta"), "--device meta cannot be used"),
        (("byte_llama", "--json", "no/such/folder/x.json"), "no/such/folder"),
    ],
)
def test_a_bad_option_gets_one_sentence_and_code_2(capsys, words, expected):
    assert main(["eval", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.splitlines()[-1].startswith("lowbit eval: ") and expected in shown.err
    assert len(shown.err.splitlines()) == 1


def test_models_that_read_other_tokens_are_refused(tmp_path, capsys):
    shutil.copytree(CHECKPOINT, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    rules = json.loads(path.read_text())
    rules["model"]["vocab"] = {token: 255 - i for token, i in rules["model"]["vocab"].items()}
    path.write_text(json.dumps(rules))
    assert main(["eval", "byte_llama", "--reference", str(tmp_path / "other"), "--bytes", "2000"]) == 2
    assert "other tokens" in capsys.readouterr().err
