"""What `inspect_attention` says about a model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_monitor import inspect_attention, observe_attention
from attn_monitor.inspection import InspectedAttention, inspection_table
from tests.models import DIM, HEADS, Fused, HandWritten, SelfAttention


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


def test_the_columns_are_explained_below_the_table() -> None:
    lines = inspection_table(inspect_attention(Fused(), torch.randn(3, 5, DIM))).splitlines()
    assert lines[2:] == [
        "",
        "path: how it is computed, `softmax` in plain torch, `observed` if shown by you, else the fused kernel; "
        "scale*sqrt(d): 1 for the scale 1/sqrt(d_k); keys: the most of any call",
    ]


def remarks(*ratios: tuple[float, float] | None, head_dim: int | None = 32) -> list[str]:
    """Return the lines that follow the explanation, for layers with these scales."""
    found = [
        InspectedAttention(f"layers.{index}", "Attention", "sdpa", 2, head_dim, ratio, 5, 1)
        for index, ratio in enumerate(ratios)
    ]
    return inspection_table(found).splitlines()[len(ratios) + 3 :]


@pytest.mark.parametrize("ratio", [None, (1.0, 1.0), (0.8, 1.2), (-1.0, -1.0), (float("nan"), float("nan"))])
def test_a_usual_scale_gets_no_remark(ratio: tuple[float, float] | None) -> None:
    assert remarks(ratio) == []


def test_an_unusual_scale_gets_a_remark_one_for_all_layers_that_have_it() -> None:
    missing, twice = (32**0.5, 32**0.5), (32**-0.5, 32**-0.5)
    assert remarks(missing, (1.0, 1.0), twice, missing, missing, (0.5, 3.0), missing, missing) == [
        "layers.0, layers.3, layers.4 and 2 more: the scale is 5.66 x 1/sqrt(d_k): perhaps the scale 1/sqrt(d_k) is "
        "missing, fine if the design wants it so",
        "layers.2: the scale is 0.177 x 1/sqrt(d_k): perhaps 1/d_k stands in place of 1/sqrt(d_k), or the scale "
        "is applied twice, fine if the design wants it so",
        "layers.5: the scale is 0.5..3 x 1/sqrt(d_k): fine if the design wants it so",
    ]


@pytest.mark.parametrize("head_dim", [None, 1])
def test_without_a_depth_there_is_no_guess(head_dim: int | None) -> None:
    assert remarks((2.0, 2.0), head_dim=head_dim) == [
        "layers.0: the scale is 2 x 1/sqrt(d_k): fine if the design wants it so"
    ]


def test_what_shows_itself_is_not_blind() -> None:
    [found] = inspect_attention(nn.Sequential(ShownAttention()), torch.randn(3, 5, DIM))
    assert (found.name, found.path, found.skipped) == ("linear shown", "observed", "")


def test_what_is_no_module_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"expects a torch\.nn\.Module, got int"):
        inspect_attention(3)  # type: ignore[arg-type] # the mistake
