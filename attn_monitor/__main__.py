"""`python -m attn_monitor` is `attn-monitor`."""

from __future__ import annotations

import sys

from attn_monitor.cli import main

if __name__ == "__main__":
    sys.exit(main())
