"""The modules of the tab's script: what they import, and how they are joined into one."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from attn_monitor.tensorboard_plugin.page import IMPORT, SCRIPT, join_modules, page_file

MODULES = {path.stem: path.read_text(encoding="utf-8") for path in SCRIPT.iterdir()}
TOP = re.compile(r"^(export )?(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)


def imports(name: str) -> dict[str, str]:
    """Return what a module imports, and from which one."""
    return {one: module for names, module in IMPORT.findall(MODULES[name]) for one in names.split(", ")}


def used(text: str) -> set[str]:
    """Return the names in code, without properties and keys, and without words in comments and plain strings."""
    code = re.sub(r"/\*.*?\*/|(?<=\s)//[^\n]*", "", IMPORT.sub("", text), flags=re.DOTALL)
    code = re.sub(r'"[^"\n]*"', '""', code).replace("...", " ")
    return set(re.findall(r"(?<![.\w])\w+", re.sub(r"(?<=[{,]\s)\w+:", "", code)))


def test_imports_run_one_way_and_reach_every_module() -> None:
    order = list(TopologicalSorter({name: set(imports(name).values()) for name in MODULES}).static_order())
    assert set(order) == set(MODULES)
    joined = page_file("index.js")
    assert [name for name, text in MODULES.items() if joined.count(IMPORT.sub("", text)) != 1] == []


def test_every_import_is_in_the_one_form_that_is_joined() -> None:
    assert not re.search(r"^import\b|\bimport\(|^export (default|\*|\{)", page_file("index.js"), re.MULTILINE)


def test_names_at_the_top_of_the_modules_differ() -> None:
    names = [name for text in MODULES.values() for _, name in TOP.findall(text)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_what_it_uses_and_nothing_else(name: str) -> None:
    homes = {one: module for module, text in MODULES.items() for _, one in TOP.findall(text) if module != name}
    exported = {one for text in MODULES.values() for export, one in TOP.findall(text) if export}
    assert {one: module for one, module in homes.items() if one in used(MODULES[name])} == imports(name)
    assert set(imports(name)) <= exported


def test_a_module_stands_once_and_after_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "top.js").write_text('import { a } from "./left.js";\nimport { b, c } from "./base.js";\n\na(b, c);\n')
    (tmp_path / "left.js").write_text('import { b } from "./base.js";\n\nexport const a = b;\n')
    (tmp_path / "base.js").write_text("export const b = 1;\nexport const c = 2;\n")
    (tmp_path / "other.js").write_text("nobody imports this\n")
    joined = "export const b = 1;\nexport const c = 2;\n\n\nexport const a = b;\n\n\na(b, c);\n"
    assert join_modules(tmp_path, "top") == joined


def test_a_module_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "top.js").write_text('import { a } from "./gone.js";\n')
    with pytest.raises(FileNotFoundError, match=r"gone\.js"):
        join_modules(tmp_path, "top")
