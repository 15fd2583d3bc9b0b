"""The command line: ``lowbit <command>``; each command is a file of lowbit/commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .errors import LowbitError

#: Command -> what it does. Why here too: `lowbit --help` should not take the seconds that torch takes to load.
COMMANDS = {
    "info": "what was built, what this machine has, and which kernels run",
    "selftest": "hold every kernel of this installation against the reference, in under a minute",
    "tune": "measure on this GPU which kernels are the fastest for a model, and keep it",
    "quantize": "quantize a HuggingFace checkpoint into a new folder",
    "eval": "perplexity and bits a byte of a model on a text, its distance to a float model, size and speed",
    "convert": "bring a checkpoint of GPTQ, AWQ, GGUF and others into lowbit's own format, exactly",
    "export": "write a quantized checkpoint for vLLM and others: compressed-tensors or GPTQ",
    "demo": "quantize a checkpoint at several widths: size, quality and speed beside float",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 with one sentence on stderr for bad input, 141 where nobody
    reads the output any more."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="lowbit", description="Matrix products with weights of 1 to 8 bits.")
    parser.add_argument("--version", action="version", version=f"lowbit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    try:
        for name, does in COMMANDS.items():
            subparser = commands.add_parser(name, help=does)
            if name == chosen:  # may fail already: a command loads the library, which reads the variables
                module = import_module(f"{__package__}.commands.{name}")
                module.add_arguments(subparser)
        args = parser.parse_args(argv)
        code = module.run(args)
        sys.stdout.flush()
        return code
    except LowbitError as error:
        print(f"lowbit {chosen}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Who reads the output, such as `head`, has had enough. Why the null device: Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
