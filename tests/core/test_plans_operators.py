"""Every operator's calls have a plan, packed ones too: they do nothing but take memory and launch on it."""

from __future__ import annotations

import inspect
import sys
import weakref
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from foci.cli_check import FUNCTIONS
from foci.core import plans, replay, tensor_maps, tune
from foci.ops import SPECS
from foci.ops.masks import Causal, Dense, Lengths, Packed, Window, lower
from foci.ops.softmax.api import attention_with_lse

pytest.importorskip("triton")
CASES = [(spec, case) for spec in SPECS.values() for case in spec.cases]


class Compiled:
    """A kernel that does nothing; what a call then gives is never looked at."""

    function = packed_metadata = None

    def run(self, *arguments: Any) -> None:
        return None


def start(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: Any, device: torch.device) -> None:
    if (callback := tune.LAUNCH_CALLBACK.get()) is not None:
        callback(kernel, Compiled(), grid, arguments)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors pass for a GPU's."""
    monkeypatch.setattr("foci.ops.gpu.interpreting", lambda: True)
    monkeypatch.setattr(tune, "interpreting", lambda: False)
    monkeypatch.setattr(tune, "_start", start)
    monkeypatch.setattr(plans, "_current_device", lambda: -1)
    monkeypatch.setattr(plans, "on_gpu", lambda x: isinstance(x, torch.Tensor))
    monkeypatch.setattr(replay, "_stream", lambda device: 0)
    monkeypatch.setattr(plans, "_FUNCTION_PLANS", {})
    monkeypatch.setattr(plans, "_SEEN", set())
    monkeypatch.setattr(plans, "_GUARDED", {})
    monkeypatch.setattr(plans, "_OPERATOR_PLANS", {})


@pytest.mark.parametrize(("spec", "case"), CASES, ids=lambda value: value.name)
def test_a_call_and_its_backward_have_a_plan(spec: Any, case: Any) -> None:
    """What has none runs through the module's Python every time: a question that torch answers is enough."""
    given = case.make(torch.float16, torch.device("cpu"), 0)
    wanted = [x.requires_grad_() for x in given.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for _ in range(3):
        out = FUNCTIONS[spec.name](**given, backend="triton")[0]
        torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
    assert [(kind.__name__, plan is not None) for (kind, *_), plan in plans._FUNCTION_PLANS.items()] == [
        ("forward", True),
        ("backward", True),
    ]


def test_pieces_that_begin_by_maps_have_a_plan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one head, as kernels for the CPU are those of a small GPU."""
    names: list[str] = []

    def begin(kernel: Any, *rest: Any) -> None:
        names.append(kernel.fn.__name__)
        start(kernel, *rest)

    monkeypatch.setattr(tune, "_start", begin)
    monkeypatch.setattr(
        tensor_maps, "makers", lambda _, told: [lambda address: address for _ in filter(tensor_maps.is_map, told)]
    )
    monkeypatch.setattr(tensor_maps, "c_launcher", lambda launch: (launch, ()))
    monkeypatch.setattr("foci.ops.delta.gpu.unsuitable", lambda *_: [])  # the interpreter's reason against bfloat16
    q, k, v = (torch.empty(1, 6144, 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gates = torch.empty(1, 6144, 1)
    for _ in range(3):
        out = FUNCTIONS["delta"](q, k, v, gates, log_decay=gates, backend="triton")[0]
        torch.autograd.grad(out, [q, k, v], out)
    by_warps = tune.with_gluon()
    assert names.count("token_walk_kernel") == (2 if by_warps else 4) and names.count("token_walk_back_kernel") == 4
    assert names.count("wide_walk_kernel") == (2 if by_warps else 0)
    assert [plan is not None for plan in plans._FUNCTION_PLANS.values()] == [True, True]


class Telling(Compiled):
    """A kernel that says with what it was started."""

    def __init__(self, into: list[Any]) -> None:
        self.into = into

    def run(self, *arguments: Any) -> None:
        self.into.append((arguments[:3], arguments[9:]))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the arguments of each operator were checked."""
    found = dict.fromkeys(SPECS, 0)
    for name, function in FUNCTIONS.items():
        module = sys.modules[function.__module__]
        binds = "bound" if name == "softmax" else "bind"

        def bind(*given: Any, name: str = name, plain: Any = getattr(module, binds), **named: Any) -> Any:
            found[name] += 1
            return plain(*given, **named)

        monkeypatch.setattr(module, binds, bind)
    return found


@pytest.mark.parametrize("trains", [False, True], ids=["alone", "trains"])
@pytest.mark.parametrize(("spec", "case"), CASES, ids=lambda value: value.name)
def test_a_call_like_one_before_is_checked_no_more_and_launches_the_same_on_its_own_tensors(
    spec: Any, case: Any, trains: bool, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its backward, where it trains."""
    written: list[Any] = []
    played: list[Any] = []

    def begin(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: Any, device: torch.device) -> None:
        written.append(((*grid, 1, 1)[:3], arguments))
        if (callback := tune.LAUNCH_CALLBACK.get()) is not None:
            callback(kernel, Telling(played), (*grid, 1, 1)[:3], arguments)

    monkeypatch.setattr(tune, "_start", begin)

    def run(given: dict[str, Any]) -> None:
        out = FUNCTIONS[spec.name](**given, backend="triton")[0]
        if trains:
            leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
            gradients = torch.autograd.grad(out, leaves, ones, allow_unused=True)
            assert all(x is None or x.shape == leaf.shape for x, leaf in zip(gradients, leaves, strict=True))

    def made(seed: int) -> dict[str, Any]:
        given = case.make(torch.float16, torch.device("cpu"), seed)
        for x in given.values():
            if trains and isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()
        return given

    ones = torch.ones_like(FUNCTIONS[spec.name](**made(0), backend="triton")[0])
    for _ in range(3):
        run(made(0))
    before, given = counted[spec.name], made(1)
    ours = {x.untyped_storage().data_ptr() for x in given.values() if isinstance(x, torch.Tensor) and x.numel()}
    run(given)
    if "dropout" in given:  # every call draws a seed
        assert counted[spec.name] == before + 1
        return
    assert counted[spec.name] == before
    monkeypatch.setattr(plans, "_usable", lambda: False)
    written.clear()
    run(given)
    played = played[-len(written) :]
    for (grid, arguments), (there, pointers) in zip(written, played, strict=True):
        assert grid == there
        for right, got in zip(arguments, pointers, strict=True):
            if not isinstance(right, torch.Tensor):
                assert right == got
            elif right.untyped_storage().data_ptr() in ours:
                assert right.data_ptr() == got


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float16)


def full(*shape: int) -> torch.Tensor:
    return -torch.rand(shape)


def many(name: str, trains: bool = False) -> dict[str, Any]:
    """A call with every argument that its function has; v and x are what none can do without."""
    given = _many(name)
    for argument in ("v", "x"):
        if trains and argument in given:
            given[argument].requires_grad_()
    return given


def _many(name: str) -> dict[str, Any]:
    rows, same = {x: half(1, 8, 2, 16) for x in "qkv"}, {"scale": 0.5, "backend": "triton"}
    ends = {"state": full(2, 2, 16, 16), "offsets": torch.tensor([0, 3, 8]), "return_state": False}
    if name == "softmax":
        lengths = Lengths(torch.tensor([8]))
        beside = {"mask": Causal() & lengths, "bias": full(1, 2, 8, 8), "sink": full(2), "softcap": 5.0, "dropout": 0.0}
        return rows | beside | same
    if name == "linear":
        return rows | ends | {"log_decay": full(1, 8, 2), "bonus": full(2, 16), "causal": True} | same
    if name == "delta":
        return rows | ends | {"log_decay": full(1, 8, 2), "beta": -full(1, 8, 2), "erase": half(1, 8, 2, 16)} | same
    ends |= {"backend": "triton"}
    if name == "scan":
        return ends | {"x": half(1, 8, 16), "log_decay": full(1, 8, 16), "state": full(2, 16)}
    rates = {"A": full(16, 4), "B": half(1, 8, 4), "C": half(1, 8, 4), "skip": full(16), "state": full(2, 16, 4)}
    return ends | {"x": half(1, 8, 16), "dt": half(1, 8, 16)} | rates


OTHER = {
    "mask": [Causal(), *[x & Lengths(torch.tensor([8])) for x in (Causal("top-left"), Window(2, 0))], None],
    "softcap": [6.0, None], "scale": [0.25, -0.5, None], "dropout": [0.5], "causal": [False],
    "return_state": [True], "backend": ["chunked", None],
}  # fmt: skip
ARGUMENTS = [
    (name, argument) for name, function in FUNCTIONS.items() for argument in inspect.signature(function).parameters
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that kernels were launched with, of calls as they are written and of played ones."""
    found: list[Any] = []

    class Heard(Compiled):
        def run(self, *arguments: Any) -> None:
            found.extend(arguments)

    def begin(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: Any, device: torch.device) -> None:
        found.extend(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments)
        if (callback := tune.LAUNCH_CALLBACK.get()) is not None:
            callback(kernel, Heard(), grid, arguments)

    monkeypatch.setattr(tune, "_start", begin)
    return found


@pytest.mark.parametrize("trains", [False, True], ids=["alone", "trains"])
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_no_argument_is_forgotten_in_what_is_like_an_earlier_call(
    name: str, argument: str, trains: bool, counted: dict[str, int], launched: list[Any]
) -> None:
    """Changed alone, after calls like it were learned: another value is a new call, and another tensor is read."""
    function, given = FUNCTIONS[name], many(name, trains)
    assert given.keys() == inspect.signature(function).parameters.keys()
    for _ in range(4):
        function(**given)
    assert counted[name] == 2
    was = given[argument]
    if isinstance(was, torch.Tensor):
        launched.clear()
        function(**given | {argument: (new := was.detach().clone().requires_grad_(was.requires_grad))})
        assert counted[name] == 2 and new.data_ptr() in launched and was.data_ptr() not in launched
    others = OTHER.get(argument, [])
    if isinstance(was, torch.Tensor):
        others = [torch.stack([was, was], -1)[..., 0]]
        others += [was.detach().clone().requires_grad_(not was.requires_grad)] if was.is_floating_point() else []
        others += [None] if function.__kwdefaults__.get(argument, was) is None else []
    assert others
    for place, other in enumerate(others):
        with suppress(ValueError):  # without offsets there are too many states, without causality no decay
            function(**given | {argument: other})
        assert counted[name] == 3 + place, other


def test_tensors_within_a_mask_are_those_that_are_given(counted: dict[str, int], launched: list[Any]) -> None:
    kinds = [
        lambda: Lengths(torch.tensor([8])), lambda: Packed(torch.tensor([0, 3, 8]), torch.tensor([0, 2, 8])),
        lambda: Dense(torch.ones(8, 8, dtype=torch.bool)),
    ]  # fmt: skip
    for kind in kinds:
        before = counted["softmax"]
        for _ in range(4):
            launched.clear()
            mask = kind()
            attention_with_lse(**many("softmax") | {"mask": mask})
            held = [x for x in lower(mask) if isinstance(x, torch.Tensor)]
            assert held and all(x.data_ptr() in launched for x in held)
        assert counted["softmax"] == before + 2


def rows(**other: Any) -> dict[str, Any]:
    made = {name: torch.randn(1, 8, 2, 16, dtype=torch.float16) for name in "qkv"}
    return made | {"log_decay": -torch.rand(1, 8, 2), "backend": "triton"} | other


@pytest.mark.parametrize(("trains", "within"), [(False, torch.no_grad), (False, nullcontext), (True, nullcontext)])
def test_a_tensor_left_over_from_a_transform_is_an_ordinary_one(trains: bool, within: Any, launched: list[Any]) -> None:
    left: list[torch.Tensor] = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(x := torch.randn(1, 8, 2, 16, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="data pointer"):
        left[0].data_ptr()
    for _ in range(4):
        launched.clear()
        given = rows(q=left[0])
        given["v"].requires_grad_(trains)
        with within():
            out, _ = FUNCTIONS["linear"](**given)
        assert out.requires_grad == trains
        assert x.data_ptr() in launched and given["v"].data_ptr() in launched


def test_whatever_differs_is_checked(counted: dict[str, int]) -> None:
    linear = FUNCTIONS["linear"]
    for _ in range(4):
        linear(**rows())
    assert counted["linear"] == 2
    others: list[dict[str, Any]] = [
        {"q": torch.randn(1, 8, 2, 16, dtype=torch.float16, requires_grad=True)},
        {"log_decay": -torch.rand(1, 8, 2, 1).expand(1, 8, 2, 16)},
        {"log_decay": -torch.rand(2)},
        {"scale": 0.25},
        {"causal": False, "log_decay": None},
        {"return_state": True},
        {"k": torch.randn(1, 2, 8, 16, dtype=torch.float16).transpose(1, 2)},
        {"state": torch.zeros(1, 2, 16, 16)},
        {"offsets": torch.tensor([0, 3, 8])},
        {"backend": "chunked"},
        {"backend": None},
    ]
    for place, other in enumerate(others):
        linear(**rows(**other))
        assert counted["linear"] == 3 + place, other
    with torch.autocast("cpu", dtype=torch.float16):
        linear(**rows())
    with torch.profiler.profile():
        linear(**rows())
    assert counted["linear"] == 2 + len(others) + 2
    linear(**rows())
    assert counted["linear"] == 2 + len(others) + 2


@pytest.mark.parametrize("trains", [False, True])
def test_a_call_within_autocast_is_of_another_kind_and_its_tensors_are_made_anew_each_time(
    trains: bool, counted: dict[str, int]
) -> None:
    def call(dtype: torch.dtype) -> torch.dtype:
        given = rows()
        given |= {name: given[name].to(dtype).requires_grad_(trains) for name in "qkv"}
        return FUNCTIONS["linear"](**given)[0].dtype

    for within, checked in ((False, 2), (True, 3)):  # what they launch is the same
        for _ in range(5):
            with torch.autocast("cpu", dtype=torch.float16, enabled=within):
                assert call(torch.float16) == torch.float16
        assert counted["linear"] == checked
    for count in range(5):
        with torch.autocast("cpu", dtype=torch.float16):
            assert call(torch.float32) == torch.float16
        assert counted["linear"] == 4 + count
    assert call(torch.float32) == torch.float32


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"log_decay": -torch.rand(1, 7, 2)}, "log_decay has shape"),
        ({"v": torch.randn(1, 8, 3, 16, dtype=torch.float16)}, "multiple of k heads"),
        ({"k": torch.randn(1, 8, 2, 16)}, "have dtypes"),
        ({"q": None}, "q must be a tensor"),
        ({"q": [1.0]}, "q must be a tensor"),
        ({"scale": "1"}, "scale must be a number"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"return_state": 1}, "return_state must be True or False"),
        ({"offsets": torch.tensor([[0, 8]])}, "offsets has 2 dimensions"),
        ({"backend": "none such"}, "none such"),
    ],
)
def test_what_is_wrong_is_refused_after_any_number_of_right_calls(other: dict[str, Any], error: str) -> None:
    for _ in range(4):
        FUNCTIONS["linear"](**rows())
    for _ in range(4):
        with pytest.raises((TypeError, ValueError), match=error):
            FUNCTIONS["linear"](**rows(**other))


def test_a_training_call_compiles_whole_and_plays_no_plan(launched: list[Any]) -> None:
    """What the compiler traces of the autograd function may hold nothing that it does not know."""

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
        out, _ = FUNCTIONS["linear"](q, k, v, log_decay=log_decay, backend="triton")
        return out.float().sum()

    given = [x.requires_grad_() for name, x in rows().items() if name != "backend"]
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for _ in range(4):
        launched.clear()
        gradients = torch.autograd.grad(whole(*given), given)
        assert [x.shape for x in gradients] == [x.shape for x in given]
        assert launched
    assert not plans._OPERATOR_PLANS


def test_a_forward_while_another_thread_compiles_has_its_backward(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the compiler is at work, torch says to every thread."""
    for _ in range(4):
        given = rows()
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(torch.compiler, "is_compiling", lambda: True)
            out, _ = FUNCTIONS["linear"](**given | {"v": given["v"].requires_grad_()})
        launched.clear()
        out.float().sum().backward()
        assert launched and given["v"].grad is not None


class Reserved(torch.Tensor):
    """A subclass that does not say where it lies."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.data_ptr:
            raise TypeError("nobody is to know")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_is_not_asked_where_it_lies_before_a_backward(launched: list[Any]) -> None:
    for _ in range(4):
        q = torch.randn(1, 8, 2, 16, dtype=torch.float16).as_subclass(Reserved).requires_grad_()
        out, _ = FUNCTIONS["linear"](**rows(q=q))
        launched.clear()
        out.as_subclass(torch.Tensor).float().sum().backward()
        assert launched and q.grad is not None


def test_a_hook_on_a_kernel_and_a_watcher_are_heard_here_too(
    counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        FUNCTIONS["linear"](**rows())
    next(iter(plans._OPERATOR_PLANS.values())).kernels[0].pre_run_hooks.append(print)
    try:
        FUNCTIONS["linear"](**rows())
    finally:
        next(iter(plans._OPERATOR_PLANS.values())).kernels[0].pre_run_hooks.clear()
    assert counted["linear"] == 3
    monkeypatch.setattr(tune, "has_launch_hooks", lambda: True)
    FUNCTIONS["linear"](**rows())
    assert counted["linear"] == 4


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("backend", ["aten", "chunked", "reference"])
def test_a_call_of_another_backend_is_checked_once_and_keeps_nothing(
    backend: str, trains: bool, counted: dict[str, int]
) -> None:
    attend = FUNCTIONS["softmax"]

    def call(T: int = 8, **more: Any) -> list[torch.Tensor]:
        rows = [torch.randn(1, T, 2, 16, requires_grad=trains) for _ in range(3)]
        out, lse = attend(*rows, mask=Causal(), backend=backend, **more)
        grads = torch.autograd.grad(out, rows, torch.ones_like(out)) if trains else ()
        doubled = [x.detach().double().requires_grad_(trains) for x in rows]
        right = attend(*doubled, mask=Causal(), backend="reference", **more)
        exact = torch.autograd.grad(right[0], doubled, torch.ones_like(right[0])) if trains else ()
        for found, wanted in zip((out, lse, *grads), (*right, *exact), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
        return rows

    first = weakref.ref(call()[0])
    for _ in range(3):
        call()
    assert counted["softmax"] == 2 and first() is None  # ours and the reference's
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)
    call(T=9)
    call(scale=0.5)
    assert counted["softmax"] == 8
    with pytest.raises(ValueError, match="scale must be a finite number"):
        call(scale=float("nan"))


def test_only_so_many_of_these_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MAX_KEYS", 3)
    for T in range(1, 9):
        x = torch.randn(1, T, 2, 16)
        FUNCTIONS["softmax"](x, x + 1, x + 2, backend="reference")
        assert len(plans._OPERATOR_PLANS) <= 3


def test_where_triton_was_never_imported_they_are_checked_once_too(
    counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 8, 2, 16)
    FUNCTIONS["softmax"](x, x + 1, x + 2, backend="reference")
    plans._OPERATOR_PLANS.clear()
    monkeypatch.delitem(sys.modules, "triton")
    for _ in range(3):
        FUNCTIONS["softmax"](x, x + 1, x + 2, backend="reference")
    assert counted["softmax"] == 2


@pytest.mark.parametrize("operator", ["softmax", "delta"])
def test_a_backward_whose_saved_tensors_come_back_otherwise_is_another_kind(operator: str, launched: list[Any]) -> None:
    """Hooks of autograd may bring them back with other strides, and each of them is asked for it but once."""
    case = SPECS[operator].cases[0]

    def step(back: Any) -> list[Any]:
        given = case.make(torch.float16, torch.device("cpu"), 0)
        leaves = [x.requires_grad_() for x in given.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        count = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: count.append(x) or back(x)):
            out = FUNCTIONS[operator](**given, backend="triton")[0]
        ones = torch.ones_like(out)
        launched.clear()
        torch.autograd.grad(out, leaves, ones, allow_unused=True)
        assert len(count) == len({*map(id, count)})
        return [x for x in launched if isinstance(x, tuple)]

    plain = [step(lambda x: x) for _ in range(4)][-1]
    turned = step(lambda x: x.mT.contiguous().mT if x.dim() == 4 else x)
    assert turned != plain and step(lambda x: x) == plain
