"""torch's flop counter counts foci's ops as it counts torch's own, in eager calls and in graphs, each call once."""

from __future__ import annotations

import linecache
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import foci
from foci.core import flops
from foci.ops import SPECS

B, T, H, K, D = 2, 100, 4, 16, 24


def counted(run: Callable[[], Any]) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        run()
    return {str(op): count for op, count in counter.get_flop_counts().get("Global", {}).items()}


def trained(run: Callable[..., Any], *tensors: torch.Tensor) -> Callable[[], Any]:
    """Forward and backward, with a gradient of every tensor."""

    def both() -> Any:
        leaves = [x.detach().requires_grad_() for x in tensors]
        outputs = run(*leaves)
        return torch.autograd.grad((outputs if isinstance(outputs, torch.Tensor) else outputs[0]).sum(), leaves)

    return both


def rows(heads: int = H, width: int = K, device: str = "cpu") -> torch.Tensor:
    return torch.rand(B, T, heads, width, device=device)


CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "softmax": (foci.attention, (rows(), rows(2), rows(2, 8))),
    "linear": (foci.linear_attention, (rows(), rows(), rows(H, 8))),
    "delta": (foci.delta_rule, (rows(), rows() / K, rows(), torch.rand(B, T, H))),
    "scan": (foci.scan, (torch.rand(B, T, D), -torch.rand(B, T, D))),
    "selective_scan": (
        foci.selective_scan,
        (torch.rand(B, T, D), torch.rand(B, T, D), -torch.rand(D, K), torch.rand(B, T, K), torch.rand(B, T, K)),
    ),
}


def expected(name: str) -> tuple[int, int]:
    """Operations of the forward and the backward, by the Spec."""
    spec = SPECS[name]
    assert spec.work is not None and spec.bind is not None
    work = spec.work(spec.bind(*CALLS[name][1]))
    return work.flops, round(work.flops * work.backward)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_counted_once_whatever_runs_inside_it(name: str) -> None:
    function, tensors = CALLS[name]
    forward, backward = expected(name)
    assert forward > 0 and backward > 0
    assert list(counted(lambda: function(*tensors)).values()) == [forward]
    with torch.inference_mode():
        assert list(counted(lambda: function(*tensors)).values()) == [forward]
    assert sorted(counted(trained(function, *tensors)).values()) == sorted([forward, backward])


@pytest.mark.parametrize("name", CALLS)
def test_a_backward_alone_is_counted(name: str) -> None:
    function, tensors = CALLS[name]
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = function(*leaves)
    total = (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).sum()
    assert list(counted(total.backward).values()) == [expected(name)[1]]


@pytest.mark.parametrize("name", CALLS)
def test_graphs_count_what_eager_calls_do(name: str) -> None:
    function, tensors = CALLS[name]
    compiled = torch.compile(lambda *given: function(*given), backend="aot_eager", dynamic=True)
    run = trained(compiled, *tensors)
    run()
    assert sorted(counted(run).values()) == sorted(expected(name))
    with torch.inference_mode():
        compiled(*tensors)
        assert list(counted(lambda: compiled(*tensors)).values()) == [expected(name)[0]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [16, 8])
def test_attention_counts_what_torch_counts_for_its_own(causal: bool, width: int) -> None:
    """Of its kernel for GPUs, on `meta`: it counts nothing for its kernel for the CPU. A causal mask halves nothing."""
    q, k, v = rows(), rows(2), rows(2, width)
    mask = foci.Causal() if causal else None
    shapes = [(B, H, *x.shape[1::2]) for x in (q, k, v)]  # torch 2.11 knows no heads that share keys
    forward = flop_counter.sdpa_flop_count(*shapes)
    backward = flop_counter.sdpa_backward_flop_count((B, H, T, width), *shapes)
    ours = counted(trained(lambda *given: foci.attention(*given, mask=mask), q, k, v))
    assert sorted(ours.values()) == sorted([forward, backward])
    if width == K:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        theirs = [x.transpose(1, 2).to("meta", torch.bfloat16) for x in (q, rows(), rows())]
        assert sorted(counted(trained(lambda *x: flash(*x, 0.0, causal)[0], *theirs)).values()) == sorted(ours.values())


def test_masks_are_counted_by_the_pairs_they_leave() -> None:
    q, pair = torch.rand(1, T, H, K), 2 * H * 2 * K
    packed = foci.Causal() & foci.Packed(torch.tensor([0, 30, T]))
    assert counted(lambda: foci.attention(q, q, q, mask=packed)) == {"foci.softmax_aten_fwd": pair * (30**2 + 70**2)}
    window = foci.Window(9, 0)
    found = counted(lambda: foci.attention(q, q, q, mask=window))
    assert found == {"foci.softmax_chunked_fwd": pair * (10 * T - 45)}


def test_without_memory_it_counts_the_same_and_documents_in_full() -> None:
    q = rows(device="meta")
    assert [*counted(lambda: foci.attention(q, q, q)).values()] == [2 * B * H * T * T * 2 * K]
    with FakeTensorMode():
        x = torch.rand(1, T, H, K)
        mask = foci.Causal() & foci.Packed(torch.tensor([0, 30, T]))
        assert [*counted(lambda: foci.attention(x, x, x, mask=mask)).values()] == [2 * H * T * T * 2 * K]


def test_a_formula_of_the_users_own_is_left_alone() -> None:
    function, tensors = CALLS["scan"]
    own = {torch.ops.foci.scan_chunked_fwd: lambda *shapes, out_shape=None: 7}
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        function(*tensors, backend="chunked")
    assert counter.get_total_flops() == 7


def test_every_op_of_every_operator_has_a_formula() -> None:
    names = {op._qualified_op_name.removeprefix("foci::") for op in flops._FORMULAS}
    for spec in SPECS.values():
        for backend in spec.backends:
            if backend.name != "reference":  # plain torch code, which torch counts op by op
                assert {f"{spec.name}_{backend.name}_fwd", f"{spec.name}_{backend.name}_bwd"} <= names


def test_what_is_not_counted_is_told_where_somebody_counts() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flops.warn_uncounted("f", "g")
    with (
        FlopCounterMode(display=False),
        pytest.warns(match="^f: torch's flop counter sees a part of its operations, or none; count g$"),
    ):
        flops.warn_uncounted("f", "g")


def test_what_is_not_counted_is_told_of_the_line_that_called() -> None:
    def called() -> None:
        flops.warn_uncounted("f", "g")

    with FlopCounterMode(display=False), pytest.warns(match="^f: ") as told:
        called()
    assert linecache.getline(told[0].filename, told[0].lineno).strip() == "called()"


def test_a_compiled_function_may_say_so_and_is_one_graph() -> None:
    def called(x: torch.Tensor) -> torch.Tensor:
        flops.warn_uncounted("f", "g")
        return x + 1

    assert torch.compile(called, backend="eager", fullgraph=True)(torch.zeros(2)).tolist() == [1, 1]


class Counts(TorchDispatchMode):
    """Somebody's mode, whose counter is a number."""

    counter = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_counter_whose_import_has_not_ended_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread imports it; its module is there before what is in it."""
    monkeypatch.setitem(sys.modules, "torch.utils.flop_counter", ModuleType("torch.utils.flop_counter"))
    monkeypatch.setattr(flops, "_REGISTERED", set())
    flops.tell_counters()
    with Counts():
        flops.warn_uncounted("f", "g")
    assert not flops._REGISTERED


def test_a_counter_is_found_among_modes_with_others() -> None:
    with warnings.catch_warnings(), Counts():
        warnings.simplefilter("error")
        flops.warn_uncounted("f", "g")
        with FlopCounterMode(display=False), Counts(), pytest.warns(match="^f: "):
            flops.warn_uncounted("f", "g")


def test_a_step_of_one_token_is_counted_by_torch() -> None:
    """It runs in torch's operations wherever something observes it."""
    token, state = torch.rand(B, H, K), torch.zeros(B, H, K, K)
    assert sum(counted(lambda: foci.linear_attention_step(token, token, token, state)).values()) == 2 * B * H * K * K


AFTERWARDS = """
import sys, torch, foci
x = torch.rand(1, 8, 2, 4, requires_grad=True)
foci.attention(x, x, x).sum().backward()
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    foci.attention(x, x, x).sum().backward()
print(counter.get_total_flops())
"""


def test_the_first_call_that_is_counted_is_counted() -> None:
    """The counter was imported after foci, and copied torch's registry before foci knew of it."""
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 7 * 2 * 2 * 8 * 8 * 4


BEFORE = """
import torch
from torch.utils.flop_counter import FlopCounterMode
import foci
x = torch.rand(1, 8, 2, 4)
call = (x, x, x, *[None] * 10, False, False, None, None, None, 0.5, 0.0)
with torch.inference_mode(), FlopCounterMode(display=False) as counter:
    torch.ops.foci.softmax_chunked_fwd(*call)
print(counter.get_total_flops())
"""


def test_an_op_of_a_saved_program_is_counted_in_inference_mode() -> None:
    """As no code of foci's runs before the counter there, which had to know the formula."""
    done = subprocess.run([sys.executable, "-c", BEFORE], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 2 * 2 * 2 * 8 * 8 * 4


class Raced(dict[Any, Any]):
    """A registry into which another thread writes as soon as this one has looked."""

    def __contains__(self, op: object) -> bool:
        known = super().__contains__(op)
        self[op] = "theirs"
        return known


def test_two_threads_may_be_the_first_to_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of foci raised that a registration was a duplicate."""
    raced = Raced()
    monkeypatch.setattr(flop_counter, "flop_registry", raced)
    monkeypatch.setattr(flops, "_REGISTERED", set())
    flops.tell_counters()
    assert raced.keys() == flops._FORMULAS.keys()
