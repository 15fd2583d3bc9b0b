"""The README must not drift: its tables come from the one list, and its examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit import env

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def between(name: str) -> str:
    return README.split(f"<!-- {name}:begin -->\n")[1].split(f"<!-- {name}:end -->")[0].strip()


def test_the_support_table_is_the_generators():
    command = [sys.executable, "-m", "generator", "--table"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert between("support-table") == printed.strip()


def test_the_environment_table_is_that_of_env():
    assert between("environment") == env.table().strip()


def test_the_example_runs(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    example = re.search(r"## Use\n```python\n(.*?)```", README, re.DOTALL)[1]
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["y"].shape == (8, 4096)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_and_named_files_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    # Why: the tests also run against an installed wheel, in a tree without lowbit/.
    missing = [link for link in links if not link.startswith("lowbit/") and not (ROOT / link).exists()]
    assert links and not missing
