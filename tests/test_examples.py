"""The example and every Python snippet of the documentation, run as a reader would run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from attn_monitor import AttentionMonitor, AttentionStatistics, SaturationEvent
from attn_monitor.cli import build_parser
from examples import char_gpt

ROOT = Path(__file__).parent.parent
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"^```output\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class YourModel(pl.LightningModule):
    """What a snippet calls `model`: some attention that can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(d_model=32, nhead=4, dim_feedforward=32, batch_first=True)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.encoder(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def snippets(page: str) -> str:
    """Return the snippets of a page as one program, with the line numbers of the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in SNIPPET.finditer(text):
        first = text.count("\n", 0, match.start(1))
        body = match.group(1).splitlines()
        lines[first : first + len(body)] = body
    return "\n".join(lines)


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page).strip()])
# Lightning says so of any training as short as these.
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_snippets_of_the_page_run_and_print_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"model": YourModel(), "data": torch.randn(4, 2, 6, 32), "__name__": "snippet"}
    exec(compile(snippets(page), page, "exec"), namespace)
    printed = capsys.readouterr().out
    for output in OUTPUT.findall((ROOT / page).read_text(encoding="utf-8")):
        assert output in printed


def test_the_first_screen_shows_the_monitor() -> None:
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40]
    assert any("AttentionMonitor()" in line for line in first_screen)
    assert any(line.startswith("![") for line in first_screen)


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_page_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    files = [target.split("#")[0] for target in targets if not target.startswith(("http", "#"))]
    assert [target for target in files if not ((ROOT / page).parent / target).exists()] == []


def run_example(*arguments: str, logdir: Path) -> subprocess.CompletedProcess[str]:
    """Run the example as `make demo` does."""
    command = [sys.executable, "examples/char_gpt.py", *arguments, "--logdir", str(logdir)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute on two idle cores
def test_demo_flags_the_collapsing_run_and_not_the_healthy_one(tmp_path: Path) -> None:
    # 60 of the 300 steps: long enough to collapse, and to pass the place where the healthy run peaks.
    run = run_example("--steps", "60", logdir=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "collapsing" in run.stdout
    assert "healthy" in run.stdout
    assert f"tensorboard --logdir {tmp_path}" in run.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["collapsing", "healthy"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # a head is flagged, which is right; and Lightning's advice
def test_a_scaled_run_with_qk_norm_at_three_times_its_learning_rate_has_no_critical_event(tmp_path: Path) -> None:
    recipe = char_gpt.Recipe("own", 3 * char_gpt.HEALTHY.lr, None, True)
    outcome = char_gpt.train(recipe, char_gpt.read_text(), 300, 0, tmp_path)
    assert len(outcome.monitor.history) >= 31  # and more where heads are near their limits
    assert [event for event in outcome.monitor.events if event.severity == "critical"] == []


EXAMPLES = {
    "accelerate_loop": "step 20: self_attn, largest ",
    "compiled": "1 graphs after the first step, 1 after the last",
    "custom_kernel": "fast: entropy_normalized ",
    "fabric_loop": "step 20: self_attn, largest ",
    "plain_loop": "step  50: loss 0.",
    "transformers_finetune": "step 95, bert.bert.encoder.layer.1.attention.self: ",
    "transformers_trainer": ", bert.encoder.layer.1.attention.self: entropy_normalized by head",
    "vit_digits": "encoder.layers.1.self_attn: entropy_normalized by head",
}
"""The examples that check themselves, and something that each prints."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_passes_its_own_checks(name: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,  # some write to runs/
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert EXAMPLES[name] in run.stdout


def test_every_example_is_run_by_a_test() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert found - set(EXAMPLES) == {"char_gpt", "contrastive", "why_sqrt_dk"}  # these have tests of their own


COMMAND = re.compile(r"(?:^|`)(?:\$ )?(attn-monitor\b[^`\n]*)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_are_understood(page: str) -> None:
    """Blocks for a shell and commands in the text alike; what is no command is a heading or a name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in COMMAND.findall(text):
        arguments = shlex.split(found, comments=True)[1:]
        if len(arguments) == 1 and arguments[0] in ("demo", "inspect", "report", "version"):
            continue  # only named
        if arguments and arguments[0] not in ("--help", "COMMAND", "--version"):
            assert build_parser().parse_args(arguments).command == arguments[0], found
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets
    assert [name for name in re.findall(r"examples/(\w+\.py)", text) if not (ROOT / "examples" / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_code_of_the_page_escapes_the_tests(page: str) -> None:
    languages = re.findall(
        r"^ *```(\w*)[^\n]*\n(?:.*?)^ *```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert set(languages) <= {"python", "output", "text", "console", "mermaid", "yaml", "toml"}


@pytest.mark.slow
def test_own_run_takes_its_recipe_from_the_command_line(tmp_path: Path) -> None:
    run = run_example("--lr", "1e-3", "--scale", "0.5", "--qk-norm", "--steps", "2", logdir=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "lr 0.001, scale 0.5, QK-norm" in " ".join(run.stdout.split())
    commands = [line.split(":", 1)[1].strip() for line in run.stdout.splitlines()[-2:]]
    programs = Path(sys.executable).parent
    assert commands == [f"{programs}/tensorboard --logdir {tmp_path}", f"{programs}/attn-monitor report {tmp_path}"]


def test_the_first_event_of_the_table_is_the_worst_head_of_its_step() -> None:
    """Whatever became of the heads later: an event that turned critical has the numbers of that step."""
    monitor = AttentionMonitor()
    for head, (step, ratio) in enumerate([(9, 4.0), (9, 0.7), (9, 3.0), (19, 5.0)]):
        monitor.events.append(
            SaturationEvent(
                step=step,
                layer="attn",
                head=head,
                statistic="logit_row_std",
                value=4 * ratio,
                head_dim=16,
                ratio=ratio,
                threshold=0.5,
                severity="critical" if ratio > 1 else "warning",
            )
        )
    ones = torch.ones(4)
    for step, spread in ((9, [2.4, 2.8, 2.1, 1.0]), (19, [16.0, 2.8, 12.0, 20.0])):
        stats = AttentionStatistics(
            logit_row_std=torch.tensor(spread),
            entropy_normalized=ones,
            jacobian_trace=ones,
            grad_logits_norm=ones,
            scale=ones,
            scale_ratio=ones,
            rows=ones,
            masked_rows=ones,
            nonfinite=ones,
            head_dim=16,
            keys=5,
            calls=1,
        )
        monitor.history.append((step, {"attn": stats}))
    outcome = char_gpt.Outcome(char_gpt.COLLAPSING, monitor, 1.0)
    assert outcome.rows()["first event"] == "step 9, attn head 1"


def test_batches_follow_the_text_by_one_character() -> None:
    text = torch.arange(1000) % char_gpt.VOCABULARY
    batches = list(char_gpt.RandomWindows(text, steps=3, seed=7))
    assert len(batches) == 3
    for piece, following in batches:
        assert piece.shape == following.shape == (char_gpt.BATCH, char_gpt.CONTEXT)
        assert torch.equal(following, (piece + 1) % char_gpt.VOCABULARY)
    repeated = list(char_gpt.RandomWindows(text, steps=3, seed=7))
    assert torch.equal(repeated[2][0], batches[2][0])


def test_the_commands_that_prove_a_claim_select_tests() -> None:
    names = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    claims = re.findall(r"pytest -k (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert claims
    assert [claim for claim in claims if not re.search(rf"def test_\w*{claim}", names)] == []
