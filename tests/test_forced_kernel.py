"""Risk: a CUDA kernel that is forced is misspelt, silently not used, or forgotten after a ``with`` block."""

import pytest
import torch
from test_plan_log import AS_IF, needs_library, python

import lowbit
from lowbit import extension, kernel_list, libraries


class Library:
    """What _open_cuda asks of the CUDA library, with two kernels."""

    def __init__(self):
        self.forced = []

    def lowbit_cuda_force(self, name):
        self.forced.append(name)
        return int(name not in (None, b"w4a16_decode_n1", b"w4a16_decode_n2"))

    def lowbit_cuda_kernel_rows(self):
        return b"w4a16_decode_n1\nw4a16_decode_n2\n"

    def lowbit_cuda_batch_invariant(self, on):
        return 0


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(libraries, "open_cuda", lambda: made)
    monkeypatch.setattr(extension, "_forced", None)
    return made


def test_the_variable_is_read_when_the_library_is_loaded(library, monkeypatch):
    extension._open_cuda()
    assert library.forced == []
    monkeypatch.setenv("LOWBIT_FORCE_KERNEL", "w4a16_decode_n2")
    assert extension._open_cuda() is library and library.forced == [b"w4a16_decode_n2"]


@pytest.mark.parametrize("name, near", [("w4a16_decod_n1", "w4a16_decode_n1"), ("w4a32_cpu_avx2", "w4a16_decode_n2")])
def test_a_name_that_the_build_lacks_is_an_error_with_the_nearest(library, monkeypatch, name, near):
    monkeypatch.setenv("LOWBIT_FORCE_KERNEL", name)
    with pytest.raises(lowbit.EnvironmentVariableError, match=f"LOWBIT_FORCE_KERNEL: no CUDA.*{name}.*mean.*{near}"):
        extension._open_cuda()


def test_a_block_gives_back_what_was_forced_before(library, monkeypatch):
    monkeypatch.setattr(extension, "_library", extension.load())
    monkeypatch.setattr(extension, "_cuda", library)
    monkeypatch.setenv("LOWBIT_FORCE_KERNEL", "w4a16_decode_n2")
    extension._open_cuda()
    with extension.force_cuda_kernel("w4a16_decode_n1"):
        with pytest.raises(lowbit.SchemeError, match="no CUDA kernel of this build is called 'w4'"):
            with extension.force_cuda_kernel("w4"):
                pass
        assert library.forced[1] == b"w4a16_decode_n1"
    assert library.forced[-1] == b"w4a16_decode_n2"


@pytest.mark.parametrize(
    ("name", "value"), [("LOWBIT_FORCE_KERNEL", "w4a16_decode_n1"), ("LOWBIT_BATCH_INVARIANT", "1")]
)
def test_a_gpu_that_the_kernels_do_not_run_on_is_an_error_then(monkeypatch, name, value):
    """Not an ImportError: what asks whether there are kernels takes those for a no."""
    extension.load()
    monkeypatch.setattr(extension, "_cuda", "it does not load")
    monkeypatch.setenv(name, value)
    with pytest.raises(lowbit.EnvironmentVariableError, match=f"{name}={value} needs lowbit's kernels.*does not load"):
        lowbit.pack.packed.has_kernels.__wrapped__(torch.device("cuda", 0))


def test_a_hint_names_few_of_many():
    assert lowbit.errors.nearest("zzz", [f"w4a16_decode_n{i}" for i in range(664)]).count(",") == 2
    assert lowbit.errors.nearest("zzz", ["a", "b", "c", "d"]) == "a, b, c, d"


@needs_library
def test_the_library_itself_knows_its_kernels():
    name = next(row["name"] for row in kernel_list.manifest() if row["library"] == libraries.CUDA_LIBRARY.name)
    done = python(AS_IF + "print(extension._forced)", LOWBIT_FORCE_KERNEL=name)
    assert done.stdout == f"{name.encode()!r}\n", done.stderr
    done = python(AS_IF, LOWBIT_FORCE_KERNEL=name + "0")
    assert f"no CUDA kernel of this build is called '{name}0'; did you mean {name}" in done.stderr.splitlines()[-1]
    assert python("from lowbit import extension; extension.load()", LOWBIT_FORCE_KERNEL="no").returncode == 0
