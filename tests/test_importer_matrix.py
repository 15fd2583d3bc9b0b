"""Risk: the page says that a format is read exactly and it is not, or leaves one out."""

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis", reason="the writers of GGUF need the extra test")

from formats import cases  # noqa: E402

from lowbit.checkpoint.formats import FORMATS  # noqa: E402

ROOT = Path(__file__).parent.parent
SCRIPT, PAGE = ROOT / "examples" / "importer_matrix.py", ROOT / "docs" / "formats.md"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("importer_matrix", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_is_measured(script):
    table = PAGE.read_text(encoding="utf-8").split(script.BEGIN)[1].split(script.END)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    made = [list(row) for row in script.rows(cases.cases())]
    assert lines[0] == list(script.HEAD)
    # Why not the last column: it takes libraries that need not be installed.
    assert [line[:-1] for line in lines[2:]] == [row[:-1] for row in made]
    assert {"exact", "-"} == {line[-1] for line in lines[2:]} and {row[-1] for row in made} <= {"exact", "-"}
    for form, layout, _, becomes, stated, _ in made:
        if (form, layout) == ("compressed-tensors", "nvfp4"):  # 1 / global is rounded to float32
            assert float(stated) <= 2.0**-24
        else:
            assert stated == "exact" or becomes == "refused"


def test_no_format_is_left_out():
    named = {case.format.lower().replace("gpt-oss", "mxfp4") for case in cases.cases()}
    assert {kind.name.replace("auto-round", "autoround") for kind in FORMATS} | {"gguf"} == named


def test_a_wrong_value_is_a_number_and_not_exact(script):
    case = next(case for case in cases.cases() if case.format == "AWQ")
    case.expected = case.expected.clone()
    case.expected[3, 5] += float(case.expected.abs().max()) / 1024
    assert script.measured(case)[1] in ("9.8e-04", "1.0e-03")
