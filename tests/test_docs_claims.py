"""What hand-written pages ask to install and what they quote: a reader who follows them gets there."""

from __future__ import annotations

import ast
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from attn_monitor import AttentionMonitor, AttentionWarning
from attn_monitor.clip_records import ClippedHead, first_clip
from attn_monitor.notices import Notices
from tests.flights import Planted, written
from tests.models import LIGHTNING_ADVICE, fit
from tests.test_examples import PAGES, ROOT

pytestmark = LIGHTNING_ADVICE
EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
REQUIREMENTS = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
[PLAIN] = re.findall(r"^dependencies = \[\n(.*?)^\]", REQUIREMENTS, re.MULTILINE | re.DOTALL)
[EXTRA] = re.findall(r"^examples = \[(.*?)\]", REQUIREMENTS, re.MULTILINE | re.DOTALL)
PACKAGES = {
    "lightning_fabric": "pytorch-lightning",  # which ships it
    "pytorch_lightning": "pytorch-lightning",
    "sklearn": "scikit-learn",
}
OWN = {"attn_monitor", "examples"}
TOLD: list[tuple[str, str]] = [(page, (ROOT / page).read_text(encoding="utf-8")) for page in PAGES]


def named(name: str, requirements: str) -> bool:
    return re.search(rf'"{re.escape(name)}[>"]', requirements) is not None


def needed(example: str) -> set[str]:
    """Return what an example imports that a plain installation does not bring, as one would ask pip for it."""
    found = set()
    for node in ast.walk(ast.parse(EXAMPLES[example].read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in {name.partition(".")[0] for name in names} - OWN - sys.stdlib_module_names:
            package = PACKAGES.get(module, module)
            if not named(package, PLAIN):
                found.add("'.[examples]'" if named(package, EXTRA) else package)
    return found


def unmet(text: str) -> list[str]:
    """Return the commands of a text that run an example without having said what it needs.

    It is said before the command, or in its row of a table. What `make` installed has everything.
    """
    missing = []
    for command in re.finditer(r"(?<!\.venv/bin/)python examples/(\w+)\.py", text):
        end_of_line = text.find("\n", command.end())
        before = text[: end_of_line if text[command.start() - 3 : command.start()] == "| `" else command.start()]
        asked = " ".join(re.findall(r"pip install ([^`\n#]*)", before)).split()
        missing += [f"{command[0]}: {name}" for name in sorted(needed(command[1]) - set(asked))]
    return missing


def test_what_the_examples_need_is_found() -> None:
    assert needed("plain_loop") == needed("fabric_loop") == set()
    assert needed("char_gpt") == needed("vit_digits") == {"'.[examples]'"}
    assert needed("transformers_trainer") == {"transformers"}
    assert unmet("pip install .\npython examples/char_gpt.py\n") == ["python examples/char_gpt.py: '.[examples]'"]
    assert unmet("| `python examples/accelerate_loop.py` | x | `pip install accelerate` |\n") == []
    assert unmet("`.venv/bin/python examples/char_gpt.py`\n") == []


@pytest.mark.parametrize(("page", "text"), TOLD, ids=[page for page, _ in TOLD])
def test_the_page_says_what_its_examples_need(page: str, text: str) -> None:
    assert unmet(text) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_says_what_it_needs(example: str) -> None:
    text = ast.get_docstring(ast.parse(EXAMPLES[example].read_text(encoding="utf-8"))) or ""
    assert f"python examples/{example}.py" in text
    assert unmet(text) == []


def test_pages_that_show_lightning_cli_say_that_it_needs_jsonargparse() -> None:
    showing = [text for _, text in TOLD if "python train.py fit" in text]
    assert len(showing) == 2
    for text in showing:
        assert text.index("pip install 'jsonargparse[signatures]'") < text.index("python train.py fit")


def test_the_first_screen_leads_to_a_flagged_head() -> None:
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:12]
    commands = [line.split("#")[0].strip() for line in first_screen if "    #" in line]
    assert commands == ["pip install .", "attn-monitor demo"]


def test_the_growth_of_the_factors_multiplies_to_the_whole() -> None:
    text = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    table = text[text.index("<!-- factors -->") : text.index("<!-- /factors -->")]
    rows = {
        name: tuple(map(float, values))
        for name, *values in re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) x \|$", table, re.MULTILINE)
    }
    whole, *factors = rows.values()
    assert list(rows) == ["logit_row_std", "scale_ratio", "q_rms", "k_rms", "alignment", "rest"]
    for column in range(3):
        product = torch.tensor([factor[column] for factor in factors]).prod().item()
        assert product == pytest.approx(whole[column], rel=0.02)  # three digits each


def test_the_first_clip_is_told_as_the_page_quotes_it() -> None:
    notices, factor = Notices(), 0.7**0.5
    clipped = [ClippedHead("layers.3.attn", 1, logit_max=143.0, gamma=0.7, factors=(factor, factor))]
    notices.add_layers("QK-Clip", first_clip(clipped, tau=100.0, step=120))
    with pytest.warns(AttentionWarning) as told:
        notices.say(aloud=True)
    [text] = [str(warning.message) for warning in told]
    assert f"```text\n{text}\n```" in (ROOT / "docs" / "qk_clip.md").read_text(encoding="utf-8")


class NanInput(Planted):
    """Is given nothing but nan at one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        [x] = batch
        return super().training_step([x * math.nan] if self.global_step == self.step else batch, batch_idx)


@pytest.mark.parametrize(
    ("model", "basis", "words"),
    [
        (Planted(layer=0, head=1, step=3, value=math.nan), "logits", "it begins in head 1 of net.blocks.0"),
        (NanInput(layer=0, head=1, step=3, value=0.0), "largest", "so that the first one cannot be told; the largest"),
    ],
)
def test_every_step_observed_names_the_head_where_nan_began_unless_all_are_nan(
    model: Planted, basis: str, words: str, tmp_path: Path
) -> None:
    logger, monitor = CSVLogger(tmp_path), AttentionMonitor(every_n_steps=1)
    fit(model, monitor, 5, logger=logger)
    began = written(logger.log_dir)[0].began
    assert began is not None
    assert (began.step, began.basis) == (3, basis)
    assert words in began.text
