"""The command line: `lowkey COMMAND`.

A command is one module with two functions, listed in `COMMANDS`:

    add_parser(subparsers)   declares its name, help, examples and options, and imports nothing heavy
    run(args) -> int         does the work and returns the exit status

Errors that lowkey raises on purpose end as one line on stderr and exit status 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lowkey.cli import demo
from lowkey.cli.parser import OneLineParser
from lowkey.errors import LowkeyError

_DESCRIPTION = "Differentially private training of PyTorch models in low-dimensional gradient spaces."
COMMANDS = (demo,)
"""The modules of the commands, in the order that `lowkey --help` lists them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: The words after `lowkey`; the process's own if None.

    Returns:
        0 on success, 1 if nobody reads the output any more, 2 on bad input, 130 when interrupted.
    """
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse leaves this way after --help and after a bad argument
        return stop.code if isinstance(stop.code, int) else 0
    try:
        return args.run(args)
    except LowkeyError as error:
        print(f"lowkey {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has left; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"\nlowkey {args.command}: interrupted.", file=sys.stderr)
        return 130


def build_parser() -> OneLineParser:
    """Return the parser of all commands."""
    parser = OneLineParser(prog="lowkey", description=_DESCRIPTION)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser
