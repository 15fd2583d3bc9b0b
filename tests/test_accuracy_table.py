"""Risk: outliers that change the float model, or a committed page that its script no longer makes."""

import copy
import importlib.util
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the table needs the extra hf")

from lowbit.commands.corpus import CHECKPOINT  # noqa: E402
from lowbit.commands.evaluation import load_causal  # noqa: E402

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "accuracy_table.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("accuracy_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_outliers_are_large_and_keep_the_function(script):
    model, _ = load_causal(CHECKPOINT, torch.float32)
    loud, seen = copy.deepcopy(model), []
    script.inject_outliers(loud)
    ids = torch.arange(200)[None]
    for m in (model, loud):
        m.model.layers[2].input_layernorm.register_forward_hook(
            lambda module, args, y: seen.append(y.abs().amax((0, 1)))
        )
    plain = model(ids).logits
    torch.testing.assert_close(loud(ids).logits, plain, rtol=1e-3, atol=1e-3)
    ratio = seen[1] / seen[0]
    assert int((ratio > 29).sum()) == script.CHANNELS and int((ratio < 1.1).sum()) == len(ratio) - script.CHANNELS


def test_the_script_makes_its_page(script, tmp_path, monkeypatch):
    target, threads = tmp_path / "page.md", torch.get_num_threads()
    target.write_text(
        "# Old\n\n## byte_llama: old rows\n\n| gone |\n\n## other: 9 M parameters\n\n### 8 bits\n\n| kept |\n"
    )
    monkeypatch.setattr(script, "METHODS", ("rtn", "hadamard + mse"))
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(target), "--bytes", "2000", "--bits", "8"])
    script.main()
    torch.set_num_threads(threads)
    assert list(tmp_path.iterdir()) == [target]
    text = target.read_text()
    rows = re.findall(r"^\| (u?int8) \| (.*?) \| ([+-][\d.]+) \| ([\d.]+) \|", text, re.M)
    assert [row[:2] for row in rows] == [(t, m) for t in ("int8", "uint8") for m in ("rtn", "hadamard + mse")]
    assert all(float(row[3]) < 1e-3 for row in rows)
    assert text.endswith("\n\n## other: 9 M parameters\n\n### 8 bits\n\n| kept |\n"), "another model's section is lost"
    assert text.startswith(script.HEAD) and "gone" not in text and text.count("## byte_llama: 1.33 M parameters\n") == 1


def test_the_committed_page_has_every_method_and_width_of_each_model(script):
    head, *models = re.split(r"^(?=## )", (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8"), flags=re.M)
    assert head == script.HEAD + "\n" and models[0].startswith("## byte_llama: 1.33 M parameters\n")
    for text in models:
        for method in script.METHODS:
            for bits in (8, 4, 3, 2):
                for kind in ("int", "uint"):
                    assert f"| {kind}{bits} | {method} |" in text
