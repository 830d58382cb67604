"""The demo runs from start to end on a tiny model, and keeps its promises about what it prints and writes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from lowkey.cli import main, step_cost, text_model
from lowkey.data import Mail

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "free", "money", "meeting", "list", "re", ":", "!", "the", "you", "##s"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def options(tiny: Path, *more: str) -> list[str]:
    sizes = ["--num-mails", "60", "--num-steps", "3", "--expected-batch-size", "12", "--num-tokens", "8", "--rank", "2"]
    return ["demo", "--model", str(tiny), *sizes, *more]


def test_a_run_prints_accuracy_and_the_whole_statement(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(tiny, "--skip-cost", "--epsilon", "3")) == 0
    printed = capsys.readouterr()
    for phrase in (
        "always the more frequent answer",
        "bag of words, not private",
        "ε = ∞",
        "δ = 1e-05",
        "Poisson, rate q = 0.2",
        "system noise",
    ):
        assert phrase in printed.out
    epsilon = float(re.findall(r"\(ε = ([\d.]+),", printed.out)[0])
    assert 2.7 < epsilon <= 3.0
    assert "caveat" not in printed.out
    assert "training privately" in printed.err
    assert "Traceback" not in printed.err


def test_a_run_fits_into_80_columns(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(options(tiny, "--skip-cost", "--method", "dpsgd"))
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_a_run_leaves_model_ledger_and_numbers_behind(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(options(tiny, "--skip-cost", "--out", str(out))) == 0
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert 0.0 < result["privacy"]["epsilon"] <= 8.0
    assert result["options"]["num_mails"] == 60
    assert (out / "ledger").exists()
    before, after = (BertForSequenceClassification.from_pretrained(folder).state_dict() for folder in (tiny, out / "model"))
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed
    assert not any("embeddings" in name for name in changed)
    assert "result.json" in capsys.readouterr().out


def test_a_second_run_into_the_same_folder_is_refused(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ledger").touch()
    assert main(options(tiny, "--out", str(tmp_path))) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (["--expected-batch-size", "61"], "expected_batch_size=61"),
        (["--delta", "0.5"], "delta=0.5"),
        (["--rank", "17"], "rank=17"),
        (["--num-tokens", "17"], "at most 16"),
        (["--num-tokens", "1"], "num_tokens=1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(
    tiny: Path, more: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(tiny, *more)) == 2
    complaints = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lowkey demo:")]
    assert len(complaints) == 1
    assert names in complaints[0]


def test_a_folder_with_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}', encoding="utf-8")
    assert main(["demo", "--model", str(tmp_path)]) == 2
    assert "cannot be loaded as a text classifier" in capsys.readouterr().err


def test_the_length_of_one_mail_changes_no_other_mail(tiny: Path) -> None:
    model = text_model.load_text_model(tiny, seed=0)
    short, long = (Mail(subject="", body="free money " * number, is_spam=True) for number in (1, 50))
    alone = text_model.encode(model.tokenizer, [short], num_tokens=8)
    together = text_model.encode(model.tokenizer, [short, long], num_tokens=8)
    assert torch.equal(alone.tensors[0][0], together.tensors[0][0])


@pytest.mark.parametrize(("seed", "is_equal"), [(0, True), (1, False)])
def test_the_seed_alone_decides_a_head_that_the_folder_lacks(tiny: Path, tmp_path: Path, seed: int, is_equal: bool) -> None:
    whole = BertForSequenceClassification.from_pretrained(tiny)
    whole.bert.save_pretrained(tmp_path)
    BertTokenizerFast(str(tiny / "vocab.txt")).save_pretrained(tmp_path)
    heads = [text_model.load_text_model(tmp_path, seed=number).network.classifier.weight for number in (0, seed)]
    assert torch.equal(*heads) is is_equal


def test_cost_is_measured_for_both_kinds_of_step(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "measure_memory", lambda workload: 2 if workload.method else 3)
    network = text_model.load_text_model(tiny, seed=0).network
    before = [parameter.detach().clone() for parameter in network.parameters()]
    workload = step_cost.Workload(folder=str(tiny), method="grape", rank=2, batch_size=4, num_tokens=8)
    turns: list[None] = []
    costs = step_cost.measure(network, workload, num_rounds=2, on_turn=lambda: turns.append(None))
    assert len(turns) == 4
    assert all(cost.seconds > 0 for cost in costs)
    assert [cost.memory_bytes for cost in costs] == [3, 2]
    assert all(torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell a process its resident size")
@pytest.mark.parametrize("method", ["grape", "dpsgd", None])
def test_memory_is_measured_in_a_process_of_its_own(tiny: Path, method: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    workload = step_cost.Workload(folder=str(tiny), method=method, rank=2, batch_size=4, num_tokens=8)
    assert (step_cost.measure_memory(workload) or 0) > 0


def test_the_highest_resident_size_is_seen() -> None:
    before = step_cost.resident_bytes()
    with step_cost.watch_resident(period=0.001) as highest:
        block = torch.ones(2**24)
        time.sleep(0.05)
        del block
    # The block has 64 MiB; the rest of the process may give a little back meanwhile.
    assert highest[0] - before > 48 * 2**20


def test_memory_is_not_claimed_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "_STATM", Path("no/such/file"))
    assert step_cost.measure_memory(step_cost.Workload(folder=None, method=None, rank=1, batch_size=1, num_tokens=1)) is None
