"""Who reads private values: only files under release/, and pyright agrees."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import PACKAGE, ROOT, name_of, nodes_of, source_files

HIDDEN_FIELDS = {"_blocks", "_batch_size"}
OUTSIDE_RELEASE = [path for path in source_files() if path.relative_to(PACKAGE).parts[0] not in {"release", "boundary.py"}]


def openings(path: Path) -> list[str]:
    return [f"{name_of(path)}:{node.lineno}" for node in nodes_of(path) if isinstance(node, (ast.Attribute, ast.Call)) and opens(node)]


def opens(node: ast.Attribute | ast.Call) -> bool:
    """Whether a node reads a hidden field of something other than its own object."""
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
        return node.attr in HIDDEN_FIELDS and not own
    called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
    spelled = {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return called in {"getattr", "attrgetter", "__getattribute__"} and bool(spelled & HIDDEN_FIELDS)


def constructions(path: Path, name: str) -> list[str]:
    return [
        f"{name_of(path)}:{node.lineno}"
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


@pytest.mark.parametrize("path", OUTSIDE_RELEASE, ids=name_of)
def test_only_release_reads_a_hidden_field(path: Path) -> None:
    assert openings(path) == []


@pytest.mark.parametrize("path", OUTSIDE_RELEASE, ids=name_of)
def test_only_release_claims_a_sensitivity(path: Path) -> None:
    assert constructions(path, "Sensitive") == []


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_nothing_derives_from_a_private_type(path: Path) -> None:
    """A subclass may read the fields of its parent without a word from pyright."""
    bases = {
        part.id
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        for part in ast.walk(base)
        if isinstance(part, ast.Name)
    }
    assert not bases & {"PerExample", "Sensitive"}


@pytest.mark.parametrize(
    "leak",
    ["total._blocks", "each._batch_size", "getattr(total, '_blocks')", "operator.attrgetter('_blocks')(total)", "f()._blocks['w']"],
)
def test_the_search_for_openings_finds_a_leak(leak: str) -> None:
    assert any(opens(node) for node in ast.walk(ast.parse(leak)) if isinstance(node, (ast.Attribute, ast.Call)))


LEAKS = {
    "reading a sum before noise": (
        "from lowkey.boundary import Sensitive\n\ndef leak(total: Sensitive) -> object:\n    return total._blocks\n",
        "reportPrivateUsage",
    ),
    "reading examples": (
        "from lowkey.boundary import PerExample\n\ndef leak(each: PerExample[object]) -> object:\n    return each._blocks\n",
        "reportPrivateUsage",
    ),
    "post-processing a sum": (
        (
            "from lowkey.boundary import Released, Sensitive\n\n"
            "def shrink(released: Released) -> Released:\n    return released\n\n"
            "def leak(total: Sensitive) -> Released:\n    return shrink(total)\n"
        ),
        "reportArgumentType",
    ),
}
HONEST = "from lowkey.boundary import Released\n\ndef read(released: Released) -> float:\n    return released.noise_std\n"


@pytest.fixture(scope="module")
def pyright_rules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Check all snippets in one run, with the settings of the project."""
    pytest.importorskip("pyright")
    folder = tmp_path_factory.mktemp("snippets")
    for number, (code, _) in enumerate(LEAKS.values()):
        (folder / f"leak{number}.py").write_text(code, encoding="utf-8")
    (folder / "honest.py").write_text(HONEST, encoding="utf-8")
    settings = {"include": ["."], "extraPaths": [str(ROOT / "src")], "typeCheckingMode": "strict", "reportPrivateUsage": "error"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rules: dict[str, set[str]] = {path.stem: set() for path in folder.glob("*.py")}
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        rules[Path(found["file"]).stem].add(found.get("rule", ""))
    return rules


@pytest.mark.parametrize("leak", LEAKS)
def test_pyright_rejects(leak: str, pyright_rules: dict[str, set[str]]) -> None:
    assert LEAKS[leak][1] in pyright_rules[f"leak{list(LEAKS).index(leak)}"]


def test_pyright_accepts_reading_a_release(pyright_rules: dict[str, set[str]]) -> None:
    assert pyright_rules["honest"] == set()
