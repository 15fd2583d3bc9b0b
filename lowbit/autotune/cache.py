"""Tables of measured times as files of a user: one for each kind of GPU, driver and build of the kernels.

    {"format": 1, "device": "NVIDIA H200", "driver": "580.65.06", "build": "ceb8b32aa1493e81",
     "rows": [["int4", "float16", 8192, 8192, 128, "none", [[17, 32, {"w4a16_gemm_sm90_n32": 14.41, ...}], ...]], ...]}

A row is a problem and, for each range of rows of x, microseconds by kernel. Nothing here asks CUDA for anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from .. import env
from ..errors import FormatError, LowbitError
from .problem import Problem, Span
from .tuner import Times

FORMAT = 1
Table = dict[Problem, dict[Span, Times]]
#: Larger files are none of lowbit's.
_MOST_BYTES = 64 << 20
_warned: set[Path] = set()


@dataclass(frozen=True)
class Machine:
    """What measured times are true for: a GPU's name, the version of its driver, and :func:`build_id`."""

    device: str
    driver: str
    build: str

    @property
    def file(self) -> str:
        words = ("tuned", self.device, self.driver, self.build)
        return "-".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-") for word in words) + ".json"


def folder() -> Path:
    """``LOWBIT_CACHE``, or lowbit's folder in ``XDG_CACHE_HOME`` or ~/.cache. Raises FileNotFoundError without home."""
    given = env.get("LOWBIT_CACHE")
    if given:
        return Path(given)
    # Why absolute: the specification says that other values of this variable are to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"))
    if not base.is_absolute():
        raise FileNotFoundError("there is no home folder; LOWBIT_CACHE names another one")
    return base / "lowbit"


def build_id(library: Path) -> str:
    """16 digits that change whenever the compiled kernels do: of the linker's digest of the library, which stands in
    its first bytes, or, without one, of its size and time.
    """
    with library.open("rb") as file:
        start = file.read(1 << 16)
    # The ELF note of type 3 by GNU: sizes of its name and of the digest, the type, the name, the digest.
    note = re.search(rb"\x04\0\0\0([\x08-\x40])\0\0\0\x03\0\0\0GNU\0", start)
    if note:
        return start[note.end() : note.end() + note[1][0]].hex()[:16]
    facts = library.stat()
    return f"{facts.st_size ^ facts.st_mtime_ns:016x}"[-16:]


def driver_version(proc: Path = Path("/proc/driver/nvidia/version"), cuda: str = "unknown") -> str:
    """Such as 580.65.06; where the kernel module does not tell, the version of CUDA that the driver has."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", proc.read_text(errors="replace"))
        if found:
            return found[0]
    return f"cuda {cuda}"


def read(path: Path, machine: Machine | None = None, device: str | None = None) -> Table:
    """The table of a file; an empty one, and one warning, where it is damaged or for another machine, and without a
    warning where there is none. machine, device: what the file must be for.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FormatError("it is too large")
        return parse(json.loads(path.read_text(encoding="utf-8")), machine, device)
    except FileNotFoundError:
        return {}
    # Why RecursionError: brackets in brackets, some thousand deep.
    except (OSError, ValueError, TypeError, LowbitError, RecursionError) as error:
        _warn(path, f"the tuned kernels in {path} are ignored: {error}")
        return {}


def of_machine(machine: Machine) -> Table:
    """What files of this user say about a machine; see :func:`read`."""
    try:
        return read(folder() / machine.file, machine)
    except FileNotFoundError:
        return {}


def parse(content, machine: Machine | None = None, device: str | None = None) -> Table:
    """The table in a file's content. Raises FormatError, or another LowbitError for types that do not exist."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FormatError(f"expected a table of format {FORMAT}, got {_short(content)}")
    expected = {"device": device} if machine is None else vars(machine)
    for name, value in expected.items():
        if content.get(name) != value:
            raise FormatError(f"expected {name} {value!r}, got {_short(content.get(name))}")
    table: Table = {}
    for row in _list(content.get("rows")):
        if len(_list(row)) != 7:
            raise FormatError(f"expected rows of 7 entries, got {_short(row)}")
        problem = Problem(*row[:6])
        reason = problem.why_not()
        if reason:
            raise FormatError(reason)
        table[problem] = dict(map(_span, _list(row[6])))
    return table


def _span(entry) -> tuple[Span, Times]:
    if len(_list(entry)) != 3:
        raise FormatError(f"expected the least and most rows of x and times, got {_short(entry)}")
    least, most, times = entry
    numbers = all(type(m) is int for m in (least, most)) and 1 <= least <= most < 1 << 31
    if not numbers or not isinstance(times, dict) or not times:
        raise FormatError(f"expected the least and most rows of x and times, got {_short(entry)}")
    for name, us in times.items():
        if not re.fullmatch(r"\w+", name, re.ASCII) or type(us) not in (int, float) or not 0 < us < 1e9:
            raise FormatError(f"expected a kernel and microseconds, got {_short((name, us))}")
    return (least, most), {name: float(us) for name, us in times.items()}


def _list(value) -> list:
    if not isinstance(value, list):
        raise FormatError(f"expected a list, got {_short(value)}")
    return value


def _short(value) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def render(table: Table, **about) -> str:
    """The content of a file, a line for each problem."""
    rows = [
        json.dumps(
            [*astuple(problem), [[*span, {k: round(us, 2) for k, us in t.items()}] for span, t in spans.items()]]
        )
        for problem, spans in sorted(table.items(), key=lambda item: astuple(item[0]))
    ]
    head = json.dumps({"format": FORMAT, **about})[:-1]
    return head + ', "rows": [\n' + ",\n".join(rows) + "\n]}\n"


def merge(*tables: Table) -> Table:
    """One table of all; where two know a range of the same problem, the later one's times."""
    made: Table = {}
    for table in tables:
        for problem, spans in table.items():
            made[problem] = {**made.get(problem, {}), **spans}
    return made


def add(machine: Machine, table: Table) -> Path | None:
    """Add times to the file of a machine, whatever other processes do meanwhile; the file. Where it can't be written:
    None, and one warning.
    """
    path = Path(machine.file)
    try:
        path = folder() / machine.file
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            try:
                unfinished.write_text(render(merge(read(path, machine), table), **vars(machine)), encoding="utf-8")
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
    except OSError as error:
        _warn(path, f"the tuned kernels are not kept for other processes: {error}")
        return None
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Why a file of its own: the table's is replaced, and a lock on the old one would keep nobody away.
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _warn(path: Path, text: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(text, stacklevel=3)
