"""Wrong answers that other libraries give across ranks (docs/parallel_peers.md), each a question for ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import foci
from foci.core.world import World
from foci.parallel.balance import shard
from foci.parallel.joint import joint
from foci.parallel.ring import ring
from foci.parallel.ulysses import ulysses, usp
from tests.parallel.matrix import Case, by_name, errors, found_on, prove, truth, wrapper

Worlds = Callable[[int], World]
ROUND = ("ring zigzag", "ring stripe", "ring plain", "ulysses")


def problem(B: int = 1, T: int = 12, H: int = 4, K: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(B, T, H, K, generator=draw, dtype=torch.float64).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("place", ROUND)
def test_gradients_of_keys_travel_the_right_way(worlds: Worlds, place: str, size: int) -> None:
    """dK and dV sent the wrong way round are right on two ranks, where tests of them stop."""
    prove(worlds(size), place, by_name("full"))


@pytest.mark.parametrize("place", ROUND)
def test_padding_is_of_the_whole_row(worlds: Worlds, place: str) -> None:
    """Each rank's own mask, put on every block of keys."""
    prove(worlds(2), place, by_name("padding"))


def _backends() -> list[tuple[str, float, float]]:
    q, k, v = (shard(x, dist.group.WORLD, "plain") for x in problem())
    whole = shard(foci.attention(*problem()), dist.group.WORLD, "plain")
    local = foci.attention(q, k, v)
    found = []
    for wrap in (lambda op: ring(op, dist.group.WORLD, "plain"), lambda op: ulysses(op, dist.group.WORLD)):
        for backend in ("aten", "chunked", None):
            out = wrap(foci.attention)(q, k, v, backend=backend)
            found.append((str(backend), float((out - whole).abs().max()), float((out - local).abs().max())))
    return found


def test_no_backend_sees_its_own_shard_only(worlds: Worlds) -> None:
    """A backend without a guard accepts the configuration, ignores it, and attends within the rank."""
    for ours in worlds(2).run(_backends):
        for backend, error, distance in ours:
            assert error < 1e-12 and distance > 0.1, backend


@pytest.mark.parametrize("place", ROUND)
def test_lse_is_a_log_sum_exp(worlds: Worlds, place: str) -> None:
    """Zeros for an lse average the blocks equally. Rows that see nothing are -inf, and merge as nothing."""
    found = found_on(worlds(2), wrapper(place), by_name("sink"))
    assert errors(found, truth(by_name("sink"), torch.float64))["output 1"] < 1e-12
    empty = found_on(worlds(2), wrapper(place), by_name("padded queries"))
    assert bool((empty["output 1"][0, 11:] == -torch.inf).all())
    assert float(empty["output 0"][0, 11:].abs().max()) == 0.0


def _pairs_of_ranks() -> float:
    """Two sequences on four ranks: ranks 0 and 1 share one, 2 and 3 the other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    row = dist.get_rank() // 2
    inputs = [x[row : row + 1] for x in problem(B=2)]
    whole, error = foci.attention(*inputs, mask=foci.Causal()), 0.0
    for wrap, order in ((ring, "plain"), (ring, "zigzag"), (ulysses, "plain")):
        op: Any = wrap(foci.attention, groups[row], order) if wrap is ring else wrap(foci.attention, groups[row])  # type: ignore[arg-type, call-arg]
        out = op(*(shard(x, groups[row], order) for x in inputs), mask=foci.Causal())  # type: ignore[arg-type]
        error = max(error, float((out - shard(whole, groups[row], order)).abs().max()))  # type: ignore[arg-type]
    return error


def test_a_group_is_not_the_world(worlds: Worlds) -> None:
    """An all-to-all that is followed by a ring over the whole world."""
    assert max(worlds(4).run(_pairs_of_ranks)) < 1e-12


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("place", ROUND)
def test_windows_measure_in_the_whole_sequence(worlds: Worlds, place: str, size: int) -> None:
    """A window by positions within a block."""
    prove(worlds(size), place, by_name("window"))


@pytest.mark.parametrize("place", ROUND)
def test_the_backward_knows_what_the_forward_did(worlds: Worlds, place: str) -> None:
    """Causal, window and softcap switched off on the way back."""
    prove(worlds(2), place, by_name("everything"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", ROUND)
def test_gradients_keep_their_precision(worlds: Worlds, place: str, dtype: torch.dtype) -> None:
    """dq rounded to bfloat16 whatever the dtype: 3e-3 in float16, and an aliased buffer in float32."""
    case = by_name("causal")
    exact = truth(case, dtype)
    each = [errors(truth(case, dtype, foci.attention_with_lse, backend=b), exact) for b in (None, "chunked")]
    one = {name: max(errors[name] for errors in each) for name in exact}
    ours = errors(found_on(worlds(4), wrapper(place), case, dtype), exact)
    for name, error in ours.items():
        assert error <= 1.5 * one[name] + torch.finfo(torch.float32).eps, f"{name}: {error:.1e}, {one[name]:.1e}"
    assert dtype != torch.float32 or max(ours.values()) < 2e-6


def _inputs_after() -> bool:
    q, k, v = (shard(x, dist.group.WORLD).requires_grad_() for x in problem(dtype=torch.float32))
    before = [x.detach().clone() for x in (q, k, v)]
    out = ring(foci.attention, dist.group.WORLD)(q, k, v, mask=foci.Causal())
    dout = torch.ones_like(out)
    out.backward(dout)
    apart = all(x.grad is not None and x.grad.data_ptr() != x.data_ptr() for x in (q, k, v))
    unchanged = all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))
    return apart and unchanged and bool((dout == 1).all())


def test_nothing_of_the_caller_s_is_written_to(worlds: Worlds) -> None:
    assert all(worlds(3).run(_inputs_after))


@pytest.mark.parametrize("place", ["ring plain", "ring zigzag", "ulysses"])
def test_lengths_that_look_like_widths(worlds: Worlds, place: str) -> None:
    """Attention weights [.., T, S] pass for (out, lse) where a shard is as long as a head is wide, and there are as
    many heads."""
    case = Case("square", sizes={"B": 4, "T": 8, "H": 4, "K": 4})
    q, k, v = problem(4, 8, 4, 4)
    assert case.size("T") // 2 == case.size("K") == case.size("H")
    for ours, whole in zip(
        worlds(2).run(_square, place), [foci.attention(q, k, v, mask=foci.Causal())] * 2, strict=True
    ):
        assert float((ours - whole).abs().max()) < 1e-12


def _square(place: str) -> Tensor:
    from foci.parallel.balance import unshard

    order: Any = place.split()[1] if place.startswith("ring") else "plain"
    out = wrapper(place).make(foci.attention)(
        *(shard(x, dist.group.WORLD, order) for x in problem(4, 8, 4, 4)), mask=foci.Causal()
    )
    return unshard(out, dist.group.WORLD, order)


def _joint(text: str) -> list[Tensor | None]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    image = [shard(x[:, 4:], mesh, "zigzag").requires_grad_() for x in problem(T=14)]
    words = [x[:, :4].clone().requires_grad_() for x in problem(T=14)]
    given = words if text == "replicated" else [shard(x, mesh, "zigzag") for x in words]
    out, text_out = joint(usp(foci.attention, mesh), text=text)(*image, *given)  # type: ignore[arg-type]
    share = 4.0 if text == "replicated" else 1.0
    (out.sin().sum() + text_out.sin().sum() / share).backward()
    return [x.grad for x in words]


@pytest.mark.parametrize("text", ["replicated", "split"])
def test_text_has_its_gradient_and_is_counted_once(worlds: Worlds, text: str) -> None:
    """Gradients of joint keys and values that are None; replicated text that every rank adds to the sum."""
    leaves = [x.requires_grad_() for x in problem(T=14)]
    foci.attention(*leaves).sin().sum().backward()
    for ours in worlds(4).run(_joint, text):
        for got, leaf in zip(ours, leaves, strict=True):
            assert got is not None and leaf.grad is not None
            assert float((got - leaf.grad[:, :4]).abs().max()) < 1e-12


@pytest.mark.parametrize("place", ROUND)
def test_lengths_need_not_divide(worlds: Worlds, place: str) -> None:
    """63 tokens over two ranks end the process."""
    prove(worlds(2), place, by_name("uneven length"))


def _raise_between(step: int) -> str:
    """A rank raises while blocks are on their way; then the same group attends as if nothing had been."""
    from foci.ops.softmax import chunked

    q, k, v = (shard(x, dist.group.WORLD) for x in problem())
    op, real, calls = ring(foci.attention, dist.group.WORLD), chunked.forward_part, [0]

    def failing(*args: Any) -> None:
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] > step:
            raise ArithmeticError("planted")
        real(*args)

    chunked.forward_part = failing
    try:
        op(q, k, v, backend="chunked")
        words = "no error"
    except foci.parallel.RankError as error:
        words = str(error)
    finally:
        chunked.forward_part = real
    whole = shard(foci.attention(*problem()), dist.group.WORLD)
    assert float((op(q, k, v) - whole).abs().max()) < 1e-12
    return words


@pytest.mark.parametrize("step", [0, 1, 2])
def test_an_error_on_the_way_leaves_the_group_usable(worlds: Worlds, step: int) -> None:
    """An exception between sending and receiving wedges the group; the next barrier times out."""
    found = worlds(3).run(_raise_between, step)
    assert set(found) == {f"attention: rank 1 failed in step {step} of the forward: ArithmeticError: planted"}
