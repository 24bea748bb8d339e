"""A zoo of real architectures, built from tiny random configs, in which every attention has to be found.

`python -m tests.zoo` writes what was found into docs/coverage.md.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded: all configs are here
