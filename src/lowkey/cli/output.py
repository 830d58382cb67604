"""How results look in a terminal: headings, aligned columns, wrapped sentences, a progress bar."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

_WIDEST = 100
_NARROWEST = 40
_BAR = 24
_SECOND_COLUMN = re.compile(r"\s+\S+(?: \S+)*\s{2,}")


def width() -> int:
    """Return how many columns to write: the terminal's, within what is pleasant to read."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))


def section(title: str, *lines: str) -> str:
    """Return a heading with indented lines below it."""
    return "\n".join(["", title, *(f"  {line}".rstrip() for line in lines)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, the first column flush left and the others flush right.

    Example:
        >>> aligned([("majority", "0.7"), ("lowkey", "0.95")])
        ['majority    0.7', 'lowkey     0.95']
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "   ".join([row[0].ljust(widths[0]), *(cell.rjust(size) for cell, size in zip(row[1:], widths[1:], strict=True))]) for row in rows
    ]


def paragraph(text: str) -> list[str]:
    """Wrap sentences to the terminal, less the indent of a section."""
    return textwrap.wrap(text, width() - 2, break_long_words=False, break_on_hyphens=False)


def wrapped(text: str) -> list[str]:
    """Wrap every line of a text, and hang what spills over below where the line's own second column begins.

    Example:
        >>> wrapped("releases")
        ['releases']
    """
    lines: list[str] = []
    for line in text.splitlines():
        column = _SECOND_COLUMN.match(line)
        hang = " " * (column.end() if column else 0)
        lines += textwrap.wrap(line, width() - 2, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
    return lines


def duration(seconds: float) -> str:
    """Return a time as a person would say it.

    Example:
        >>> duration(0.234), duration(8.26), duration(151)
        ('0.23 s', '8.3 s', '2 min 31 s')
    """
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"


class ProgressBar:
    """A bar on stderr with the time left; in a pipe, a line at every tenth instead.

    Use it as a context manager and call `advance` after each piece of work.

    Fields:
        label: What is being done.
        total: How many pieces of work there are.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label = label
        self.total = total
        self._stream = stream or sys.stderr
        self._done = 0
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        if self._stream.isatty():
            self._write(f"\r{self.line()}")
        return self

    def advance(self) -> None:
        """Count one piece of work as done."""
        self._done += 1
        if self._stream.isatty():
            self._write(f"\r{self.line()}\x1b[K")
        elif self._done * 10 // self.total > (self._done - 1) * 10 // self.total:
            self._write(f"{self.line()}\n")

    def line(self) -> str:
        """Return the bar as it stands now."""
        spent = time.monotonic() - self._start
        left = spent / self._done * (self.total - self._done) if self._done else None
        clock = f"{duration(spent)}, {duration(left)} left" if left else duration(spent)
        numbers = f"{self._done}/{self.total}  {clock}"
        # A line that wraps cannot be rewritten, so the bar takes what the words leave.
        size = max(1, min(_BAR, width() - len(self.label) - len(numbers) - 5))
        filled = size * self._done // self.total
        return f"{self.label}  {'█' * filled}{'░' * (size - filled)}  {numbers}"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream.isatty():
            self._write("\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
