"""Train for a long time, and write the section of docs/reliability.md about it.

    python -m tests.soak [--steps N] [--data FILE]

What was measured is kept in the file; where it exists already, only the page is written.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.soak.page import write
from tests.soak.training import Soak, soak


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure unless that was done, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="observed steps")
    parser.add_argument("--data", type=Path, help="where to keep what was measured")
    given = parser.parse_args(arguments)
    if given.data is not None and given.data.exists():
        write(Soak.of_data(json.loads(given.data.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = soak(given.steps, Path(folder))
    if given.data is not None:
        given.data.write_text(json.dumps(found.as_data()), encoding="utf-8")
    write(found)


if __name__ == "__main__":
    main()
