"""Plans of backends: what is none, names no site or names no backend of the operator there."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from foci.integrations.site_plan import check_plan, require_module
from foci.ops import SPECS

SITES = {"first": SPECS["softmax"], "second": SPECS["delta"]}


def test_what_fits_passes() -> None:
    for plan in (None, {}, {"first": "aten", "second": None}, {"second": "chunked"}):
        check_plan(plan, SITES)
    require_module(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        (["first"], TypeError, r"plan must map names of sites to backends, or be None, got \['first'\]"),
        ("chunked", TypeError, "plan must map names of sites to backends, or be None, got 'chunked'"),
        ({"third": None}, ValueError, "plan names 'third', which is no attention site of the model; it has first, sec"),
        ({0: None}, ValueError, "plan names 0, which"),
        ({"second": "aten"}, ValueError, r"plan\['second'\] is 'aten'; expected None or one of 'native', "),
        ({"first": 3}, ValueError, r"plan\['first'\] is 3; expected None or one of 'aten', "),
        ({"first": ["aten"]}, ValueError, r"plan\['first'\] is \['aten'\]; expected"),
        ({"first": ""}, ValueError, r"plan\['first'\] is ''; expected"),
    ],
)
def test_what_does_not_is_named(plan: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^install: {message}"):
        check_plan(plan, SITES)


def test_what_is_no_module_is_named() -> None:
    with pytest.raises(TypeError, match=r"^install: model is a NoneType; expected an nn\.Module"):
        require_module(None)
