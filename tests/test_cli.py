"""The command `attn-monitor`: what it prints, what it answers, and what it loads."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionMonitor, __version__
from attn_monitor.cli import build_parser, main
from tests.event_data import HOSTILE, make_event, make_run
from tests.models import DIM, HEADS, LIGHTNING_ADVICE, Lit, loader, quiet

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


# -- demo --------------------------------------------------------------------------------------------------------------


def test_the_demo_flags_heads_and_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = (signal.getsignal(signal.SIGINT), warnings.showwarning)
    assert main(["demo", "--steps", "14", "--logdir", "logs"]) == 0
    assert (signal.getsignal(signal.SIGINT), warnings.showwarning) == before
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
    command = [sys.executable, "-m", "attn_monitor", "demo", "--steps", "100000", "--logdir", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as run:
        deadline = time.monotonic() + 200
        while not any(path.stat().st_size > 10_000 for path in tmp_path.rglob("*tfevents*")):  # steps were observed
            assert time.monotonic() < deadline
            time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate()
    assert (run.returncode, err) == (130, "attn-monitor: interrupted\n")
    assert main(["report", str(tmp_path), "--summary-only"]) == 0


# -- report ------------------------------------------------------------------------------------------------------------


def test_report_prints_the_summary_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_event(40, "layers.1.attn", 3)
    make_run(events={40: [first]}).write(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    page = tmp_path / "attention_report.html"
    lines = printed.out.splitlines()
    assert lines[0] == f"{tmp_path.name}: 3 layers of 5 heads, 7 observations, steps 0 to 60"
    assert lines[1] == f"  first event: {first['message']}"
    assert lines[-1] == f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB)"
    assert printed.err == ""
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.filterwarnings("ignore::attn_monitor.events.AttentionWarning")
def test_report_tells_the_events_of_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = AttentionMonitor()
    logger = TensorBoardLogger(tmp_path)
    quiet(logger=logger, callbacks=[monitor], max_steps=3).fit(Lit("hand", "sdpa", gain=9.0), loader(3))
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "lightning_logs/version_0: 2 layers of 2 heads, 3 observations, steps 0 to 2"
    first = [event for event in monitor.events if event.step == monitor.events[0].step]
    worst = max(first, key=lambda event: event.ratio)
    assert lines[1] == f"  first event{', critical' if worst.severity == 'critical' else ''}: {worst.line}"
    assert lines[2].startswith(f"  {len({(event.layer, event.head) for event in monitor.events})} heads flagged")
    records = [stats for _, layers in monitor.history for stats in layers.values()]
    largest = max(float(stats.measured()["logit_row_std"].max()) for stats in records)
    assert float(lines[5].split()[4]) == pytest.approx(largest / (DIM / HEADS) ** 0.5, rel=0.01)
    assert {"train_loss", "grad_logits_norm,"} <= {line.split()[0] for line in lines if line.strip()}
    assert printed.err == ""


CRASHING = """
import os, sys
from pytorch_lightning import Callback
from pytorch_lightning.loggers import TensorBoardLogger
from attn_monitor import AttentionMonitor
from tests.models import Lit, loader, quiet

class Crash(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 5:
            os._exit(9)

callbacks = [Crash(), AttentionMonitor()]
quiet(logger=TensorBoardLogger(sys.argv[1]), callbacks=callbacks).fit(Lit("hand", gain=9.0), loader(7))
"""


@pytest.mark.slow
def test_report_of_a_run_that_crashed_has_its_last_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = subprocess.run([sys.executable, "-c", CRASHING, str(tmp_path)], cwd=ROOT, capture_output=True, check=False)
    assert run.returncode == 9, run.stderr
    assert main(["report", str(tmp_path), "--summary-only"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("1 layer of 2 heads, 5 observations, steps 0 to 4")
    assert lines[1].startswith("  first event: step 0: head ")


def test_report_of_several_runs_tells_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (0, 1, 10):
        make_run(steps=range(version + 2)).write(tmp_path / f"version_{version}")
    with SummaryWriter(str(tmp_path / "other")) as writer:
        writer.add_scalar("train_loss", 1.0, 0)
    assert main(["report", str(tmp_path), "--summary-only"]) == 0
    printed = capsys.readouterr()
    starts = [line for line in printed.out.splitlines() if line.startswith("version_")]
    assert [line.split(",")[1] for line in starts] == [" 2 observations", " 3 observations", " 12 observations"]
    assert printed.err == "attn-monitor: nothing of attn_monitor in other\n"
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize("option", ["--summary-only", "--no-html"])
def test_report_writes_no_page_when_told_so(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run().write(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["report", str(tmp_path), option]) == 0
    assert "wrote" not in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before


def test_report_replaces_its_own_page_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run().write(tmp_path / "run")
    page = tmp_path / "page.html"
    arguments = ["report", str(tmp_path / "run"), "--output", str(page)]
    assert main(arguments) == 0
    page.write_bytes(page.read_bytes()[:-100])
    assert main(arguments) == 0
    assert page.read_text(encoding="utf-8").endswith("</html>\n")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["page.html", "run"]
    capsys.readouterr()
    page.write_text("<html>my thesis</html>")
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"attn-monitor: {page} exists and is no report of attn_monitor: move it, or choose another --output\n"
    )
    assert page.read_text() == "<html>my thesis</html>"


@pytest.mark.parametrize(
    ("output", "message"),
    [("nowhere/page.html", "no directory {}/nowhere to write page.html to"), (".", "{} is a directory")],
)
def test_report_says_where_it_cannot_write(
    output: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run().write(tmp_path)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / output)]) == 2
    assert message.format(tmp_path) in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_report_says_when_writing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run().write(tmp_path)
    monkeypatch.setattr("attn_monitor.reports.report.render_report", lambda *_, **__: ("x" * 10**6, []))
    (tmp_path / "page.html.part").symlink_to("/dev/full")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(tmp_path.name)
    assert "cannot be written (No space left on device); choose another with --output" in printed.err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("nowhere", 2, "no directory {}/nowhere: give the one that holds the event files of a run"),
        ("file", 2, "{}/file is a file: give the directory it is in"),
        (
            "empty",
            1,
            "no event files and no metrics.csv in {}/empty or below: train with callbacks=[AttentionMonitor()]",
        ),
        ("plain", 1, "{}/plain holds runs (version_0, version_1), but nothing that attn_monitor wrote: train with"),
    ],
)
def test_report_says_what_is_wrong_with_a_directory(
    name: str, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "plain" / "version_0").mkdir(parents=True)
    (tmp_path / "plain" / "version_0" / "metrics.csv").write_text("step,train_loss\n0,1.0\n")
    with SummaryWriter(str(tmp_path / "plain" / "version_1")) as writer:
        writer.add_scalar("train_loss", 1.0, 0)
    assert main(["report", str(tmp_path / name)]) == status
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith(f"attn-monitor: {message.format(tmp_path)}")
    assert printed.out == ""
    assert not list(tmp_path.rglob("*.html"))


def test_report_of_csv_has_a_summary_and_says_why_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = AttentionMonitor()
    quiet(logger=CSVLogger(tmp_path), callbacks=[monitor], max_steps=2).fit(Lit(), loader(2))
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("lightning_logs/version_0: 1 layer, 2 observations, steps 0 to 1\n")
    assert "logit_row_std of the worst head" in printed.out
    assert printed.err == ("attn-monitor: no HTML file: these runs stored no single heads, and a page shows heads\n")
    assert not list(tmp_path.rglob("*.html"))


def test_report_tells_what_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run().write(tmp_path)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().err.startswith(f"attn-monitor: {path}: the last record is unfinished, ")


def test_report_leaves_steps_out_of_large_runs_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(steps=range(101)).write(tmp_path)
    assert main(["report", str(tmp_path), "--max-megabytes", "0.03"]) == 0
    printed = capsys.readouterr()
    assert "of 101 observed steps are left out of the page" in printed.err
    assert "101 observations" in printed.out
    for wrong in ("0", "-1", "inf", "much"):
        assert main(["report", str(tmp_path), "--max-megabytes", wrong]) == 2
        assert f"expects a positive number of megabytes, got '{wrong}'" in capsys.readouterr().err


def run_command(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attn_monitor", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **settings)


def test_report_prints_on_any_terminal(tmp_path: Path) -> None:
    make_run(layers=HOSTILE).write(tmp_path)
    run = run_command("report", str(tmp_path), "--summary-only", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (run.returncode, run.stderr) == (0, "")
    assert f"{len(HOSTILE)} layers of 5 heads" in run.stdout
    assert "net[0]['x']" in run.stdout


def test_report_needs_neither_torch_nor_lightning_nor_a_reader(tmp_path: Path) -> None:
    make_run().write(tmp_path)
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'pytorch_lightning', 'lightning', 'torchmetrics'])); "
        f"from attn_monitor.cli import main; sys.exit(main(['report', {str(tmp_path)!r}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()  # as `| head` does
        assert run.stderr.read() == b""
        assert run.wait() == 0


def test_a_bar_shows_on_a_terminal_and_only_there(tmp_path: Path) -> None:
    make_run().write(tmp_path)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # a new one has no width
    command = [sys.executable, "-m", "attn_monitor", "report", str(tmp_path), "--summary-only"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, check=True)
    shown = os.read(ours, 10_000).decode()
    os.close(theirs)
    os.close(ours)
    assert "reading" in shown
    assert b"reading" not in run.stdout
    assert run_command("report", str(tmp_path), "--summary-only").stderr == ""
