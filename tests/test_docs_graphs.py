"""Risk: an example of docs/graphs.md that does not run, or no longer says what happens."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

PAGE = (Path(__file__).parents[1] / "docs" / "graphs.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
def test_every_example_of_the_page_runs_in_its_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    names, examples = {}, re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 6
    packaged = CUDA_HOME is not None or not torch.cuda.is_available()
    for example in examples if packaged else examples[:-1]:
        exec(compile(example, "docs/graphs.md", "exec"), names)
    said = re.search(r"print\(error\) +# (.*)", PAGE).group(1)
    assert capsys.readouterr().out.strip() == said
    assert names["y"].shape == (3, 256) and not torch.equal(names["kept"][:3], names["y"])
    assert (tmp_path / "model.pt2").is_file() and (tmp_path / "package.pt2").is_file() == packaged
    torch._dynamo.reset()
    if not packaged:
        pytest.skip("the last example needs the headers of a CUDA toolkit (CUDA_HOME)")
