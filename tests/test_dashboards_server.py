"""What a real TensorBoard serves of a real run: in this process, and by its default data server in another one."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard import program

from attn_monitor import AttentionMonitor
from attn_monitor.catalog import GRADIENTS, HEADLINE, STATISTICS
from attn_monitor.dashboards.pictures import draw
from attn_monitor.dashboards.tables import Rows
from attn_monitor.scales import RATIO
from tests.cases.support import Thermostat, Trained, fit, serve
from tests.models import LIGHTNING_ADVICE

pytestmark = [
    *LIGHTNING_ADVICE,
    # A library that TensorBoard brings along, on the first text that is rendered.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard._vendor.*"),
]
Get = Callable[..., Any]
STEPS = 4
SHOWN = [name for name in HEADLINE if name not in GRADIENTS]  # the logits of this model are no function of a weight


def sick_run(folder: Path) -> AttentionMonitor:
    """Train a model that saturates at step 1 and recovers at step 3."""
    net = Thermostat()

    def script(step: int) -> None:
        net.std = 50.0 if step in (1, 2) else 1.0

    monitor = AttentionMonitor(custom_scalars=True)
    logger = TensorBoardLogger(folder, name="", version="")
    _, said = fit(Trained(net, script, lr=0.0), monitor, serve(torch.zeros(STEPS, 1)), logger=logger)
    assert len(said) == 1
    return monitor


def getter(url: str) -> Get:
    """Return a function that fetches a route of the plugins."""

    def get(route: str, **query: str) -> Any:
        address = f"{url.rstrip('/')}/data/plugin/{route}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            content = answer.read()
            return json.loads(content) if "json" in answer.headers["Content-Type"] else content

    return get


def check(get: Get, monitor: AttentionMonitor) -> None:
    """Compare everything that is served with what was computed."""
    records = [record["net"] for _, record in monitor.history]
    run = "."
    described = get("scalars/tags")[run]
    for name in SHOWN:
        values = torch.stack([getattr(record, name) for record in records])
        worst = {"up": ("_max", values.amax(1)), "down": ("_min", values.amin(1)), None: ("", values.mean(1))}
        suffix, largest = worst[STATISTICS[name].worse]
        for tag, wanted in ((f"attn_{name}/net", values.mean(1)), (f"attn_{name}{suffix}/net", largest)):
            points = get("scalars/scalars", run=run, tag=tag)
            assert [point[1] for point in points] == list(range(STEPS))
            np.testing.assert_allclose([point[2] for point in points], wanted, rtol=1e-5)
            assert "a pure number" in described[tag]["description"], tag
    assert [point[2] for point in get("scalars/scalars", run=run, tag="attn/saturated_heads")] == [0, 2, 2, 0]
    assert min(tag for tag in described if tag.startswith("attn")).startswith("attn/")  # on top of our groups

    rows = Rows()
    shots = [rows.take(step, record, monitor.saturation) for step, record in monitor.history]
    pictures = get("images/tags")[run]
    assert set(pictures) == {f"attn_heads/{name}" for name in (*SHOWN, RATIO)}
    assert "Blue below the limit of 0.5" in pictures[f"attn_heads/{RATIO}"]["description"]
    images = get("images/images", run=run, tag=f"attn_heads/{RATIO}", sample="0")
    assert [image["step"] for image in images] == list(range(STEPS))
    for image, shot in zip(images, shots, strict=True):
        content = get("images/individualImage", **dict(urllib.parse.parse_qsl(image["query"])))
        shown = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        np.testing.assert_array_equal(shown, draw(RATIO, shot, 0.5).rgb())

    histograms = get("histograms/tags")[run]
    assert set(histograms) == {f"attn_heads_histogram/{name}" for name in (*SHOWN, RATIO)}
    assert "a pure number" in histograms["attn_heads_histogram/logit_std"]["description"]
    for _, step, buckets in get("histograms/histograms", run=run, tag="attn_heads_histogram/entropy_normalized"):
        heads = records[step].entropy_normalized
        assert sum(count for _, _, count in buckets) == 2
        assert (buckets[0][0], buckets[-1][1]) == (pytest.approx(float(heads.min())), pytest.approx(float(heads.max())))

    texts = get("text/tags")[run]
    assert set(texts) == {f"attn_monitor/{name}/text_summary" for name in ("events", "summary", "legend")}
    pages = get("text/text", run=run, tag="attn_monitor/events/text_summary")
    assert [page["step"] for page in pages] == [1, 3]
    assert all(f"head {head} of net is saturated" in pages[0]["text"] for head in (0, 1))  # both, though of one step
    assert "recovered" in pages[1]["text"]
    assert "<table>" in get("text/text", run=run, tag="attn_monitor/summary/text_summary")[-1]["text"]

    layout = get("custom_scalars/layout")
    assert [category["title"] for category in layout["category"]] == [
        f"attn_{name}" for name in SHOWN if STATISTICS[name].worse
    ]


def test_tensorboard_serves_what_was_computed(tmp_path: Path) -> None:
    monitor = sick_run(tmp_path)
    server = program.TensorBoard()
    flags = ["--host=127.0.0.1", "--port=0", "--load_fast=false", "--reload_interval=0"]
    server.configure(argv=["tensorboard", f"--logdir={tmp_path}", *flags])
    check(getter(server.launch()), monitor)


@pytest.mark.slow
def test_the_default_data_server_serves_the_same(tmp_path: Path) -> None:
    monitor = sick_run(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [f"--logdir={tmp_path}", f"--port={port}", "--host=127.0.0.1", "--load_fast=true"]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        get = getter(f"http://127.0.0.1:{port}/")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if get("scalars/tags"):  # the server answers before it has read anything
                    break
            except (urllib.error.URLError, ConnectionError):
                pass
            time.sleep(0.2)
        check(get, monitor)
    finally:
        server.terminate()
        server.wait(10)
