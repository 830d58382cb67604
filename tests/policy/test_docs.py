"""The docs keep up with the source."""

from __future__ import annotations

import dataclasses
import importlib
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from repository import PACKAGE, ROOT, name_of, source_files
from torch import nn
from torch.utils.data import TensorDataset

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


LISTED = {
    "../README.md": 1_000,
    "explain/isolation.md": 0,
    "howto/add-a-layer-rule.md": 0,
    "howto/add-a-method.md": 0,
    "howto/audit.md": 0,
    "howto/own-loop.md": 1_000,
    "howto/report.md": 1_000,
    "howto/resume.md": 200,
}
"""Pages whose Python listings are one program, from the first to the last, and how many examples of the reader's they take."""


def build_model() -> nn.Module:
    """What a page leaves to its reader: a small model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 20), nn.Tanh(), nn.Linear(20, 3))


@pytest.mark.parametrize("page", LISTED)
def test_the_listings_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listings = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    # A module of its own, for dataclasses look their annotations up there.
    module = types.ModuleType("listing")
    # A reader trains longer.
    listings = [listing.replace("num_steps=1_000", "num_steps=20") for listing in listings]
    width = 64 if page.endswith("README.md") else 8
    records = TensorDataset(torch.randn(LISTED[page], width), torch.randint(0, 3, (LISTED[page],)))
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3)) if width == 64 else build_model()
    vars(module).update(build_model=build_model, model=model, dataset=records)
    monkeypatch.chdir(tmp_path)
    sys.modules["listing"] = module
    try:
        for listing in listings:
            exec(compile(listing, page, "exec"), vars(module))
    finally:
        del sys.modules["listing"]
