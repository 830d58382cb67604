"""The repository as the policy tests see it: its tracked files and the syntax trees of its source."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "lowkey"


def source_files() -> list[Path]:
    """Return every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return a path relative to the package, as test identifiers and messages show it."""
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def nodes_of(path: Path) -> Iterator[ast.AST]:
    """Walk over the syntax tree of a file."""
    return ast.walk(tree_of(path))


def tracked_text_files() -> list[Path]:
    """Return the files under version control that hold text; skip the test where there is no version control."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: there is no list of tracked files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]
