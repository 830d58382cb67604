from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about itself


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("denoise")


def test_denoising_is_measured_beside_a_decomposition_and_a_step(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "result.json"
    small = ["--rows", "30", "--cols", "50", "--workload", "encoder-tiny", "--threads", "1", "--quick", "--draws", "3"]
    assert script.main([*small, "--out", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert len(result["layer"]["samples"]["full SVD"]["wall_s"]) == 2
    assert max(result["layer"]["distance_to_full_svd"].values()) < 1e-5
    # Six layers of the encoder, its pooler and its head.
    assert result["step"]["title"].endswith("8 linear layers")
    assert all(0.0 <= share <= 1.0 for row in result["chance"]["shares"].values() for share in row.values())
    assert "| denoising, spikes in every tenth |" in capsys.readouterr().out


def test_a_ratio_is_the_median_of_the_ratios_within_rounds(script: Any) -> None:
    samples = {"first": {"wall_s": [1.0, 3.0, 1.0]}, "second": {"wall_s": [0.5, 1.5, 0.9]}}
    assert script.summarise(samples)["second"]["wall_ratio"] == pytest.approx(0.5)
