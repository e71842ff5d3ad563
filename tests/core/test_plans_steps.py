"""One token at a time, by its plan: launched is what the step as written launches, whatever was learned before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.core import plans, replay, tune
from foci.ops import arguments
from foci.ops.softmax.paged import attention_paged

pytest.importorskip("triton")
B, G, H, K, V, M = 2, 2, 4, 16, 8, 5
Given = dict[str, Any]


def half(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float16)


def full(*shape: int) -> Tensor:
    return -torch.rand(shape)


def linear() -> Given:
    rows = {"q": half(B, G, K), "k": half(B, G, K), "v": half(B, H, V), "state": full(M, H, K, V)}
    return rows | {"log_decay": full(B, H), "bonus": full(H, K), "scale": 0.5, "slots": torch.tensor([3, -1])}


def delta() -> Given:
    given = linear() | {"beta": -full(B, H), "erase": half(B, G, K)}
    return {name: x for name, x in given.items() if name != "bonus"}


def scan() -> Given:
    return {"x": half(B, K), "log_decay": full(B, K), "state": full(B, K)}


def selective() -> Given:
    rows = {"x": half(B, H), "dt": half(B, H), "A": full(H, K), "B": half(B, K), "C": half(B, K)}
    return rows | {"state": full(B, H, K), "skip": full(H)}


def paged() -> Given:
    table, lengths = torch.arange(6, dtype=torch.int32).view(B, 3), torch.tensor([40, 17], dtype=torch.int32)
    pages = {"k_pages": half(6, 16, G, K), "v_pages": half(6, 16, G, V), "table": table, "lengths": lengths}
    same = {"softcap": 5.0, "sink": full(H), "window": 20, "scale": 0.5, "backend": "triton"}
    return {"q": half(B, 1, H, K)} | pages | same


STEPS: dict[str, tuple[Callable[..., Tensor], Callable[[], Given]]] = {
    "linear": (foci.linear_attention_step, linear),
    "delta": (foci.delta_rule_step, delta),
    "scan": (foci.scan_step, scan),
    "selective_scan": (foci.selective_scan_step, selective),
    "paged": (attention_paged, paged),
}
each = pytest.mark.parametrize("name", STEPS)
in_place = pytest.mark.parametrize("name", [name for name in STEPS if name != "paged"])
OTHER = {"scale": [0.125, -0.5, None], "softcap": [6.0, None], "window": [3, None], "backend": [None]}
ARGUMENTS = [(name, argument) for name in STEPS for argument in inspect.signature(STEPS[name][0]).parameters]


class Heard:
    """A kernel that notes what it was started with."""

    function = packed_metadata = None

    def __init__(self, into: list[Any]) -> None:
        self.into = into

    def run(self, *given: Any) -> None:
        self.into.append((given[:3], given[9:]))


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """CPU tensors pass for a GPU's; grid and arguments of every launch, of steps as they are written and of played."""
    found: list[Any] = []

    def begin(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: Any, device: torch.device) -> None:
        grid = (*grid, 1, 1)[:3]
        found.append((grid, tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)))
        if (callback := tune.LAUNCH_CALLBACK.get()) is not None:
            callback(kernel, Heard(found), grid, arguments)

    monkeypatch.setattr("foci.ops.gpu.interpreting", lambda: True)
    for place in ("gpu.can_step", "scan.step.can_step", "selective_scan.step.can_step"):
        monkeypatch.setattr(f"foci.ops.{place}", lambda state: True)
    monkeypatch.setattr(tune, "interpreting", lambda: False)
    monkeypatch.setattr(tune, "_start", begin)
    monkeypatch.setattr(plans, "_current_device", lambda: -1)
    monkeypatch.setattr(plans, "on_gpu", lambda x: isinstance(x, Tensor))
    monkeypatch.setattr(replay, "_stream", lambda device: 0)
    for known, empty in (("_FUNCTION_PLANS", {}), ("_SEEN", set()), ("_OPERATOR_PLANS", {}), ("_GUARDED", {})):
        monkeypatch.setattr(plans, known, empty)
    return found


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps whose arguments were checked."""
    found: list[str] = []
    for module, name in (
        (arguments, "bind_step"), (arguments, "check_step"), (foci.ops.softmax.paged, "_check"),
    ):  # fmt: skip
        plain = getattr(module, name)

        def check(*given: Any, plain: Any = plain) -> Any:
            found.append(plain.__name__)
            return plain(*given)

        monkeypatch.setattr(module, name, check)
    return found


def told(name: str, given: Given, launched: list[Any], *, written: bool = False) -> list[Any]:
    """What a step launches, with memory of its own named "own"."""
    ours = [x.data_ptr() for x in given.values() if isinstance(x, Tensor)]
    launched.clear()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if written:
            patch.setattr(plans, "_usable", lambda: False)
        STEPS[name][0](**given)
    return [
        (grid, [x if not isinstance(x, int) or x < 1 << 20 or x in ours else "own" for x in values])
        for grid, values in launched
    ]


@each
def test_from_the_third_on_a_step_is_not_checked_and_launches_the_same_on_its_own_tensors(
    name: str, launched: list[Any], checked: list[str]
) -> None:
    for turn in range(5):
        given = STEPS[name][1]()
        right = told(name, given, launched, written=True)
        checked.clear()
        assert told(name, given, launched) == right and right
        assert bool(checked) == (turn < 2)


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_a_changed_argument_is_heard(name: str, argument: str, launched: list[Any]) -> None:
    """Slots, states, gates: another tensor, other strides, another dtype, none; each call after all were learned."""
    function, make = STEPS[name]
    base = make()
    assert base.keys() == inspect.signature(function).parameters.keys()
    was = base[argument]
    others = OTHER.get(argument, [])
    if isinstance(was, Tensor):
        others = [was.clone(), torch.stack([was, was], -1)[..., 0]]
        optional = inspect.signature(function).parameters[argument].default is None
        others += [None] if optional and argument != "slots" else []  # without slots there are too many states
    if argument in ("log_decay", "beta", "bonus", "skip", "A", "sink"):
        others.append(was.to(torch.bfloat16))
    if argument == "slots":
        others.append(was.to(torch.int32))
    if argument == "log_decay" and name in ("linear", "delta"):
        others += [full(H), full(B, H, K)]
    assert others
    calls = [base, *[base | {argument: other} for other in others]]
    right = [told(name, given, launched, written=True) for given in calls]
    assert all(right) and (argument == "backend" or len({str(each) for each in right}) == len(right))
    for _ in range(4):
        assert [told(name, given, launched) for given in calls] == right


@in_place
def test_autograd_is_told_of_every_change(name: str) -> None:
    given = STEPS[name][1]()
    for turn in range(5):
        before = given["state"]._version
        STEPS[name][0](**given)
        assert given["state"]._version == before + 1, turn


@each
def test_what_is_refused_is_refused_after_any_number_of_steps(name: str) -> None:
    function, make = STEPS[name]
    for _ in range(4):
        function(**make())
    first = next(iter(make()))
    for _ in range(4):
        with pytest.raises((ValueError, NotImplementedError), match="it has no gradient"):
            function(**make() | {first: make()[first].requires_grad_()})
        with pytest.raises(ValueError, match=r"shape|dimensions|says"):
            function(**make() | {first: make()[first][:1]})
        if name != "paged":
            with pytest.raises(ValueError, match="state is float16; expected float32"):
                function(**make() | {"state": make()["state"].half()})
            with pytest.raises(ValueError, match="several of its numbers are one in memory"):
                function(**make() | {"state": make()["state"][..., :1].expand(make()["state"].shape)})


@pytest.mark.parametrize("name", ["linear", "delta"])
def test_autocast_is_heard(name: str) -> None:
    """It makes q, k, v and erase its own dtype, and so out."""
    function, make = STEPS[name]
    given = make()
    given |= {x: given[x].float() for x in ("q", "k", "v", "erase") if x in given}
    for _ in range(4):
        assert function(**given).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(4):
            assert function(**given).dtype == torch.bfloat16
    assert function(**given).dtype == torch.float32


@pytest.mark.parametrize("name", ["linear", "delta"])
def test_keys_that_are_queries_are_another_kind(name: str, launched: list[Any]) -> None:
    base = STEPS[name][1]()
    for given in (base, base | {"k": base["q"]}) * 4:
        right = told(name, given, launched, written=True)
        assert told(name, given, launched) == right
