"""What the command line prints fits the terminal and reads well."""

from __future__ import annotations

import io

import pytest

from lowkey.cli import output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_wrapped_lines_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = output.wrapped("head\n  relation         " + "add or remove one example " * 8)
    assert all(len(line) + 2 <= columns for line in lines)
    assert [line[:19] for line in lines[2:]] == [" " * 19] * len(lines[2:])


def test_a_wide_terminal_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert output.width() == 100


def test_a_section_indents_what_is_below_its_heading() -> None:
    assert output.section("Title", "one", "two") == "\nTitle\n  one\n  two"


@pytest.mark.parametrize(("seconds", "text"), [(59.96, "1 min 00 s"), (119.7, "2 min 00 s"), (3.0, "3.0 s"), (0.999, "1.00 s")])
def test_a_duration_never_shows_sixty_seconds(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


def test_in_a_terminal_the_bar_is_one_line_that_is_rewritten() -> None:
    stream = Terminal()
    with output.ProgressBar("work", 3, stream) as bar:
        for _ in range(3):
            bar.advance()
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().count("\r") == 4
    assert "3/3" in stream.getvalue()
    assert "left" in stream.getvalue()


def test_the_bar_shrinks_rather_than_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    bar = output.ProgressBar("training privately", 1000, Terminal())
    bar.advance()
    assert len(bar.line()) < 60


def test_in_a_pipe_the_bar_is_at_most_ten_lines() -> None:
    stream = io.StringIO()
    with output.ProgressBar("work", 95, stream) as bar:
        for _ in range(95):
            bar.advance()
    assert stream.getvalue().count("\n") == 10
    assert "\r" not in stream.getvalue()
