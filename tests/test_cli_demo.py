"""The command `attn-monitor demo`: what it flags, and what it leaves when it is stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from attn_monitor.cli import main
from tests.models import LIGHTNING_ADVICE

pytestmark = LIGHTNING_ADVICE
ROOT = Path(__file__).parent.parent


def test_the_demo_flags_heads_and_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = (signal.getsignal(signal.SIGINT), warnings.showwarning, torch.get_num_threads())
    assert main(["demo", "--steps", "14", "--logdir", "logs"]) == 0
    assert (signal.getsignal(signal.SIGINT), warnings.showwarning, torch.get_num_threads()) == before
    out, err = capsys.readouterr()
    assert err == ""
    assert "the scale 1/sqrt(d_k) is missing" in out
    [flagged] = re.findall(r"^(\d) of 8 heads were flagged:$", out, re.MULTILINE)
    assert int(flagged) >= 3
    rows = re.findall(r"^  (layers\.[01]) +([0-3]) +(\d+)  (?:warning|critical)$", out, re.MULTILINE)
    assert len(rows) == int(flagged)
    assert [int(step) for _, _, step in rows] == sorted(int(step) for _, _, step in rows)
    commands = [line.split("#")[0].split() for line in out.partition("\nnext:\n")[2].splitlines()]
    assert commands[0] == ["tensorboard", "--logdir", "logs"]
    assert main([*commands[1][1:], "--summary-only"]) == 0
    assert "2 layers of 4 heads" in capsys.readouterr().out


@pytest.mark.slow
def test_the_healthy_demo_flags_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--healthy", "--logdir", str(tmp_path)]) == 0
    assert "\nno head was flagged\n" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["healthy"]


def test_a_demo_that_cannot_write_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--logdir", str(tmp_path / "file")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"attn-monitor: nothing can be written to {tmp_path}/file/collapsing/version_0 (NotADirector")
    assert err.endswith("; choose another with --logdir\n")


@pytest.mark.parametrize(
    ("option", "wrong"), [("--steps", "0"), ("--steps", "many"), ("--seed", "-1"), ("--seed", "1.5")]
)
def test_the_demo_takes_whole_numbers(option: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", f"{option}={wrong}"]) == 2
    assert f"argument {option}: expects a whole number from" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_during_the_demo_leaves_a_run(tmp_path: Path) -> None:
    # A shell's background jobs, and what they start, ignore Ctrl-C: the command is to heed it wherever the tests run.
    heed = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    script = heed + "runpy.run_module('attn_monitor', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", script, "demo", "--steps", "100000", "--logdir", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as run:
        deadline = time.monotonic() + 200
        while not any(path.stat().st_size > 10_000 for path in tmp_path.rglob("*tfevents*")):  # steps were observed
            assert time.monotonic() < deadline
            time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (130, "attn-monitor: interrupted\n")
    assert main(["report", str(tmp_path), "--summary-only"]) == 0
