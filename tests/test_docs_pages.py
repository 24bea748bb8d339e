"""The pages of the documentation: what is generated is up to date, what is public is documented, the site builds.

`python -m tests.docs_pages` writes what is generated.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

import attn_monitor
from attn_monitor import AttentionMonitor, QKClip, diagnosis
from attn_monitor.catalog import HEADLINE, STATISTICS
from tests.docs_pages import debugging, events, metrics, statistics, thresholds
from tests.docs_pages.blocks import DOCS, ROOT, filled
from tests.docs_pages.metrics import ALWAYS, CHOSEN, CLIPPED, DEFAULT, LAYER, SAMPLED, Metric
from tests.docs_pages.runs import COMMANDS
from tests.models import LIGHTNING_ADVICE, Lit, fit, read_events

pytestmark = LIGHTNING_ADVICE
AGAIN = "run python -m tests.docs_pages"
LAYERS = ("net.blocks.0", "net.blocks.1")
NESTED = sorted(DOCS.glob("*/*.md"))


def logged(**settings: Any) -> set[str]:
    """Return the tags of a small training in `callback_metrics`, with `<layer>` for the layers."""
    trainer, _ = fit(Lit("hand", "sdpa"), AttentionMonitor(**settings), 1)
    return patterns(tag for tag in trainer.callback_metrics if tag.startswith("attn"))


def patterns(tags: Any) -> set[str]:
    return {re.sub(rf"/({'|'.join(map(re.escape, LAYERS))})$", f"/{LAYER}", tag) for tag in tags}


def tags(rows: list[Metric], *when: str) -> set[str]:
    return {row.tag for row in rows if row.when in when}


# -- what is generated ------------------------------------------------------------------------------------------------


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert metrics.PAGE.read_text(encoding="utf-8") == metrics.page(), AGAIN


def test_the_remedies_are_those_of_the_events() -> None:
    assert events.PAGE.read_text(encoding="utf-8") == events.written(), AGAIN
    told = " ".join(helps for _, helps, _ in events.CAUSES)
    parts = {"FLOAT32", "SLOWER"}  # parts of others
    texts = {name for name, value in vars(diagnosis).items() if re.match("[A-Z]", name) and isinstance(value, str)}
    assert {name for name in texts - parts if getattr(diagnosis, name) not in told} == {"SPREAD"}  # a factor


def test_the_limits_are_those_of_the_code() -> None:
    assert thresholds.PAGE.read_text(encoding="utf-8") == thresholds.written(), AGAIN


@pytest.mark.parametrize("name", STATISTICS)
def test_the_page_of_a_statistic_is_up_to_date_and_complete(name: str) -> None:
    page = statistics.FOLDER / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    assert text == statistics.written(name), AGAIN
    assert re.findall(r"^#+ .*$", text, re.MULTILINE) == [
        f"# `{name}`",
        "## Formula",
        "## Healthy and sick",
        "## Source",
    ]
    assert (statistics.PICTURES / f"{name}.png").exists()
    assert f"| `{name}` at step |" in text, "run python -m tests.docs_pages --train"


def test_a_block_that_is_not_there_is_an_error() -> None:
    assert filled("a\n<!-- b -->\nold\n<!-- /b -->\nc", {"b": "new\n"}) == "a\n<!-- b -->\nnew\n<!-- /b -->\nc"
    with pytest.raises(ValueError, match="no block 'd'; write <!-- d -->"):
        filled("a", {"d": ""})


def test_the_page_on_debugging_has_the_commands_it_shows() -> None:
    text = debugging.PAGE.read_text(encoding="utf-8")
    assert [command for command in COMMANDS.values() if f"```console\n{command}\n```" not in text] == []
    assert not re.search(r"<!-- ([\w ]+) -->\n<!-- /", text), "run python -m tests.docs_pages --train"


# -- the logged metrics -----------------------------------------------------------------------------------------------


def test_by_default_exactly_these_are_logged() -> None:
    rows = [*metrics.of_layers(), *metrics.of_model()]
    assert logged() == tags(rows, ALWAYS, DEFAULT)


def test_with_every_statistic_exactly_these_are_logged() -> None:
    rows = [*metrics.of_layers(), *metrics.of_model()]
    assert logged(statistics=list(STATISTICS)) == tags(rows, ALWAYS, DEFAULT, CHOSEN)


def test_a_sample_and_qk_clip_add_one_each() -> None:
    assert logged(max_queries=2) & tags(metrics.of_model(), SAMPLED, CLIPPED) == tags(metrics.of_model(), SAMPLED)
    assert logged(mitigation=QKClip()) & tags(metrics.of_model(), SAMPLED, CLIPPED) == tags(metrics.of_model(), CLIPPED)


def test_loggers_get_these_and_tensorboard_the_overview_too(tmp_path: Path) -> None:
    board, table = TensorBoardLogger(tmp_path / "board"), CSVLogger(tmp_path / "table")
    fit(Lit("hand", "sdpa"), AttentionMonitor(), 1, logger=[board, table])
    of_all = tags([*metrics.of_layers(), *metrics.of_model()], ALWAYS, DEFAULT)
    header = (Path(table.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert patterns(tag for tag in header if tag.startswith("attn")) == of_all
    found = read_events(board.log_dir)
    assert patterns(tag for tag in found.Tags()["scalars"] if tag.startswith("attn")) == of_all | tags(
        metrics.on_top(), ALWAYS, DEFAULT
    )
    assert set(found.Tags()["images"]) == {f"attn_heads/{name}" for name in (*HEADLINE, "saturation_ratio")}


# -- what is public ---------------------------------------------------------------------------------------------------


def documented() -> list[str]:
    return re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_public_name_is_in_the_reference() -> None:
    names = {path.rpartition(".")[2] for path in documented()}
    assert set(attn_monitor.__all__) - {"__version__"} - names == set()
    kernels = importlib.import_module("attn_monitor.capture.kernels")
    functional = importlib.import_module("attn_monitor.functional")
    assert set(kernels.__all__) - names == set()
    defined = {
        name for name, value in vars(functional).items() if getattr(value, "__module__", "") == functional.__name__
    }
    assert {name for name in defined if not name.startswith("_")} - names == set()


@pytest.mark.parametrize("path", documented())
def test_what_the_reference_names_is_there_and_says_what_it_is(path: str) -> None:
    module, _, name = path.rpartition(".")
    target = getattr(importlib.import_module(module), name)
    assert target.__module__ == module, "name the module that defines it"
    assert len(target.__doc__ or "") > 20


def test_the_names_that_the_pages_import_are_documented() -> None:
    """Whatever a reader is told to import stands in the reference, or in the module that a page names for it."""
    imports = set()
    for page in [ROOT / "README.md", *DOCS.glob("**/*.md")]:
        for module, names in re.findall(
            r"^from (attn_monitor\S*) import (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            imports |= {(module, name.strip()) for name in names.split(",")}
    documented_names = {path.rpartition(".")[2] for path in documented()}
    assert {name for _, name in imports} - documented_names == set()


# -- the site ---------------------------------------------------------------------------------------------------------


def navigation() -> list[str]:
    """Return the pages of the navigation, in order."""
    return re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md"))
    assert sorted(navigation()) == pages


def test_statistics_are_in_the_order_of_the_catalog() -> None:
    assert [page for page in navigation() if page.startswith("statistics/")] == [
        f"statistics/{name}.md" for name in STATISTICS
    ]


@pytest.mark.parametrize("page", NESTED, ids=lambda page: page.stem)
def test_links_of_nested_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    files = [target.split("#")[0] for target in targets if not target.startswith(("http", "#"))]
    assert [target for target in files if not (page.parent / target).exists()] == []


def test_nested_pages_have_no_snippets_that_nobody_runs() -> None:
    assert [page.name for page in NESTED if "```python" in page.read_text(encoding="utf-8")] == []


def test_the_configuration_for_lightning_cli_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
    from pytorch_lightning.cli import LightningCLI

    text = (DOCS / "start.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^python train.py fit (.*)$", text, re.MULTILINE)
    (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr("sys.argv", ["train.py"])
    for arguments, patience in ((command.split(), 1), ([f"--config={tmp_path / 'config.yaml'}"], 3)):
        cli = LightningCLI(
            Lit,
            run=False,
            args=[*arguments, "--trainer.accelerator=cpu", "--trainer.logger=false"],
            save_config_callback=None,
            seed_everything_default=False,
        )
        callbacks: list[Any] = vars(cli.trainer)["callbacks"]
        (monitor,) = [found for found in callbacks if isinstance(found, AttentionMonitor)]
        assert (monitor.every_n_steps, monitor.saturation.patience) == (10, patience)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs: make docs")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert not re.search(r"^WARNING", built.stderr, re.MULTILINE)  # the theme prints an advertisement with that word
    for page in navigation():
        folder = page.removesuffix(".md").removesuffix("index")
        assert (tmp_path / "site" / folder / "index.html").exists()
    reference = (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    assert [path for path in documented() if f'id="{path}"' not in reference] == []
    shutil.rmtree(tmp_path / "site")
