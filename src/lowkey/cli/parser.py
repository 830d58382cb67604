"""What every command's options share: errors of one line, and numbers that are checked where they are read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    # argparse gives the type of add_subparsers() no public name.
    Subparsers = argparse._SubParsersAction["OneLineParser"]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage block."""

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with status 2."""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def add_command(
    subparsers: Subparsers, name: str, *, run: Callable[[argparse.Namespace], int], summary: str, details: str, examples: str
) -> OneLineParser:
    """Add one command whose help ends with examples.

    Args:
        subparsers: Where it is added.
        name: What the user types.
        run: Called with the parsed arguments; returns the exit status.
        summary: One line for the list of commands.
        details: What the command does, above its options.
        examples: Command lines, below its options.

    Returns:
        The parser to add options to.
    """
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=details,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def positive_int(text: str) -> int:
    """Read a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    return 0 if text.strip() == "0" else positive_int(text)


def positive_float(text: str) -> float:
    """Read a finite number above 0."""
    value = _read_float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def open_probability(text: str) -> float:
    """Read a number strictly between 0 and 1."""
    value = _read_float(text)
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not strictly between 0 and 1")
    return value


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
