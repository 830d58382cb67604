"""Bad input ends in status 2 and one line; help ends in examples."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lowkey.cli import demo, main
from lowkey.cli.commands import build_parser


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["demo", "--epsilon", "-1"], "--epsilon: '-1'"),
        (["demo", "--epsilon", "inf"], "--epsilon: 'inf'"),
        (["demo", "--delta", "1"], "--delta: '1'"),
        (["demo", "--num-steps", "1.5"], "--num-steps: '1.5'"),
        (["demo", "--rank", "0"], "--rank: '0'"),
        (["demo", "--seed", "-3"], "--seed: '-3'"),
        (["demo", "--method", "magic"], "'magic'"),
        (["demo", "--unheard-of"], "--unheard-of"),
        (["demo", "--model", "no/such/folder"], "model='no/such/folder' holds no config.json"),
        (["demo", "--out", __file__], f"out='{__file__}' cannot be made a folder"),
        (["demo", "--out", str(Path(__file__).parent)], "is not empty"),
    ],
)
def test_bad_input_ends_in_status_2_and_one_line(argv: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("lowkey")
    assert names in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"]])
def test_help_ends_in_status_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert "usage: lowkey" in capsys.readouterr().out


def test_the_help_of_the_demo_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    main(["demo", "--help"])
    assert "lowkey demo --epsilon 1" in capsys.readouterr().out


def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("lowkey.cli.text_model.find_spec", lambda name: None if name == "transformers" else found(name))
    assert main(["demo"]) == 2
    assert 'Install it with: pip install "lowkey[text]"' in capsys.readouterr().err


def test_an_interrupt_ends_in_status_130_and_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "\nlowkey demo: interrupted.\n"


def test_a_reader_who_leaves_early_causes_no_traceback() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    run = "c.demo.run = lambda args: [print('x' * 99) for _ in range(9999)]"
    code = f"import sys; from lowkey.cli import commands as c; {run}; sys.exit(c.main(['demo']))"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=True)
    assert (done.stdout, done.stderr) == ("x", "")


def test_the_options_of_the_demo_are_these() -> None:
    args = build_parser().parse_args(["demo"])
    assert {name: value for name, value in vars(args).items() if name != "run"} == {
        "command": "demo",
        "epsilon": 8.0,
        "delta": 1e-5,
        "method": "grape",
        "rank": 16,
        "num_steps": 40,
        "expected_batch_size": 128,
        "learning_rate": None,
        "clip_norm": 1.0,
        "num_tokens": 64,
        "num_mails": None,
        "seed": 0,
        "model": None,
        "out": None,
        "skip_cost": False,
    }


def test_the_command_line_itself_loads_no_transformers() -> None:
    code = "import sys, lowkey.cli; print({'transformers', 'matplotlib'} & set(sys.modules))"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=True)
    assert done.stdout.strip() == "set()"
