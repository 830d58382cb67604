"""The docs keep up with the source."""

from __future__ import annotations

import dataclasses
import importlib
import re
import runpy
import sys
import types

import pytest
from repository import PACKAGE, ROOT, name_of, source_files

DOCS = ROOT / "docs"
BIBLIOGRAPHY = (DOCS / "references.bib").read_text(encoding="utf-8")
CITATION = re.compile(r"\[([a-z]+\d{4}[a-z]*)\]")


def method_names() -> list[str]:
    """Classes that users may pass as `method=`."""
    values = [value for package in ("methods", "nonprivate") for value in vars(importlib.import_module(f"lowkey.{package}")).values()]
    return sorted({value.__name__ for value in values if dataclasses.is_dataclass(value) and hasattr(value, "has_guarantee")})


def test_the_privacy_argument_shows_the_lines_of_the_source() -> None:
    script = ROOT / "scripts" / "collect_privacy_lines.py"
    shown = (DOCS / "explain" / "privacy-argument.md").read_text(encoding="utf-8")
    is_current = shown == runpy.run_path(str(script))["page"]()
    assert is_current, f"the page is out of date: run python {script.relative_to(ROOT)}"


@pytest.mark.parametrize("name", method_names())
def test_every_method_has_its_page(name: str) -> None:
    pages = {page.stem.replace("_", "") for page in (DOCS / "methods").glob("*.md")}
    assert name.lower() in pages, f"write docs/methods/{name.lower()}.md"


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_every_cited_paper_is_in_the_bibliography(path: str) -> None:
    keys = set(CITATION.findall((PACKAGE / path).read_text(encoding="utf-8")))
    assert [key for key in sorted(keys) if f"{{{key}," not in BIBLIOGRAPHY] == []


def public_modules() -> list[str]:
    """Modules and packages directly under lowkey whose names users may import; the command line documents itself."""
    inside = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    return sorted(path.stem for path in inside if not path.name.startswith("_") and path.stem != "cli")


@pytest.mark.parametrize("name", public_modules())
def test_every_public_module_is_in_the_reference(name: str) -> None:
    page = DOCS / "reference" / f"{name}.md"
    assert page.exists(), f"write docs/reference/{name}.md and list it in docs/reference/index.md"
    assert f"automodule:: lowkey.{name}" in page.read_text(encoding="utf-8")


LISTED = ["howto/add-a-method.md"]
"""Pages whose Python listings are one program, from the first to the last."""


@pytest.mark.parametrize("page", LISTED)
def test_the_listings_of_a_page_run(page: str) -> None:
    listings = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    # A module of its own, for dataclasses look their annotations up there.
    module = types.ModuleType("listing")
    sys.modules["listing"] = module
    try:
        for listing in listings:
            exec(compile(listing, page, "exec"), vars(module))
    finally:
        del sys.modules["listing"]
