"""The section about the long training, and its curves."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.page import paragraph, table
from tests.reliability.page import PAGE, SOAK
from tests.soak.training import HEATED, Sample, Soak

PICTURE = PAGE.parent / "images" / "soak.svg"
SHOWN = {
    "rss": "resident memory, MiB",
    "seconds": "median step, ms",
    "tensors": "tensors alive",
    "objects": "objects that Python's garbage collector follows",
    "files": "open files",
    "tags": "scalar tags",
    "history": "records in `history`",
    "events": "events",
    "hooks": "hooks on the model between steps",
    "threads": "threads",
}
"""What is shown, and how it is called."""


def shown(sample: Sample, name: str) -> float:
    """Return a number in the unit it is shown in."""
    value = float(getattr(sample, name))
    return value * 1000 if name == "seconds" else value


def section(soak: Soak) -> str:
    """Return the section."""
    picked = [soak.samples[0], soak.samples[len(soak.samples) // 2 - 1], soak.samples[-1]]
    rows = [[title, *(f"{shown(sample, name):.4g}" for sample in picked)] for name, title in SHOWN.items()]
    told = paragraph(
        f"{soak.steps} steps of a model with two attentions, each observed and written to TensorBoard, one thread, "
        f"{soak.minutes:.0f} minutes; the files of the run then had {soak.size:.0f} MiB. Every {HEATED} steps a layer "
        "is made to saturate and to recover, so that events open and close. `history` fills up to its size and the "
        "list of events grows by the events; nothing else may grow. The time of a step is that of the clock on the "
        "wall: other work on the machine shows in it. Written by `python -m tests.soak`; a run of 500 steps is a test."
    )
    header = ["", *(f"step {sample.step}" for sample in picked)]
    curves = "![Memory, time of a step and counts over the steps](images/soak.svg)"
    return f"{SOAK}\n\n{told}\n{table(header, rows)}\n{curves}\n"


def draw(soak: Soak, path: Path) -> None:
    """Draw the curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "soak"  # the same picture has the same bytes
    figure, axes = plt.subplots(2, 3, figsize=(10, 5), layout="constrained")
    steps = [sample.step for sample in soak.samples]
    for axis, name in zip(axes.flat, list(SHOWN)[:6], strict=True):
        values = [shown(sample, name) for sample in soak.samples]
        axis.plot(steps, values)
        axis.set_title(SHOWN[name].replace("`", ""), fontsize=9)
        axis.set_ylim(0, 1.15 * max(values) or 1)
        axis.set_xlabel("step", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write(soak: Soak) -> None:
    """Put the section at the end of the page, and the picture beside it."""
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    PAGE.write_text(before.partition(SOAK)[0].rstrip("\n") + "\n\n" + section(soak), encoding="utf-8")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    draw(soak, PICTURE)
