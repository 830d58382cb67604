"""Write docs/explain/privacy-argument.md from the lines of the source that carry the argument.

    python scripts/collect_privacy_lines.py            write the page
    python scripts/collect_privacy_lines.py --check    exit with status 1 if the page is not current

A line is named by its file and function, not by its number, so that only a changed argument changes the page.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "lowkey"
PAGE = ROOT / "docs" / "explain" / "privacy-argument.md"

TAGS = {
    "PRIVACY": "Lines that the proof rests on",
    "NUMERICS": "Lines whose order or precision matters",
}
STAGES = ("boundary", "sample", "factors", "sketch", "release", "refine", "optim", "methods", "privatize", "fit", "distributed", "account")
"""The order of a step, in which the lines read as an argument; what is not named here follows by alphabet."""

HEADER = """# The privacy argument, line by line

This page is generated from the source by `python scripts/collect_privacy_lines.py`: every comment tagged `PRIVACY` or `NUMERICS`.
They follow the order of a step, and each one says what would break if its line were different.
How the pieces fit together is told in [](boundary.md).
"""


@dataclass(frozen=True)
class TaggedLine:
    """One tagged comment.

    Fields:
        tag: A key of `TAGS`.
        text: The sentence, joined over the lines of its comment.
        path: The file, relative to the package.
        function: The function or class that holds it, dotted; empty at module level.
    """

    tag: str
    text: str
    path: Path
    function: str

    @property
    def stage(self) -> str:
        """The stage of a step, or the module, that the line belongs to."""
        return self.path.parts[0].removesuffix(".py")

    @property
    def place(self) -> str:
        """The file and function, for a reader to search for."""
        return f"{self.path.as_posix()}, {self.function}" if self.function else self.path.as_posix()


def tagged_lines(path: Path) -> Iterator[TaggedLine]:
    """Find the tagged comments of one file, in order."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for number, tag, sentence in _tagged_comments(text):
        yield TaggedLine(tag, sentence, path.relative_to(SOURCE), _enclosing(tree, number))


def _tagged_comments(text: str) -> Iterator[tuple[int, str, str]]:
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]
    comments = {token.start[0]: token for token in tokens}
    for number, token in comments.items():
        tag, colon, rest = token.string.removeprefix("#").strip().partition(":")
        if not colon or tag not in TAGS:
            continue
        parts = [rest.strip()]
        following = number + 1
        while (more := comments.get(following)) and more.start[1] == token.start[1] and not _starts_tag(more.string):
            parts.append(more.string.removeprefix("#").strip())
            following += 1
        yield number, tag, " ".join(parts)


def _starts_tag(comment: str) -> bool:
    return comment.removeprefix("#").strip().partition(":")[0] in TAGS


def _enclosing(tree: ast.Module, number: int) -> str:
    names: list[str] = []
    body: list[ast.stmt] = tree.body
    while True:
        definitions = (node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)))
        holders = [node for node in definitions if node.lineno <= number <= (node.end_lineno or node.lineno)]
        if not holders:
            return ".".join(names)
        names.append(holders[0].name)
        body = holders[0].body


def page() -> str:
    """Return the page as the source stands."""
    found = [line for path in sorted(SOURCE.rglob("*.py")) for line in tagged_lines(path)]
    parts = [HEADER]
    for tag, title in TAGS.items():
        parts.append(f"\n## {title}\n")
        lines = [line for line in found if line.tag == tag]
        for stage in sorted({line.stage for line in lines}, key=_stage_order):
            parts.append(f"\n### {stage}\n\n")
            parts.extend(f"- {line.text} (`{line.place}`)\n" for line in lines if line.stage == stage)
    return "".join(parts)


def _stage_order(stage: str) -> tuple[int, str]:
    return (STAGES.index(stage) if stage in STAGES else len(STAGES), stage)


def main(arguments: list[str]) -> int:
    """Write the page, or only compare it."""
    current = page()
    if arguments == ["--check"]:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == current else 1
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
