"""The entry point of the tab. TensorBoard dies on whatever goes wrong here, so imports are few and late."""

from __future__ import annotations

import argparse
import logging

from tensorboard.plugins import base_plugin

NAME = "attn_monitor"
"""The plugin name that the tensors carry, see `attn_monitor.dashboards.tensorboard`."""
_log = logging.getLogger(__name__)


class Loader(base_plugin.TBLoader):  # type: ignore[misc]  # tensorboard has no hints
    """Makes the tab, or says in the log why there is none."""

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Keep all steps: of a plugin it does not know, TensorBoard keeps 10 or 100 tensors a tag.

        `--samples_per_plugin attn_monitor=500` still decides.
        """
        try:
            flags.samples_per_plugin.setdefault(NAME, 0)
        except Exception:
            _log.warning("The Attention tab cannot ask for all steps and shows a sample.", exc_info=True)

    def load(self, context: base_plugin.TBContext) -> base_plugin.TBPlugin | None:
        """Return the plugin, `None` if it cannot be made."""
        try:
            from attn_monitor.tensorboard_plugin.plugin import AttentionPlugin

            return AttentionPlugin(context)
        except Exception:
            _log.warning("The Attention tab of attn_monitor could not be loaded and is left out.", exc_info=True)
            return None
