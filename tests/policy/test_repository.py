"""What every tracked file keeps to: sizes, and nothing that belongs to one machine or one registry."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from repository import ROOT, name_of, source_files, tracked_text_files

# Put together from parts, so that this file does not contain what it forbids.
REGISTRY_HOSTS = [
    name + end
    for name, end in [
        ("pypi", ".org"),
        ("pythonhosted", ".org"),
        ("download.pytorch", ".org"),
        ("npmjs", ".org"),
        ("npmjs", ".com"),
        ("anaconda", ".org"),
    ]
]
FORBIDDEN = {
    "a registry host": re.compile("|".join(re.escape(host) for host in REGISTRY_HOSTS)),
    "a path of one machine": re.compile(r"(?<![\w.~/:-])/(?:root|work|home|Users|opt)/"),
    "unfinished work": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_holds(what: str) -> None:
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in tracked_text_files()}
    assert [str(path.relative_to(ROOT)) for path, text in texts.items() if FORBIDDEN[what].search(text)] == []


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_a_source_file_has_one_subject(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", source_files(), ids=name_of)
def test_a_source_file_is_named_for_its_subject(path: Path) -> None:
    assert path.stem not in {"utils", "util", "common", "helpers", "helper", "misc"}


def test_the_readme_fits_in_120_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


SCRIPTS = [path for folder in ("benchmarks", "examples", "experiments", "scripts") for path in sorted((ROOT / folder).glob("*.py"))]


@pytest.mark.parametrize("path", [path for path in SCRIPTS if "def main(" in path.read_text(encoding="utf-8")], ids=lambda path: path.name)
def test_a_script_with_a_main_function_calls_it(path: Path) -> None:
    assert 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")


def locked_versions() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins), "the lock holds something other than an exact version"
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}


def wanted_names() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(entry for extra in project["optional-dependencies"].values() for entry in extra)]
    names = {re.split(r"[\[<>=~! ]", entry, maxsplit=1)[0] for entry in wanted}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names} - {"lowkey"}


def test_the_lock_covers_every_dependency() -> None:
    assert wanted_names() - set(locked_versions()) == set()


def test_the_lock_names_no_local_build() -> None:
    assert [name for name, version in locked_versions().items() if "+" in version or name.startswith("nvidia")] == []
