"""Backends chosen in models of foci's own layers, and given back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foci.core.errors import Unsupported
from foci.integrations.layers import find_sites, install
from foci.nn import Attention, GatedDeltaNet


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GatedDeltaNet(16, 2, backend="reference")
        self.second = Attention(16, 2, backend="reference")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_without_a_plan_foci_chooses_and_restore_gives_the_backends_back():
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(2, 9, 16)
    before = model(x)
    handle = install(model)
    assert handle.sites == ("first", "second") == tuple(find_sites(model))
    assert model.first.backend is None and model.second.backend is None
    torch.testing.assert_close(model(x), before)
    handle.restore()
    handle.restore()
    assert model.first.backend == model.second.backend == "reference"
    assert torch.equal(model(x), before)


def test_a_layer_is_installed_once_until_it_is_restored():
    model = Pair()
    with install(model, {"first": "chunked"}):
        with pytest.raises(ValueError, match="installed in this model already; call restore"):
            install(model)
        assert model.second.backend == "reference"  # nothing was done by halves
        install(model, {"second": "chunked"}).restore()
    assert model.first.backend == model.second.backend == "reference"
    install(model, {"first": "chunked"}).restore()
    assert model.first.backend == "reference"


def test_a_plan_names_layers_and_the_others_are_left():
    model = Pair()
    handle = install(model, {"second": "chunked"})
    assert (model.first.backend, model.second.backend) == ("reference", "chunked")
    assert handle.skipped == (("first", "left by the plan"),)


def test_a_named_backend_runs_single_tokens_too(monkeypatch):
    from foci.nn import Cache, recurrent

    model, calls = Pair(), []
    monkeypatch.setattr(recurrent, "delta_rule_step", lambda *a, **k: calls.append(1) or a[2])
    for expected, install_first in ((0, False), (1, True)):
        calls.clear()
        if install_first:
            install(model)
        with torch.no_grad():
            cache = Cache()
            model.first(torch.randn(1, 4, 16), cache=cache)
            model.first(torch.randn(1, 1, 16), cache=cache)
        assert len(calls) == expected


def test_what_does_not_fit_is_refused():
    with pytest.raises(Unsupported, match="no layer in it is foci's"):
        install(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="plan names 'third'"):
        install(Pair(), {"third": "chunked"})
    with pytest.raises(TypeError, match="model is a NoneType"):
        install(None)
    for plan, said in (
        ({"first": "magic"}, r"plan\['first'\] is 'magic'; expected None or one of 'native'"),
        ({"second": 3}, r"plan\['second'\] is 3; expected None or one of 'aten'"),
        (["first"], "plan must map names of sites to backends"),
        ("chunked", "plan must map names of sites to backends"),
    ):
        model = Pair()
        with pytest.raises((TypeError, ValueError), match=said):
            install(model, plan)
        assert model.first.backend == model.second.backend == "reference"
