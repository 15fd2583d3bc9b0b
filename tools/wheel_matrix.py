"""Installs one wheel under many Pythons and torches and runs tests/smoke.py in each: the table of docs/wheel.md.

    python -m tools.wheel_matrix dist/lowbit-*.whl [--case 3.12:2.10.0 ...]

A case is PYTHON:TORCH. Each gets a fresh virtual environment, deleted afterwards (a CUDA torch takes 7 GB of disk while
its case runs). Pythons are looked for on PATH, then among pyenv's. Prints one row a case; exits with 1 if one fails.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = ("3.10:2.13.0", "3.11:2.13.0", "3.12:2.13.0", "3.13:2.13.0", "3.12:2.10.0")


def interpreter(version: str) -> str | None:
    """A Python of a version such as 3.12, or None. pyenv's command on PATH may be a shim without a Python behind it."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [shutil.which(f"python{version}"), *sorted(map(str, root.glob(f"{version}.*/bin/python{version}")))]
    for path in filter(None, found):
        if subprocess.run([path, "-c", "import ssl, venv"], capture_output=True).returncode == 0:
            return path
    return None


def run_case(wheel: Path, python: str, torch: str) -> tuple[bool, str]:
    """(passed, the smoke test's line or the end of what went wrong)."""
    base = interpreter(python)
    if base is None:
        return False, f"no Python {python} found"
    with tempfile.TemporaryDirectory(prefix="lowbit-matrix-") as folder:
        own = Path(folder, "venv/bin/python")
        shutil.copy(ROOT / "tests/smoke.py", folder)
        pip = [str(own), "-m", "pip", "install", "-q", "--no-cache-dir", "--disable-pip-version-check"]
        for command in (
            [base, "-m", "venv", f"{folder}/venv"],
            [*pip, f"torch=={torch}", "numpy"],
            [*pip, "--no-deps", str(wheel.resolve())],
            [str(own), "smoke.py"],
        ):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                return False, f"{Path(command[-1]).name}: " + done.stderr.strip()[-600:]
        return True, done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--case", action="append", metavar="PYTHON:TORCH", help=f"default: {' '.join(CASES)}")
    args = parser.parse_args()
    failed = False
    print(f"{args.wheel.name}, {args.wheel.stat().st_size / 1000:.0f} kB")
    for case in args.case or CASES:
        passed, text = run_case(args.wheel, *case.split(":"))
        failed |= not passed
        print(f"| {datetime.date.today()} | {'passed' if passed else 'FAILED'} | {text} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
