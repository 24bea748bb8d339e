"""The command `tensorboard` as a user starts it, with the Attention tab in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.board import Server, start_command
from tests.event_data import make_event, make_run
from tests.models import LIGHTNING_ADVICE
from tests.tab_data import EVENTS, all_frames, assert_serves, decode

pytestmark = LIGHTNING_ADVICE
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocked())
"""
NO_LIGHTNING = ["pytorch_lightning", "lightning", "torchmetrics"]


def loaded(server: Server) -> bool:
    """Tell whether both data paths' lazy loading is done: the last table and the scalar are there."""
    answer = server.get("line", run="one", layer=0, head=0)
    return (
        answer.status == 200
        and answer.body["statistics"].keys() == make_run().tables.keys()
        and all(len(line["steps"]) == 7 for line in answer.body["statistics"].values())
        and "one" in server.ask("/data/plugin/scalars/tags").body
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocked", [[], NO_LIGHTNING, [*NO_LIGHTNING, "torch"]], ids=["all", "no lightning", "no torch"]
)
def test_the_command_serves_every_tab_on_its_default_data_path(tmp_path: Path, blocked: list[str]) -> None:
    make_run(events=EVENTS).write(tmp_path / "one")
    writer = SummaryWriter(str(tmp_path / "one"))
    writer.add_histogram("weights", np.arange(11.0), 0)
    writer.add_text("note", "hello", 0)
    writer.close()
    with start_command(tmp_path, before=BLOCK.format(blocked=blocked)) as server:
        server.wait(loaded)
        assert_serves(server)
        listing = server.ask("/data/plugins_listing").body
        enabled = {name for name, plugin in listing.items() if plugin["enabled"]}
        assert {"scalars", "histograms", "text", "timeseries", "attn_monitor"} <= enabled
        assert server.ask("/data/plugin/histograms/tags").body["one"]["weights"]
        assert server.ask("/data/plugin/scalars/tags").body["one"]["train_loss"]


@pytest.mark.slow
def test_the_command_starts_when_our_plugin_is_broken(tmp_path: Path) -> None:
    make_run().write(tmp_path / "one")
    broken = BLOCK.format(blocked=["attn_monitor_does_not_matter"]) + (
        "import attn_monitor.tensorboard_plugin\n"
        "sys.modules['attn_monitor.tensorboard_plugin.plugin'] = None  # importing it fails\n"
    )
    with start_command(tmp_path, before=broken) as server:
        server.wait(lambda server: "one" in server.ask("/data/plugin/scalars/tags").body)
        listing = server.ask("/data/plugins_listing").body
        assert listing["scalars"]["enabled"]
        assert "attn_monitor" not in listing


@pytest.mark.slow
def test_the_default_data_path_keeps_all_steps_and_follows_a_resumed_run(tmp_path: Path) -> None:
    run = make_run(steps=range(0, 1212, 4), layers=("a", "b"), heads=3)
    run.write(tmp_path / "long")
    lost = {10: [make_event(10, "layers.0.attn", 1)], 50: [make_event(50, "layers.0.attn", 2)]}
    first, second = make_run(seed=1, events=lost), make_run(seed=2)
    first.write(tmp_path / "one", range(6))
    second.write(tmp_path / "one", [0])
    second.write(tmp_path / "one", range(2, 5))
    with start_command(tmp_path) as server:
        server.wait(lambda server: {"long", "one"} <= set(server.get("runs").body))
        server.wait(lambda server: len(server.get("meta", run="long").body["steps"]) == 303)
        np.testing.assert_array_equal(decode(all_frames(server, "long", "q_rms")), run.tables["q_rms"])
        server.wait(lambda server: server.get("meta", run="one").body["steps"] == [0, 20, 30, 40])
        assert server.get("events", run="one").body == []
        np.testing.assert_array_equal(decode(all_frames(server, "one", "q_rms")), second.tables["q_rms"][[0, 2, 3, 4]])
