"""Inject every fault and write docs/reliability.md.

python -m tests.reliability
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path

import torch

from tests.reliability.every import FAULTS
from tests.reliability.page import PAGE, page, soak_section
from tests.reliability.registry import Verdict


def main() -> None:
    """Run all, and write the page if all of them pass."""
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    verdicts: dict[str, Verdict] = {}
    for fault in FAULTS.values():
        with tempfile.TemporaryDirectory() as folder:
            verdicts[fault.name] = fault.run(Path(folder))
        print(f"{fault.name}: {verdicts[fault.name].injected} injected", flush=True)
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    PAGE.write_text(page(verdicts, soak_section(before)), encoding="utf-8")


if __name__ == "__main__":
    main()
