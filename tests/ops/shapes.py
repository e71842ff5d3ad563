"""What the shapes of any operator promise: named once, and arguments that its call takes, on meta and for real."""

from __future__ import annotations

import torch

from foci.core.spec import Spec


def check(spec: Spec) -> None:
    """Every shape binds on meta, where nothing is drawn, and counts work; the smallest is drawn and runs."""
    assert spec.bind is not None and spec.work is not None
    names = [shape.name for shape in spec.shapes]
    assert names and len(set(names)) == len(names)
    flops = {}
    for shape in spec.shapes:
        call = spec.bind(**shape.make(torch.bfloat16, torch.device("meta"), 0))
        assert call[0].is_meta, shape.name
        if "packed" not in shape.features:
            flops[shape.name] = spec.work(call).flops
            assert flops[shape.name] > 0, shape.name
    least = min(flops, key=flops.__getitem__)
    shape = next(shape for shape in spec.shapes if shape.name == least)
    inputs = shape.make(torch.float32, torch.device("cpu"), 0)
    again = shape.make(torch.float32, torch.device("cpu"), 0)
    assert all(torch.equal(x, again[name]) for name, x in inputs.items() if isinstance(x, torch.Tensor))
    call = spec.bind(**inputs)
    assert all(output.isfinite().all() for output in spec.backend("chunked").load().forward(call))
