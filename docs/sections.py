"""Lets the site show the sections called "Example" as code: griffe knows them in the plural only."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):  # mypy does not read this file: griffe comes with the extra docs
    """Puts the heading of an example into the plural while the site is built."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
