"""Peak memory as the system sees it, which also counts what no profiler of torch does.

Linux keeps the highest resident size of a process and resets it on request. Freed buffers must go back to the system at
once for that to mean anything, and glibc does so only in a process that was started to.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESET = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
ROOT = Path(__file__).parents[2]
MIB = 1024.0
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "0"}


def measurable() -> bool:
    """Tell whether this system keeps the highest resident size and resets it."""
    try:
        RESET.write_text("5")
        return "VmHWM" in STATUS.read_text()
    except OSError:
        return False


def resident(field: str) -> float:
    """Return a size of this process in MiB: `VmRSS` now, `VmHWM` the highest since the last reset."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None, "checked by `measurable`"
    return int(found[1]) / MIB


class Peak:
    """Measures the highest resident size, in MiB; `above` what there was at the start, if wanted."""

    def __init__(self, *, above: bool = False) -> None:
        self._above = above
        self._before = 0.0

    def start(self) -> None:
        """Forget what was higher before."""
        RESET.write_text("5")
        self._before = resident("VmRSS") if self._above else 0.0

    def stop(self) -> float:
        """Return the highest size since the start."""
        return resident("VmHWM") - self._before


def in_fresh_process(what: str, rounds: int, *, quick: bool) -> Any:
    """Return what `tests.benchmarks.peaks` measures, `None` on a system that does not tell.

    Args:
        what: Its argument.
        rounds: Where time is measured as well.
        quick: Whether to take the tiny sizes.
    """
    if not measurable():
        return None
    command = [sys.executable, "-m", "tests.benchmarks.peaks", what, f"--rounds={rounds}", *["--quick"] * quick]
    environment = {**os.environ, **RETURNING, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    output = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])
