"""`lowbit tune`: measure which kernels are the fastest for the layers of a checkpoint, and keep it for this GPU."""

from __future__ import annotations

import argparse

from ..errors import DeviceError, ShapeError
from ..scheme import FAMILY_ACTS
from .progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `lowbit tune`."""
    parser.description = (
        "Times the kernels that may be the fastest for each shape and type of weights of a quantized checkpoint, on "
        "this GPU, at most a second for each. Programs on such a GPU with the same driver and build of lowbit use them "
        "from then on. It is never needed: what was not measured goes by predicted times."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a quantized HuggingFace checkpoint, a folder or a name on the hub"
    )
    parser.add_argument("--ms", metavar="M,...", help="rows of x (default: all up to 1024, and 2048 and 4096)")
    parser.add_argument("--act", choices=FAMILY_ACTS["decode"], help="type of x (default: the model's)")
    parser.add_argument("--fuse", action="store_true", help="tune for the products that lowbit.fuse(model) makes")
    parser.add_argument("--seconds", type=float, default=1.0, help="most time for each shape and type (default: 1)")
    parser.add_argument("--again", action="store_true", help="also measure what was measured before on this machine")
    parser.add_argument("--no-save", action="store_true", help="only print the times")
    parser.add_argument("--device", default="cuda", help="such as cuda:1 (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print what was measured and where it is kept, and return 0. Raises LowbitError on bad input, before the model is
    loaded where it can be known."""
    import torch

    from .. import cuda_devices, extension
    from ..autotune import cache
    from ..autotune.problem import spans_of

    words = [] if args.ms is None else args.ms.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ShapeError(f"expected whole numbers, --ms 1,16,256, got {args.ms!r}")
    ms = None if args.ms is None else [int(word) for word in words]
    spans_of(ms)
    extension.load()
    index = _index(args.device)
    reason = cuda_devices.why_no_cuda(index)
    if reason:
        raise DeviceError(f"measuring needs a GPU, and there is none that lowbit's kernels run on: {reason}")
    import lowbit

    model = lowbit.from_pretrained(args.model).to(torch.device("cuda", index))
    if args.fuse:
        lowbit.fuse(model)
    from ..tuning import distinct

    with Progress(max(1, len(distinct(model, args.act)))) as progress:
        progress.start("loading the first kernels")

        def step(done: int, total: int, what: str) -> None:
            progress.note(done, total, what)
            progress.step()

        options = {"act": args.act, "seconds": args.seconds, "again": args.again, "save": not args.no_save}
        found = lowbit.tune(model, ms, progress=step, **options)
    if not found:
        print(f"nothing is left to measure, see {cache.folder()}; --again measures anew")
        return 0
    print(found)
    if found.file:
        print(f"kept in {found.file}")
    return 0


def _index(device: str) -> int:
    """The number of a CUDA device by its name."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise DeviceError(f"expected --device to be cuda, or cuda:0 and so on, got {device!r}")
    import torch

    if number and torch.cuda.is_available() and int(number) >= torch.cuda.device_count():
        raise DeviceError(f"expected one of {torch.cuda.device_count()} CUDA devices from cuda:0 on, got {device!r}")
    return int(number or 0)
