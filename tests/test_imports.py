"""Risk: rooms that reach back into each other, a slow `import lowbit`, a module that hides a public function."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lowbit

ROOT = Path(__file__).parents[1]
PACKAGE = Path(lowbit.__file__).parent  # the source tree's, or that of an installed wheel

#: Rooms, one level a line: a module imports its own room and the levels before, never a neighbour of its level.
LEVELS = (
    ("errors",),
    ("env",),
    ("extension",),
    ("dtypes",),
    ("scheme", "epilogue"),
    ("tensor",),
    ("quantizers", "reference"),
    ("pack",),
    ("autotune",),
    ("ops",),
    ("nn", "graphs"),
    ("checkpoint",),
    ("commands",),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
#: Modules that live in the room of another.
SAME_ROOM = {"cli": "commands", "__main__": "commands", "convert_model": "checkpoint", "fused": "nn", "fusing": "nn"}
SAME_ROOM |= dict.fromkeys(("bit_stream", "tensor_checks", "tensor_contents", "narrow_scales"), "tensor")
SAME_ROOM |= dict.fromkeys(("libraries", "cuda_devices", "kernel_list"), "extension")
SAME_ROOM |= dict.fromkeys(("weight_holder", "placeholder", "preparing", "tuning", "graph_timer"), "nn")
#: Imports of a later room that are allowed inside a function, because they happen only when it is called.
WHEN_CALLED = {("tensor.py", "checkpoint")}  # QuantTensor.save and load
PUBLIC = (
    "quantize pack_weight matmul Linear quantize_model prepare fuse unfuse quantize_checkpoint from_pretrained tune "
    "info selftest"
)


def room(module: str) -> str:
    """The room of a dotted module name below ``lowbit``."""
    first = module.split(".")[0]
    return SAME_ROOM.get(first, first)


def imports(path: Path, package: list[str]):
    """(dotted name, inside a function?) for every import of a file that lies in ``package``."""
    tree = ast.parse(path.read_text(), path.name)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, id(node) in inside) for name in names)


def breaches(path: Path, root: Path = PACKAGE) -> list[str]:
    """What a file of lowbit imports against the rules."""
    relative = path.relative_to(root).with_suffix("")
    package = ["lowbit", *relative.parts[:-1]]
    mine, found = room(relative.parts[0]), []
    for name, inside in imports(path, package):
        if name.split(".")[0] == "generator":
            found.append(f"{relative} imports {name}: the generator is not part of the package")
        if name.split(".")[0] != "lowbit":
            continue
        target = room(name.removeprefix("lowbit").removeprefix(".")) or "lowbit"
        if relative.parts == ("__init__",):
            allowed = inside or target in ("errors", "env")
        elif target == "__version__":
            allowed = True
        elif target not in LEVEL:  # a public name of the package itself, which may stand for any room
            allowed = inside and mine == "commands"
        else:
            allowed = target == mine or LEVEL[target] < LEVEL[mine]
            allowed = allowed or (inside and (relative.name + ".py", target) in WHEN_CALLED)
        if not allowed:
            found.append(f"{relative} imports {name}")
    return found


def test_every_module_has_a_room():
    top = {p.stem for p in PACKAGE.glob("*.py")} | {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    strangers = {name for name in top - {"__init__", "data"} if room(name) not in LEVEL}
    assert not strangers, f"give {strangers} a level in this test, and in the picture of the rooms"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    assert not breaches(path)


@pytest.mark.parametrize(
    "where, line, refused",
    [
        ("scheme.py", "from .tensor import QuantTensor", True),
        ("scheme.py", "from .epilogue import EPILOGUES", True),
        ("scheme.py", "import lowbit.tensor", True),
        ("tensor.py", "from . import pack", True),
        ("pack/layout.py", "from ..ops import launch", True),
        ("pack/layout.py", "from .. import quantize", True),
        ("tensor.py", "from .checkpoint.native import save", True),
        ("tensor.py", "def f():\n    from .checkpoint.native import save", False),
        ("nn.py", "def f():\n    from .checkpoint.native import save", True),
        ("ops/launch.py", "from generator import naming", True),
        ("__init__.py", "from .tensor import QuantTensor", True),
        ("pack/layout.py", "from ..dtypes import weight_type\nfrom . import packed\nimport torch", False),
        ("cli.py", "from . import __version__", False),
        ("cli.py", "from . import quantize", True),
        ("commands/demo.py", "def f():\n    from .. import quantize", False),
    ],
)
def test_the_rules_are_really_judged(where, line, refused, tmp_path):
    path = tmp_path / where
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    assert bool(breaches(path, tmp_path)) == refused


def test_the_generator_reads_only_the_lists():
    for path in (ROOT / "generator").glob("*.py"):
        for name, _ in imports(path, ["generator"]):
            first, *rest = name.split(".")
            assert first in {"lowbit", "generator"} | sys.stdlib_module_names, f"{path.name} imports {name}"
            if first == "lowbit":
                assert rest and rest[0] in {"dtypes", "scheme", "epilogue", "errors"}, f"{path.name} imports {name}"


@pytest.mark.parametrize("module", ["lowbit", "lowbit.scheme", "generator.__main__"])
def test_it_imports_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr or f"{module} imported torch"


def test_no_module_hides_a_public_function():
    """Importing ``lowbit.x`` binds the name x in the package: it would replace the function x."""
    names = {p.stem for p in PACKAGE.iterdir()}
    assert not names & set(PUBLIC.split())
