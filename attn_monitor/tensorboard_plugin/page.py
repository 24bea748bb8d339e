"""The files of the page, by name: what the browser loads from TensorBoard, and what a report has inside."""

from __future__ import annotations

import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""What is served as it is."""
SCRIPT = Path(__file__).parent / "script"
"""The modules that `index.js` is joined from."""
FILES = {
    "index.js": "text/javascript",
    "index.css": "text/css",
    "uPlot.iife.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
}
"""The types of the files."""
IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+)\.js";\n', re.MULTILINE)
"""The one way in which a module of ours imports names from another one."""


def page_file(name: str) -> str:
    """Return the text of one of `FILES`.

    Raises:
        OSError: If it was not installed.
    """
    return join_modules(SCRIPT, "index") if name == "index.js" else (STATIC / name).read_text(encoding="utf-8")


def join_modules(folder: Path, name: str) -> str:
    """Return a module and all that it imports as one, which a report can have inside: it may load nothing.

    A module stands after what it imports. Their exports stay exports, and all share one scope.

    Args:
        folder: Where they lie.
        name: The module, without its ending.
    """
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        text = (folder / f"{name}.js").read_text(encoding="utf-8")
        for _, imported in IMPORT.findall(text):
            if imported not in texts:
                add(imported)
        texts[name] = IMPORT.sub("", text)

    add(name)
    return "\n".join(texts.values())
