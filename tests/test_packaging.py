"""The package as an installer and an importer meet it."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import attn_monitor
import attn_monitor.functional

ROOT = Path(__file__).parent.parent


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_import_is_light() -> None:
    loaded = run_python("import attn_monitor, sys; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert "attn_monitor" in loaded
    assert not {"torch", "numpy", "pytorch_lightning", "lightning", "torchmetrics", "tensorboard"} & set(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["functional", "probe"])
def test_torch_users_do_not_pay_for_lightning(name: str) -> None:
    loaded = run_python(f"import attn_monitor.{name}, sys; print(*sys.modules)").split()
    assert not {"pytorch_lightning", "lightning", "tensorboard"} & set(loaded)


@pytest.mark.parametrize("name", attn_monitor.__all__)
def test_public_name_is_importable(name: str) -> None:
    assert getattr(attn_monitor, name) is not None
    assert name in dir(attn_monitor)


@pytest.mark.parametrize("name", ["attention_statistics", "softmax_statistics"])
def test_public_function_is_importable(name: str) -> None:
    assert callable(getattr(attn_monitor.functional, name))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'attn_monitor' has no attribute 'AttentionMonitr'"):
        _ = attn_monitor.AttentionMonitr


def test_version_has_one_source() -> None:
    assert version("attn-monitor") == attn_monitor.__version__
    assert attn_monitor.__version__ not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "attn_monitor").rglob("*.py")}
    assert modules <= names
    assert "attn_monitor/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"attn_monitor"}


ROOMS = {
    "words": {
        "catalog",
        "records",
        "settings",
        "unseen",
        "phrases",
        "scales",
        "tags",
        "checksum",
        "tensor_parallel",
    },
    "numerics": {
        "functional",
        "arguments",
        "statistics",
        "gradients",
        "softmax_gradients",
        "passes",
        "allowed",
        "sizes",
        "sums",
        "uncertainty",
        "metric",
        "rows",
        "tiles",
        "relative",
        "masking",
        "precision",
        "workspace",
        "crew",
        "pooling",
        "waiting",
        "stacking",
        "looks",
        "head_norms",
        "ranks",
    },
    "judging": {
        "saturation",
        "events",
        "growth",
        "diagnosis",
        "severity",
        "tracking",
        "forecast",
        "audit",
        "judge",
    },
    "capture": {"capture"},
    "probe": {
        "probe",
        "collector",
        "placement",
        "taps",
        "linear_outputs",
        "call_evidence",
        "head_weights",
        "weight_uses",
        "projections",
        "clip_effect",
        "clip_records",
        "qk_clip",
    },
    "showing": {
        "dashboards",
        "views",
        "flight_records",
        "stored_events",
        "tensorboard_plugin",
        "reports",
        "inspection",
    },
    "monitor": {
        "loop",
        "guarding",
        "monitoring",
        "stages",
        "observer",
        "cadence",
        "publishing",
        "notices",
        "response",
        "history",
        "flight_recorder",
        "flight_memory",
        "gradient_norms",
        "nonfinite",
    },
    "loops": {"callback", "evaluation", "lightning_loop", "lightning_compat", "integrations"},
    "commands": {"cli", "commands", "__main__"},
}
"""The rooms of docs/design.md, from the ground up."""
ROOM_OF = {module: room for room, modules in ROOMS.items() for module in modules}


def arrows() -> list[tuple[str, str]]:
    """Return the arrows of the diagram in docs/design.md."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    return re.findall(r"^    (\w+) --> (\w+)$", page, re.MULTILINE)


def reached(room: str) -> set[str]:
    """Return the rooms that the arrows lead to from one."""
    below = {to for start, to in arrows() if start == room}
    return {room}.union(*(reached(lower) for lower in below))


def test_the_diagram_has_every_room_and_runs_downwards() -> None:
    floors = list(ROOMS)
    assert {room for arrow in arrows() for room in arrow} == set(floors)
    assert all(floors.index(start) > floors.index(to) for start, to in arrows())


def test_the_table_of_rooms_names_every_module() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\w+) \| ([^|]*) \|", page, re.MULTILINE))
    for room, modules in ROOMS.items():
        assert {name.rstrip("/") for name in re.findall(r"`([\w/]+)`", rows[room])} == modules


def imported_modules(source: str) -> set[str]:
    """Return the modules and packages at the top of attn_monitor that a source imports, in whatever form."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {name[1] for name in parts if name[0] == "attn_monitor" and len(name) > 1} & ROOM_OF.keys()


def test_every_form_of_import_is_seen() -> None:
    forms = """
import attn_monitor.cli, attn_monitor.capture.tags as t
from attn_monitor import callback, __version__
from attn_monitor.events import AttentionWarning
def f():
    from attn_monitor.reports import report
"""
    assert imported_modules(forms) == {"cli", "capture", "callback", "events", "reports"}


@pytest.mark.parametrize("path", sorted((ROOT / "attn_monitor").rglob("*.py")), ids=lambda path: path.stem)
def test_imports_run_along_the_arrows(path: Path) -> None:
    module = path.relative_to(ROOT / "attn_monitor").parts[0].removesuffix(".py")
    if module == "__init__":
        return
    assert module in ROOM_OF, "a new file: give it a room, here and in docs/design.md"
    used = imported_modules(path.read_text(encoding="utf-8"))
    assert {name for name in used if ROOM_OF[name] not in reached(ROOM_OF[module])} == set()


def lines_of_code(source: str) -> int:
    """Return how many lines hold code: neither blank, nor comments, nor docstrings."""
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in empty]
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    texts = {
        line
        for node in statements
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - texts)


def test_lines_of_code_are_counted_without_words() -> None:
    words = '"""Words,\nmore of them."""\n\n# a comment\ndef f():\n    """Words."""\n'
    code = 'x = """not\nwords"""  # why\n'
    assert (lines_of_code(words + "    return x\n"), lines_of_code(code), lines_of_code(words + code)) == (2, 2, 3)


def lines_of_script(source: str) -> int:
    """Return how many lines of JavaScript or CSS hold code: neither blank nor comments."""
    lines = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL).splitlines()
    return sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in lines)


def test_lines_of_a_script_are_counted_without_words() -> None:
    words = "/** Words,\n * more of them. */\n\n// a comment\n  // and one\n"
    code = "const x = 1; // why\n/* a */ body {\n}\n"
    assert (lines_of_script(words), lines_of_script(code), lines_of_script(words + code)) == (0, 3, 3)


def test_no_file_is_longer_than_300_lines_of_code() -> None:
    folders = [ROOT / name for name in ("attn_monitor", "examples", "tests", "docs")]
    counts: dict[str, dict[str, int]] = {}
    for kind, count in {".py": lines_of_code, ".js": lines_of_script, ".css": lines_of_script}.items():
        files = [path for folder in folders for path in folder.rglob(f"*{kind}") if not path.name.startswith("uPlot.")]
        sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
        counts[kind] = {name: count(text) if text.count("\n") > 300 else 0 for name, text in sources.items()}
    assert len(counts[".py"]) > 250
    assert len(counts[".js"]) > 10
    assert "attn_monitor/tensorboard_plugin/static/index.css" in counts[".css"]
    assert {name: count for kind in counts.values() for name, count in kind.items() if count > 300} == {}
