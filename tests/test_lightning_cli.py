"""The monitor from the command line and the config files of LightningCLI."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI
from torch.utils.data import DataLoader

from attn_monitor import AttentionMonitor
from tests.models import LIGHTNING_ADVICE, Lit, loader

pytestmark = [
    *LIGHTNING_ADVICE,
    pytest.mark.filterwarnings("ignore::attn_monitor.events.AttentionWarning"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]

QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.num_sanity_val_steps=0",
]
ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "loops.md").read_text(encoding="utf-8")
[CONFIG] = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
[COMMAND] = re.findall(r"^python train.py fit (.*)$", PAGE, re.MULTILINE)


class Model(Lit):
    """A model with one argument, as a LightningCLI wants it."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__("hand", "sdpa", gain=gain)


class Data(pl.LightningDataModule):
    """Seven batches."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(7)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what runs a command line and gives the CLI and its monitor back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr("sys.argv", ["train"])

    def fit(*arguments: str) -> tuple[LightningCLI, AttentionMonitor]:
        cli = LightningCLI(Model, Data, args=["fit", *QUIET, *arguments], seed_everything_default=False)
        [monitor] = [found for found in vars(cli.trainer)["callbacks"] if isinstance(found, AttentionMonitor)]
        return cli, monitor

    return fit


def test_one_option_adds_the_monitor(run: Any, tmp_path: Path) -> None:
    _, monitor = run("--trainer.callbacks+=attn_monitor.AttentionMonitor", "--trainer.log_every_n_steps=3")
    assert [step for step, _ in monitor.history] == [0, 2, 5]
    # The config that the CLI saves beside the run, which starts the same run again.
    [saved] = tmp_path.rglob("config.yaml")
    _, again = run(f"--config={saved}")
    assert [step for step, _ in again.history] == [0, 2, 5]
    assert again.saturation == monitor.saturation


def test_the_command_of_the_documentation(run: Any) -> None:
    _, monitor = run(*COMMAND.split())
    assert [step for step, _ in monitor.history] == [0, 4]


def test_options_follow_the_callback(run: Any) -> None:
    _, monitor = run(
        "--trainer.callbacks+=attn_monitor.AttentionMonitor",
        "--trainer.callbacks.every_n_steps=5",
        "--trainer.callbacks.statistics=[entropy,logit_max]",
        "--trainer.callbacks.gradients=false",
        "--trainer.callbacks.saturation=attn_monitor.SaturationRule",
        "--trainer.callbacks.saturation.threshold=0.3",
    )
    assert [step for step, _ in monitor.history] == [0, 4]
    assert monitor.saturation.threshold == 0.3
    stats = monitor.history[0][1]["net.blocks.0"]
    assert stats.entropy is not None
    assert stats.jacobian_trace is None


def test_a_config_file_holds_rule_and_mitigation(run: Any, tmp_path: Path) -> None:
    (tmp_path / "attention.yaml").write_text(CONFIG)
    _, monitor = run("--config=attention.yaml", "--model.gain=9")
    rule = monitor.saturation
    assert (monitor.every_n_steps, monitor.modules) == (2, ["net.*"])
    assert (rule.threshold, rule.patience, dict(rule.overrides)) == (0.4, 2, {"net.blocks.0": 0.8})
    assert {event.layer: event.threshold for event in monitor.events} == {"net.blocks.0": 0.8, "net.blocks.1": 0.4}


def test_a_wrong_argument_is_told_as_such(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("--trainer.callbacks+=attn_monitor.AttentionMonitor", "--trainer.callbacks.every_n_step=5")
    assert stop.value.code == 2
    assert "every_n_step" in capsys.readouterr().err
