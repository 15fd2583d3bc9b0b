"""Risk: a product goes by a table of measured times that is not for it, or by half of one; or a table brings it to a
kernel that can't hold it or rounds what others don't."""

import ctypes
import random
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan import H200, needs_library

import lowbit
from lowbit import extension
from lowbit.autotune.plan import candidates, numbers_of
from lowbit.autotune.problem import ZEROS, Problem
from lowbit.autotune.tuned import Choice
from lowbit.dtypes import ACT_TYPES

HEADER = Path(__file__).parents[1] / "csrc/cuda/choice.h"
INT4 = Problem("int4", "float16", 8192, 8192, 128, "none")
END = (1 << 31) - 1

pytestmark = needs_library


@pytest.fixture(autouse=True)
def no_table():
    yield
    tune()


def tune(*lines: tuple) -> int:
    """Lines of (kernel, problem, least, most) in use; their number by the library."""
    made = [Choice(name.encode(), *problem.numbers, 90, 132, *span) for name, problem, *span in lines]
    return extension.cuda_library().lowbit_cuda_tune((Choice * len(made))(*made), len(made))


def choice(problem: Problem, m: int, device=H200) -> tuple[str, bool]:
    tuned = ctypes.c_int(7)
    found = extension.cuda_library().lowbit_cuda_choice(*numbers_of(problem, m, device), tuned)
    return found.decode(), {0: False, 1: True}[tuned.value]


def planned(problem: Problem, m: int, device=H200) -> str:
    whole = problem.zeros == "whole"
    first = candidates(problem.scheme, problem.act, m, problem.n, problem.k, device, whole_zeros=whole)[0]
    return "" if first.place == "never" else first.name


def test_the_struct_is_that_of_the_header():
    body = re.search(r"struct TunedChoice \{(.*?)\};", HEADER.read_text(), re.DOTALL)[1]
    declared = re.findall(r"(const char\*|int64_t) ([\w, ]+);", body)
    types = {"const char*": ctypes.c_char_p, "int64_t": ctypes.c_int64}
    assert [(name, types[kind]) for kind, names in declared for name in names.split(", ")] == Choice._fields_


def test_what_a_thread_remembers_is_the_plan():
    """Asked twice and in any order, so that answers push each other out."""
    shapes = [(n, k) for n in (4096, 8192, 5120) for k in (4096, 8192, 27648)]
    asked = [
        (Problem(weight, act, n, k, group, zeros), m, device)
        for weight, zeros in (("int4", "none"), ("uint4", "zero"), ("uint4", "whole"), ("uint4", "min"))
        for act in ("float16", "bfloat16")
        for group in (64, 128)
        for n, k in shapes
        for m in (1, 3, 16, 200)
        for device in (H200, lowbit.autotune.plan.Device(90, 132, 0), lowbit.autotune.plan.Device(80, 108, 0))
    ]
    expected = {one: planned(*one) for one in asked}
    assert len(set(expected.values())) > 20
    for one in random.Random(1).sample(asked * 2, 2 * len(asked)):
        assert choice(*one) == (expected[one], False), one


def test_weights_of_one_shape_with_even_scales_and_without_have_plans_of_their_own():
    """A thread remembers plans by shape: that of one must not answer for the other."""
    problem, plans = Problem("int4", "float16", 4096, 4096, 128, "none"), []
    for uneven in (False, True) * 2:
        numbers = numbers_of(problem, 56, H200, uneven_scales=uneven)
        plans.append(extension.cuda_library().lowbit_cuda_choice(*numbers, ctypes.c_int()).decode())
        first = candidates(problem.scheme, "float16", 56, 4096, 4096, H200, uneven_scales=uneven)[0]
        assert plans[-1] == first.name
    assert plans[0] != plans[1] and plans[:2] == plans[2:]


def test_a_table_is_for_its_problem_and_rows_alone():
    slow = "w4a16_gemm_sm90_n144"
    assert tune((slow, INT4, 9, 16)) == 1
    assert choice(INT4, 9) == choice(INT4, 16) == (slow, True)
    others = [("n", 4096), ("k", 4096), ("group_size", 256), ("act", "bfloat16"), ("weight", "int5")]
    for name, value in others:
        other = Problem(**{**vars(INT4), name: value})
        assert choice(other, 16) == (planned(other, 16), False)
    for m in (8, 17):
        assert choice(INT4, m) == (planned(INT4, m), False)
    for device in (lowbit.autotune.plan.Device(90, 78, 39), lowbit.autotune.plan.Device(80, 132, 0)):
        assert choice(INT4, 16, device) == (planned(INT4, 16, device), False)
    for zeros in ZEROS[1:]:
        tune(("wu4a16_gemm_sm90_n8", zeroed := Problem(**{**vars(INT4), "weight": "uint4", "zeros": zeros}), 1, 8))
        found = {z: choice(Problem(**{**vars(zeroed), "zeros": z}), 8)[1] for z in ZEROS[1:]}
        assert found == {z: z == zeros for z in ZEROS[1:]}


def test_a_later_line_wins_and_a_new_table_takes_the_place_of_the_old_one():
    assert tune(("w4a16_gemm_sm90_n144", INT4, 1, 64), ("w4a16_gemm_sm90_n32", INT4, 17, 32)) == 2
    assert [choice(INT4, m)[0][-3:] for m in (16, 17, 32, 33)] == ["144", "n32", "n32", "144"]
    assert tune(("w4a16_gemm_sm90_n48", INT4, 33, 48)) == 1
    assert [choice(INT4, m)[1] for m in (16, 32, 33)] == [False, False, True]
    assert tune() == 0 and choice(INT4, 33) == (planned(INT4, 33), False)


FINE = Problem(**{**vars(INT4), "group_size": 64})
MIN = Problem("uint4", "float16", 8192, 8192, 128, "min")
WHOLE = Problem("uint4", "float16", 8192, 8192, 128, "whole")
FLOAT = Problem("float4_e2m1", "float16", 8192, 8192, 128, "zero")


@pytest.mark.parametrize(
    ("line", "used"),
    [
        (("w4a16_gemm_sm90_n256", INT4, 17, END), True),
        (("w4a16_gemm_sm90_n257", INT4, 17, END), False),  # not in this build
        (("w4ab16_gemm_sm90_n256", INT4, 17, 32), False),  # of another type of x
        (("w5a16_gemm_sm90_n256", INT4, 17, 32), False),
        (("w4a16_gemm_sm90_n16", INT4, 9, 16), True),
        (("w4a16_gemm_sm90_n16", INT4, 9, 17), False),  # too few rows in its tile
        (("w4a16_decode_n4", INT4, 3, 4), True),
        (("w4a16_decode_n4", INT4, 3, 5), False),
        (("w4a16_decode_n4", FINE, 3, 4), False),  # no code for it
        (("wf4e2m1a16_decode_n4", FLOAT, 3, 4), False),
        (("w4a16_gemm_sm90_n96", FINE, 65, 96), False),
        (("w4a16_gemm_sm90_n64", FINE, 17, 64), True),
        (("w4a16_gemm_sm90_n64", FINE, 16, 64), False),  # rounds, and up to 16 rows nothing does
        (("w4a16_gemm_sm90_n64", INT4, 16, 64), False),
        (("w4a16_gemm_sm90_n96", INT4, 16, 64), False),
        (("w4a16_gemm_sm90_n144", INT4, 16, 64), True),
        (("wu4a16_gemm_sm90_n64", MIN, 9, 16), False),
        (("wu4a16_gemm_sm90_n32", WHOLE, 9, 16), True),
        (("w4a16_gemm_sm90_n64", INT4, 0, 16), False),
        (("w4a16_gemm_sm90_n64", INT4, 17, 16), False),
        (("", INT4, 1, 1), False),
    ],
)
def test_only_what_may_run_is_used(line, used):
    assert tune(line) == used
    assert choice(line[1], max(1, line[2]))[1] == used


def test_numbers_out_of_range_are_no_lines():
    library, good = extension.cuda_library(), [*INT4.numbers, 90, 132, 17, 32]
    for place in range(len(good)):
        for value in (-(1 << 63), -2, (1 << 63) - 1):
            numbers = [*good]
            numbers[place] = value
            line = (Choice * 1)(Choice(b"w4a16_gemm_sm90_n64", *numbers))
            used = library.lowbit_cuda_tune(line, 1)
            assert used == (place == 9 and value > 0), (place, value)
    assert library.lowbit_cuda_tune((Choice * 1)(Choice(None, *good)), 1) == 0
    assert library.lowbit_cuda_tune(None, 0) == 0


def test_many_threads_see_the_old_table_or_the_new_one():
    """Each problem is in both tables with another kernel, so half of a table would show."""
    problems = [Problem("int4", "float16", 64 * i, 8192, 128, "none") for i in range(1, 200)]
    tables = [[(f"w4a16_gemm_sm90_n{tile}", problem, 17, 32) for problem in problems] for tile in (64, 128)]
    right = [{"w4a16_gemm_sm90_n64", "w4a16_gemm_sm90_n128"}] * len(problems)
    tune(*tables[0])
    wrong, done = [], threading.Event()

    def ask(seed):
        chance = random.Random(seed)
        while not done.is_set():
            i = chance.randrange(len(problems))
            name, tuned = choice(problems[i], 20)
            if name not in right[i] or not tuned:
                wrong.append((problems[i], name, tuned))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(40):
        assert tune(*tables[turn % 2]) == len(problems)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(choice(problem, 20)[0] == "w4a16_gemm_sm90_n128" for problem in problems)


def test_a_kernel_is_tried_by_name():
    library = extension.cuda_library()
    assert library.lowbit_cuda_try(b"w4a16_gemm_sm90_n64") == 0 and library.lowbit_cuda_try(None) == 0
    assert library.lowbit_cuda_try(b"w4a16_dequant_rows") == 1, "only kernels of products"
    assert library.lowbit_cuda_try(b"w4a16") == 1 and len(ACT_TYPES) == 4


@pytest.mark.parametrize("size", [(1 << 31) - 511, 1 << 36])
def test_sizes_that_are_no_int_when_padded_have_no_plan(size):
    for n, k, m in ((size, 64, 4), (64, size, 4), (64, 64, size)):
        problem = replace(INT4, n=n, k=k)
        assert extension.cuda_library().lowbit_cuda_plan(*numbers_of(problem, m, H200)) == b""
        assert choice(problem, m) == ("", False)
