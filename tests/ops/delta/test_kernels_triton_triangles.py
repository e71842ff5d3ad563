"""The first launch in loops: X and A by their definition, and every size of its blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import bind
from foci.ops.delta.cases import Delta
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, error, exact

CPU = torch.device("cpu")


@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize("decay", ["", "token", "channel"])
def test_triangles_and_their_inverses_are_what_the_equations_say(decay: str, erase: bool) -> None:
    problem = Delta("", B=1, T=100, H=2, G=1, K=24, V=8, decay=decay, erase=erase)
    inputs = problem.case.make(torch.float32, CPU, 0)
    call = bind(**there(inputs))
    *_, buffer = gpu.forward(call, True)
    kept, x = gpu._parts(call, buffer), bind(**exact(inputs))
    q, k, e = x.q[0, :, 0], x.k[0, :, 0], (x.k if x.erase is None else x.erase)[0, :, 0]
    for h in range(2):
        for chunk in (slice(0, 64), slice(64, 100)):
            c = torch.zeros(100, 1) if x.log_decay is None else x.log_decay[0, :, h]
            c = c[chunk].double().cumsum(0)
            decayed = (c[:, None] - c).exp() * k[chunk] * x.beta[0, chunk, h, None]
            E = torch.einsum("ik,ijk->ij", e[chunk], decayed).tril(-1)
            A = torch.einsum("ik,ijk->ij", x.scale * q[chunk], decayed).tril()
            for found, wanted in (kept.inverse, torch.linalg.inv(torch.eye(len(c)) + E)), (kept.products, A):
                assert error(found[0, chunk, h, : len(c)].cpu(), wanted) <= BUDGET[torch.float32]
                assert not found[0, chunk, h, len(c) :].any()  # where no token is


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_every_size_of_a_chunks_block_that_may_be_tuned_is_right(decay: str) -> None:
    inputs = Delta("", B=1, T=20, H=1, K=40, V=12, decay=decay).case.make(torch.float32, CPU, 0)
    truth, call = delta_rule(**exact(inputs), backend="chunked")[0], bind(**there(inputs))
    with tune.override_configs({}) as asked:
        gpu.forward(call)
    (key, found) = next((key, found) for key, found in asked.items() if key[0] == "delta_chunks")
    for size in found.vary["BLOCK_K"]:
        with tune.override_configs({key: replace(found.rule, blocks={"BLOCK_K": size})}):
            assert error(gpu.forward(call)[0].cpu(), truth) <= BUDGET[torch.float32]
