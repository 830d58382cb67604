"""What lowkey exports: exactly `__all__`, importable, documented, light to import."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from repository import PACKAGE, name_of, tree_of

PACKAGES = sorted(PACKAGE.rglob("__init__.py"))


def module_of(path: Path) -> ModuleType:
    return importlib.import_module(".".join(("lowkey", *path.parent.relative_to(PACKAGE).parts)))


def imported_names(path: Path) -> set[str]:
    """Names that a package binds on purpose: its imports and definitions, without the future and private ones."""
    names: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


def exported() -> list[tuple[str, object]]:
    lowkey = importlib.import_module("lowkey")
    return [(name, getattr(lowkey, name)) for name in getattr(lowkey, "__all__", [])]


def undocumented_methods(value: type) -> list[str]:
    names = [name for name, member in vars(value).items() if not name.startswith("_") and callable(member)]
    return [name for name in names if not inspect.getdoc(getattr(value, name))]


@pytest.mark.parametrize("path", PACKAGES, ids=name_of)
def test_all_names_exactly_what_the_package_binds(path: Path) -> None:
    listed = getattr(module_of(path), "__all__", [])
    assert len(listed) == len(set(listed))
    assert set(listed) - {"__version__"} == imported_names(path)


@pytest.mark.parametrize("path", PACKAGES, ids=name_of)
def test_every_listed_name_can_be_imported(path: Path) -> None:
    module = module_of(path)
    assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == []


@pytest.mark.parametrize(("name", "value"), exported(), ids=[name for name, _ in exported()])
def test_every_public_name_is_documented(name: str, value: object) -> None:
    if isinstance(value, (str, float, int)):
        return
    assert inspect.getdoc(value), f"lowkey.{name} has no docstring"
    if inspect.isclass(value):
        assert undocumented_methods(value) == []


IMPORT = (
    "import sys, lowkey; print(*sorted(set(sys.modules) & {'transformers', 'matplotlib', 'sentence_transformers', 'opacus', 'sklearn'}))"
)


def test_importing_lowkey_pulls_in_no_extra() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def seconds_to_import(module: str) -> float:
    code = f"import time; start = time.process_time(); import {module}; print(time.process_time() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout for _ in range(3)]
    return min(float(run) for run in runs)


@pytest.mark.slow
def test_importing_lowkey_adds_less_than_a_second_to_torch() -> None:
    assert seconds_to_import("lowkey") < seconds_to_import("torch") + 1.0


BARE_ACCOUNT = """
import sys, types
package = types.ModuleType("lowkey")
package.__path__ = [sys.argv[1]]
sys.modules["lowkey"] = package
import lowkey.account
print("torch" in sys.modules)
"""


def test_the_accountant_alone_runs_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", BARE_ACCOUNT, str(PACKAGE)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
