"""Measure peak memory in this process and print it as JSON: `memory.in_fresh_process` starts it as it must be started.

python -m tests.benchmarks.peaks steps|alone --rounds N [--quick]
"""

from __future__ import annotations

import argparse
import json

from tests.benchmarks.sizes import FULL, QUICK


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "alone"])
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    # The statistics alone need no Lightning, and are measured without it.
    if arguments.what == "steps":
        from tests.benchmarks import steps

        print(json.dumps(steps.peaks(sizes)))
    else:
        from tests.benchmarks import alone

        print(json.dumps(alone.in_this_process(sizes, arguments.rounds)))


if __name__ == "__main__":
    main()
