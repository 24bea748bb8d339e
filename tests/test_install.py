"""The package as it is built and installed: wheel, sdist, command, plugin, extras, and what an import costs.

Nothing is downloaded. The environment is an empty one, and the package alone is installed into it, from the wheel; what
it depends on is lent to it by a `.pth` file that names the packages of the environment the tests run in. Of those the
installed copy of attn_monitor is no part: an editable one is found by a `.pth` file of its own, which counts only in
its own environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import attn_monitor

ROOT = Path(__file__).parent.parent
PLUGIN = """
from importlib.metadata import entry_points
[entry] = [found for found in entry_points(group="tensorboard_plugins") if found.name == "attn_monitor"]
import attn_monitor, sys
from attn_monitor.tensorboard_plugin.page import page_file
from pathlib import Path
print(Path(attn_monitor.__file__).parent)
print(entry.load().__name__)
print(len(page_file("index.js")) > 50_000)
"""
IMPORT = """
import time
start = time.process_time()
import attn_monitor
seconds = time.process_time() - start
import sys
print(seconds, "torch" in sys.modules)
"""


def build(kind: str, source: Path, target: Path) -> Path:
    """Build the wheel or the sdist of a source tree."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    [found] = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment that the wheel was installed into."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home)
    programs = home / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    [packages] = home.rglob("site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return programs


def run(command: list[str | Path], place: Path) -> str:
    """Run a command away from the repository, and return what it printed."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, cwd=place, env=env, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_the_installed_command_needs_no_repository(installed: Path, tmp_path: Path) -> None:
    command = installed / "attn-monitor"
    assert run([command, "version"], tmp_path) == f"{attn_monitor.__version__}\n"
    printed = run([command, "demo", "--steps", "14"], tmp_path)
    assert "of 8 heads were flagged:" in printed
    next_command = printed.splitlines()[-1].split("#")[0].split()
    assert run([command, *next_command[1:]], tmp_path).splitlines()[-1].startswith("wrote attn_monitor_demo/collapsing")


@pytest.mark.slow
def test_the_installed_package_brings_the_tab(installed: Path, tmp_path: Path) -> None:
    place, loader, has_script = run([installed / "python", "-c", PLUGIN], tmp_path).splitlines()
    assert Path(place).is_relative_to(installed.parent)
    assert (loader, has_script) == ("Loader", "True")


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel_and_holds_what_its_makefile_needs(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    [source] = (tmp_path / "source").iterdir()
    again = build("wheel", source, tmp_path)
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())
    assert {path.name for path in source.iterdir()} >= {
        *("Makefile", "constraints.txt", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
        *("attn_monitor", "examples", "tests", "docs", "mkdocs.yml"),
    }
    for folder in ("images", "stylesheets"):  # what the pages show and how
        held = {path.relative_to(source) for path in (source / "docs" / folder).rglob("*")}
        assert held == {path.relative_to(ROOT) for path in (ROOT / "docs" / folder).rglob("*")} != set()


@pytest.mark.slow
def test_every_extra_alone_fits_the_pins(wheel: Path) -> None:
    """Each extra on its own, with what it brings: a pin for every package, inside its bounds."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    requirements = [Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)]
    extras = re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)
    assert set(extras) == {"examples", "zoo", "docs", "dev"}
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {canonicalize_name(pin.name): pin for pin in pins if pin.marker is None or pin.marker.evaluate()}
    for extra in ["", *extras]:
        for needed in requirements:
            if needed.name == "attn-monitor" or not (needed.marker is None or needed.marker.evaluate({"extra": extra})):
                continue
            [pin] = pinned[canonicalize_name(needed.name)].specifier
            assert needed.specifier.contains(pin.version), f"{needed} of [{extra}] is pinned to {pin.version}"


def test_import_costs_nothing_that_is_felt() -> None:
    """The best of five, in time of the processor: other processes may take the core."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for _ in range(5)
    ]
    assert {line.split()[1] for line in runs} == {"False"}
    assert min(float(line.split()[0]) for line in runs) < 0.1


def test_the_version_stands_in_one_place() -> None:
    version = attn_monitor.__version__
    files = [*(ROOT / "attn_monitor").rglob("*.py"), *ROOT.glob("*.toml"), ROOT / "mkdocs.yml", ROOT / "README.md"]
    holding = [path.relative_to(ROOT).as_posix() for path in files if f'"{version}"' in path.read_text("utf-8")]
    assert holding == ["attn_monitor/__init__.py"]
    assert Distribution.from_name("attn-monitor").version == version
