"""The command `attn-monitor report`: what it prints, what it writes, and what it says where it cannot."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from attn_monitor import AttentionMonitor
from attn_monitor.cli import main
from tests.event_data import HOSTILE, make_event, make_run
from tests.models import DIM, HEADS, LIGHTNING_ADVICE, Lit, loader, quiet

pytestmark = LIGHTNING_ADVICE
ROOT = Path(__file__).parent.parent


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
    assert lines[1].startswith("  first event, critical: step 0: head ")


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
