"""A forward that compiles something for the first time in its process, while it is watched."""

from __future__ import annotations

import subprocess
import sys

import pytest

_START = """
import sys, warnings
import torch
import torch.nn.functional as F
from torch import nn
from attn_monitor import AttentionProbe
from tests.reference import assert_matches, attention_reference
warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
finders, x = list(sys.meta_path), torch.linspace(-1, 1, 2 * 3 * 5 * 16).view(2, 3, 5, 16).sin()

class Model(nn.Module):
    def forward(self, x):
{body}

model = Model()
"""
_FLEX = """
        from torch.nn.attention.flex_attention import flex_attention
        return flex_attention(x, x, x)
"""
_COMPILED = """
        attend = lambda x: F.scaled_dot_product_attention(x, x, x)
        return torch.compile(attend, backend="eager", fullgraph=True)(x)
"""
_WATCHED = """
with AttentionProbe(nn.Identity()), AttentionProbe(nn.Identity()):
    assert len(sys.meta_path) == len(finders) + 1
assert sys.meta_path == finders
assert "torch._dynamo" not in sys.modules
with AttentionProbe(model) as probe:
    watched = model(x)
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
assert sys.meta_path == finders
assert torch._dynamo.eval_frame._stance.stance == "default"
assert "exec_module" not in vars(torch._dynamo.__spec__.loader)
assert not probe.skipped, probe.skipped
found = probe.compute()["Model"]
assert_matches(found, attention_reference(x, x))
assert found.calls == 1
torch.testing.assert_close(watched, model(x))
print("as expected")
"""
_FAILING = """
import importlib
class Failing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo":
            raise ImportError("no dynamo today")
with AttentionProbe(nn.Identity()):
    sys.meta_path.insert(1, Failing())
    assert importlib.util.find_spec("torch.nn.nothing") is None
    try:
        import torch._dynamo
    except ImportError as error:
        print(error)
    del sys.meta_path[1]
    assert importlib.util.find_spec("torch._dynamo") is not None  # asking is not importing
    import torch._dynamo
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
assert sys.meta_path == finders
assert torch._dynamo.eval_frame._stance.stance == "default"
"""


def said(code: str) -> str:
    """Run it in a process of its own, and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("body", [_FLEX, _COMPILED], ids=["flex_attention", "torch.compile"])
def test_what_a_forward_compiles_first_runs_eagerly_and_is_seen(body: str) -> None:
    assert said(_START.format(body=body) + _WATCHED) == "as expected\n"


@pytest.mark.slow
def test_an_import_that_fails_fails_as_it_would_and_the_next_is_noticed() -> None:
    assert said(_START.format(body=_FLEX) + _FAILING) == "no dynamo today\n"
