"""What `inspect_attention` and `attn-monitor` say about a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import inspect_attention, observe_attention
from attn_monitor.cli import main
from attn_monitor.inspection import InspectedAttention, inspection_table
from tests.models import DIM, HEADS, Fused, HandWritten, SelfAttention

ROOT = Path(__file__).parent.parent


class LinearAttention(nn.Module):
    """Called attention, and has no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.elu(part) + 1 for part in self.qkv(x).chunk(3, -1))
        return q @ (k.mT @ v)


class Shown(nn.Module):
    """Shows itself."""

    def forward(self, x: Tensor) -> Tensor:
        observe_attention("by hand", x[:, None], x[:, None], scale=2.0)
        return x


class ShownAttention(LinearAttention):
    """Called attention, and shows what it does."""

    def forward(self, x: Tensor) -> Tensor:
        observe_attention("linear shown", x[:, None], x[:, None])
        return super().forward(x)


class Everything(nn.Module):
    """One of each, and one that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.hand, self.fused, self.mha = HandWritten(), Fused(), SelfAttention()
        self.linear, self.shown, self.unused = LinearAttention(), Shown(), LinearAttention()
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.hand, self.fused, self.mha, self.linear, self.shown, self.norm, self.dropout):
            x = part(x)
        return x


def test_every_path_is_told_and_what_is_blind_too() -> None:
    found = {one.name: one for one in inspect_attention(Everything(), torch.randn(3, 5, DIM))}
    depth = DIM // HEADS
    assert found == {
        "hand": InspectedAttention("hand", "HandWritten", "softmax", HEADS, depth, found["hand"].scale_ratio, 5, 1),
        "fused": InspectedAttention("fused", "Fused", "sdpa", HEADS, depth, found["fused"].scale_ratio, 5, 1),
        "mha": InspectedAttention("mha", "SelfAttention", "sdpa", HEADS, depth, found["mha"].scale_ratio, 5, 1),
        "by hand": InspectedAttention("by hand", "", "observed", 1, DIM, found["by hand"].scale_ratio, 5, 1),
        "linear": InspectedAttention("linear", "LinearAttention", skipped=found["linear"].skipped),
    }
    assert "no softmax of queries times keys was seen in it" in found["linear"].skipped
    for name, ratio in {"hand": 1, "fused": 1, "mha": 1, "by hand": 2 * DIM**0.5}.items():
        assert found[name].scale_ratio == pytest.approx((ratio, ratio))


@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_random_state_are_as_before(training: bool) -> None:
    model = Everything().train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    inspect_attention(model, torch.randn(3, 5, DIM, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training is training
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_table_says_it_all() -> None:
    table = inspection_table(inspect_attention(Everything(), torch.randn(3, 5, DIM)))
    lines = table.splitlines()
    assert lines[0].split() == ["name", "class", "path", "heads", "head_dim", "scale*sqrt(d)", "keys"]
    assert lines[1].split() == ["hand", "HandWritten", "softmax", "2", "6", "1", "5"]
    assert lines[-2:][0] == "not measured:"
    assert lines[-1].startswith("  linear (LinearAttention): no softmax of queries times keys was seen")


def test_what_shows_itself_is_not_blind() -> None:
    [found] = inspect_attention(nn.Sequential(ShownAttention()), torch.randn(3, 5, DIM))
    assert (found.name, found.path, found.skipped) == ("linear shown", "observed", "")


def test_what_is_no_module_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"expects a torch\.nn\.Module, got int"):
        inspect_attention(3)  # type: ignore[arg-type]


# -- the command -------------------------------------------------------------------------------------------------------

MODULE = """
import torch
from tests.models import DIM, Fused
def sample(): return Fused(), torch.zeros(1, 4, DIM)
def keywords(): return Fused(), {"x": torch.zeros(1, 4, DIM)}
def plain(): return torch.nn.Linear(2, 2), torch.zeros(2)
def wrong_shape(): return Fused(), torch.zeros(1, 4, DIM + 1)
def no_model(): return 3
def broken(): raise ValueError("no data here")
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"sample_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name


@pytest.mark.parametrize("target", ["sample", "keywords"])
def test_inspect_prints_the_table(target: str, here: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{here}:{target}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [["Fused", "Fused", "sdpa", "2", "6", "1", "4"]]


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        ("HERE", 2, "TARGET expects module:callable"),
        ("HERE:nothing", 2, "has no 'nothing'"),
        ("HERE:number", 2, "is not callable, it is of type int"),
        ("HERE:no_model", 2, "must return `model, inputs`, a torch module first; it returned int"),
        ("HERE:broken", 1, "broken() failed: ValueError: no data here"),
        ("HERE:wrong_shape", 1, "the model failed: RuntimeError: mat1 and mat2"),
        ("HERE_broken:sample", 1, "failed: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("no_such_module:sample", 2, "no module named 'no_such_module'"),
    ],
)
def test_errors_are_one_line(
    target: str, status: int, message: str, here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", target.replace("HERE", here)]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith("attn-monitor: ")
    assert message in line


def test_a_model_without_attention(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{here}:plain"]) == 1
    assert capsys.readouterr().out == "no attention found\n"


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "inspect" in capsys.readouterr().err
    assert main(["nothing"]) == 2


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["inspect", "--help"]])
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from attn_monitor.cli import main; "
        f"status = main({arguments!r}); print('loaded', 'torch' in sys.modules, status)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert out.endswith("loaded False 0\n")


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "attn_monitor", "inspect"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert "TARGET" in run.stderr
