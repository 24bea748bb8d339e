"""The command `attn-monitor`: inspecting a model, help, errors in one line, and what it loads."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from attn_monitor import __version__
from attn_monitor.cli import build_parser, main
from tests.models import LIGHTNING_ADVICE

pytestmark = LIGHTNING_ADVICE
ROOT = Path(__file__).parent.parent

MODULE = """
import torch
from tests.models import DIM, Fused
def sample(): return Fused(), torch.zeros(1, 4, DIM)
def keywords(): return Fused(), {"x": torch.zeros(1, 4, DIM)}
def plain(): return torch.nn.Linear(2, 2), torch.zeros(2)
def wrong_shape(): return Fused(), torch.zeros(1, 4, DIM + 1)
def no_model(): return 3
def broken(): raise ValueError("no data here")
def leaving(): raise SystemExit(3)
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"sample_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import nothing_of_this_name")
    (tmp_path / f"{name}_script.py").write_text("import sys; sys.exit(2)")
    (tmp_path / f"{name}_empty.py").write_text("from torch import zeros")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name


@pytest.mark.parametrize("target", ["sample", "keywords"])
def test_inspect_prints_the_table(target: str, here: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{here}:{target}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [["Fused", "Fused", "sdpa", "2", "6", "1", "4"], []]
    assert [line.split(":")[0] for line in lines[3:]] == ["path"]


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        ("HERE", 2, "TARGET expects module:callable"),
        ("HERE:nothing", 2, "has no 'nothing'; it has sample, keywords, plain, wrong_shape, no_model, broken, leaving"),
        ("HERE:smaple", 2, "has no 'smaple'; did you mean sample?"),
        ("HERE:Fused.forwrad", 2, "has no 'Fused.forwrad'; did you mean forward?"),
        ("HERE_empty:sample", 2, "has no 'sample'; it defines nothing that can be called"),
        ("HERE.py:sample", 2, "the name of a module, not of a file: write HERE:sample in place of HERE.py:sample"),
        ("./src/HERE.py:sample", 2, "write src.HERE:sample in place of ./src/HERE.py:sample"),
        ("HERE:number", 2, "is not callable, it is of type int"),
        ("HERE:no_model", 2, "must return `model, inputs`, a torch module first; it returned int"),
        ("HERE:broken", 1, "broken() failed: ValueError: no data here"),
        ("HERE:leaving", 1, "leaving() failed: SystemExit: 3"),
        ("HERE_script:sample", 1, "ended the program (SystemExit: 2): put what it does as a script below"),
        ("HERE:wrong_shape", 1, "the model failed: RuntimeError: mat1 and mat2"),
        ("HERE_broken:sample", 1, "failed: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("no_such_module:sample", 2, "no module named 'no_such_module'"),
    ],
)
def test_errors_are_one_line(
    target: str, status: int, message: str, here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", target.replace("HERE", here)]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith("attn-monitor: ")
    assert message.replace("HERE", here) in line


def test_a_model_without_attention(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{here}:plain"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "no attention found\n"
    assert "nothing here is a softmax over a product of two activations" in printed.err
    assert "observe_attention" in printed.err


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "inspect" in capsys.readouterr().err
    assert main(["nothing"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["version"], ["--version"], ["demo", "--help"], ["inspect", "--help"], ["report", "--help"]],
)
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from attn_monitor.cli import main; "
        f"status = main({arguments!r}); print('loaded', 'torch' in sys.modules, status)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert out.endswith("loaded False 0\n")


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "attn_monitor", "inspect"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert "TARGET" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "printed"), [(["version"], __version__), (["--version"], f"attn-monitor {__version__}")]
)
def test_the_version(arguments: Sequence[str], printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{printed}\n"


@pytest.mark.parametrize("command", ["demo", "inspect", "report"])
def test_help_has_examples_that_work_and_the_exit_status(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([command, "--help"], ["--help"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert "exit status: 0 if" in text
        shown = re.findall(rf"(?:^  |^example: )attn-monitor ({command}.*?)(?:   .*)?$", text, re.MULTILINE)
        assert shown
        assert all(build_parser().parse_args(line.split()).command == command for line in shown)


def test_ctrl_c_ends_a_command_in_one_line(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{here}_slow.py").write_text("raise KeyboardInterrupt")
    assert main(["inspect", f"{here}_slow:sample"]) == 130
    assert capsys.readouterr() == ("", "attn-monitor: interrupted\n")
