from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")  # Opacus, PEFT and transformers warn about themselves


@pytest.fixture
def lora(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("lora")


TINY = ["--workload", "encoder-tiny", "--rank", "4", "--rounds", "2", "--threads", "1"]


def test_adapters_take_steps_and_every_sample_is_written(lora: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "lora.json"
    assert lora.main([*TINY, "--contenders", "lowkey LoRA", "lowkey LoRA, frozen A", "--skip-memory", "--out", str(out)]) == 0
    assert len(json.loads(out.read_text(encoding="utf-8"))["seconds"]["lowkey LoRA"]) == 2
    assert "| lowkey LoRA, frozen A |" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["PEFT, ordinary training", "PEFT, Opacus with hooks", "PEFT, lowkey DPSGD()"])
def test_contenders_on_adapters_of_peft_take_steps(lora: Any, name: str) -> None:
    pytest.importorskip("peft")
    assert lora.main([*TINY, "--contenders", name, "--skip-memory"]) == 0


def test_a_ratio_is_the_median_of_the_ratios_within_rounds(lora: Any) -> None:
    rows = lora.summarise({lora.REFERENCE: [1.0, 3.0, 1.0], "lowkey LoRA": [0.7, 2.1, 0.9]}, {"lowkey LoRA": 5})
    assert rows["lowkey LoRA"] == {"seconds": 0.9, "ratio": pytest.approx(0.7), "peak": 5}
