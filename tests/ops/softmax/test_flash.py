"""Whatever a package's conventions, foci gives the equation through it; what it gets wrong is refused with why."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import foci
from foci.core import device, ledger
from foci.core.ledger import Defect
from foci.core.select import choose
from foci.ops.masks import Band, Causal, Dense, Lengths, Mask, Packed, Window
from foci.ops.softmax import flash
from foci.ops.softmax.call import Call, bind
from foci.ops.softmax.flash import backward, forward, prefers, reasons
from foci.ops.softmax.spec import SPEC
from tests.ops.softmax.problems import assert_budget, evaluate, promoted
from tests.ops.softmax.test_flash_packages import PLACES, TEXTS, Install, install, loaded

__all__ = ["install"]  # a fixture

EACH = pytest.mark.parametrize("name", PLACES)
MASKS: dict[str, Mask | None] = {
    "plain": None,
    "causal": Causal(),
    "causal, window": Causal() & Window(7, None),
    "window": Window(5, 3),
    "window to the left": Window(6, None),
    "window to the right": Window(None, 4),
    "a window that hides nothing": Window(50, 50),
    "a window as wide as the keys": Window(20, 23),
}


def tensors(T: int = 24, S: int = 24, H: int = 4, G: int = 2, K: int = 16, dtype=torch.bfloat16, V: int = 0):
    draw = torch.Generator().manual_seed(T + S)
    shapes = (2, T, H, K), (2, S, G, K), (2, S, G, V or K)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in zip("qkv", shapes, strict=True)}


def right_by_budget(given: dict, **through) -> dict[str, Tensor]:
    """What the backend gives for these arguments, found right in out, lse and gradients."""
    got = evaluate(given, "flash", **through)
    plain = {name: x.to(torch.float64) for name, x in evaluate(given, call=SPEC.plain, **through).items()}
    assert_budget(got, evaluate(promoted(given), **through), plain)
    return got


@EACH
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("T", "S"), [(24, 24), (9, 24), (1, 24)])
def test_out_lse_and_every_gradient_are_those_of_the_equation(name: str, mask: str, T: int, S: int, install) -> None:
    """Bottom-right causal and windows, grouped heads, a gradient of lse."""
    install(name)
    right_by_budget(tensors(T, S) | {"mask": MASKS[mask], "scale": 0.3})
    assert len(loaded()) >= 1


@EACH
@pytest.mark.parametrize("mask", ["plain", "causal", "causal, window"])
def test_of_more_queries_than_keys_the_first_see_nothing(name: str, mask: str, install: Install) -> None:
    install(name)
    got = right_by_budget(tensors(24, 9) | {"mask": MASKS[mask]})
    if mask != "plain":
        assert (got["lse"][:, :15] == -torch.inf).all() and got["lse"][:, 15:].isfinite().all()
        assert not got["out"][:, :15].any() and not got["dq"][:, :15].any()


def test_the_older_words_of_the_third(install: Install) -> None:
    install(flash_attn_3="flash_attn_func, _flash_attn_backward = real.third, real.older_third_backward")
    right_by_budget(tensors(9, 24) | {"mask": Causal() & Window(7, None)})


@EACH
def test_a_row_with_nan_has_an_lse_of_nan(name: str, install: Install) -> None:
    install(name)
    given = tensors()
    given["q"][1, 3, 2, 5] = torch.nan
    out, lse = foci.attention_with_lse(**given, mask=Causal(), backend="flash")
    assert lse.isnan().sum() == 1 and lse[1, 3, 2].isnan() and out[1, 3, 2].isnan().all()


@EACH
def test_strides_that_the_kernels_cannot_read_are_copied(name: str, install: Install) -> None:
    install(name)
    given = tensors()
    shapes = {key: x.shape for key, x in given.items()}
    wide = torch.randn(2, 24, 4, 3, 17).bfloat16()
    given["q"] = wide[:, :, :, 1, 1:]  # neither rows in eights of numbers nor their first at 16 bytes
    given["k"] = given["k"][:1].expand(2, -1, -1, -1)
    given["v"] = given["v"].transpose(1, 3).contiguous().transpose(1, 3)
    assert {key: x.shape for key, x in given.items()} == shapes
    right_by_budget(given | {"mask": Causal()})


@EACH
def test_a_gradient_of_out_or_of_lse_alone(name: str, install: Install) -> None:
    install(name)
    dout, dlse = torch.randn(2, 24, 4, 16).bfloat16(), torch.randn(2, 24, 4)
    right_by_budget(tensors(), through=(dout, None))
    got = evaluate(tensors(), "flash", through=(None, dlse))
    truth = evaluate(promoted(tensors()), through=(None, dlse))
    for key in ("dq", "dk"):
        assert (got[key] - truth[key]).norm() < 0.02 * truth[key].norm()
    assert got["dv"].abs().max() < 1e-6


def test_float16_has_gradients_only_where_dlse_is_taken(install: Install) -> None:
    install(*PLACES)
    call = bind(**tensors(dtype=torch.float16))
    assert reasons(call) == []
    call.q.requires_grad_()
    assert flash._first(call).name == "flash_attn_4"
    right_by_budget(tensors(dtype=torch.float16) | {"mask": Causal()})
    install("flash_attn_2", flash_attn_4="raise OSError('no card')")
    assert any("float16 has no room" in reason for reason in reasons(call))


def test_only_gradients_that_are_wanted_are_given(install: Install) -> None:
    install("flash_attn_3")
    call = bind(**tensors())
    outputs = forward(call)
    found = backward(call, outputs, (torch.ones_like(outputs[0]), None), [True, False, True, False, False])
    assert [x is None for x in found] == [False, True, False, True, True]


def test_the_lse_that_was_given_out_stays_what_it_was(install: Install) -> None:
    """Of one head it lies in memory as the kernel wants it, which wants another number for a row that sees nothing."""
    install("flash_attn_2")
    call = bind(**tensors(24, 9, H=1, G=1), mask=Causal())
    outputs = forward(call)
    backward(call, outputs, (torch.ones_like(outputs[0]), None), [True, True, True, False, False])
    assert (outputs[1][:, :15] == -torch.inf).all()


REFUSED: dict[str, dict] = {
    "a bias or dense mask": {"bias": torch.zeros(24, 24)},
    "dense mask": {"mask": Dense(torch.ones(24, 24).bool())},
    "a sink": {"sink": torch.zeros(4)},
    "a band": {"mask": Band(0, 3)},
    "documents and lengths": {"mask": Lengths(torch.tensor([3, 4]))},
    "softcap": {"softcap": 30.0},
    "their own random stream": {"dropout": 0.1},
    "float32 is not supported": tensors(dtype=torch.float32),
    "float64 is not supported": tensors(dtype=torch.float64),
    "values of another width": tensors(V=24),
    "a size is 0": tensors(S=0),
    "top-left causal": tensors(S=25) | {"mask": Causal("top-left")},
    "of more queries than keys": tensors(S=23) | {"mask": Window(3, 3)},
    "hides what it should show": tensors(S=23) | {"mask": Window(3, None)},
    "the scale must be positive": {"scale": -1.0},
    "widths of eights": tensors(K=12),
    "wider than 256": tensors(K=264),
    "more than 65535": {name: x[:1].expand(65536, -1, -1, -1) for name, x in tensors(1, 1).items()},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_they_cannot_do_or_get_wrong_is_refused_with_why(why: str, install: Install) -> None:
    install(*PLACES)
    call = bind(**tensors() | REFUSED[why])
    assert any(why in reason for reason in reasons(call))
    assert loaded() == []  # for what is refused anyway nothing is imported


def test_packed_documents_are_refused(install: Install) -> None:
    install(*PLACES)
    one = {name: x[:1] for name, x in tensors().items()}
    offsets = torch.tensor([0, 9, 24], dtype=torch.int32)
    assert reasons(bind(**one, mask=Packed(offsets))) == ["documents and lengths are not supported"]


def on(monkeypatch: pytest.MonkeyPatch, *capability: int, cuda: tuple[int, ...] = (13, 0), kind: str = "cuda") -> None:
    place = device.Platform(kind, (2, 13, 0), cuda, (9, 20, 0), capability)
    monkeypatch.setattr(flash, "platform", lambda _: place)


def able(**more) -> list[str]:
    call = bind(**tensors(**more))
    return [package.name for package in flash.PACKAGES if not flash._against(package, call)]


def test_which_card_each_is_for_and_who_goes_first(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(*PLACES)
    assert able() == able(K=256) == ["flash_attn_3", "flash_attn_4", "flash_attn_2"]
    on(monkeypatch, 10, 0)
    assert able() == ["flash_attn_4", "flash_attn_2"] and able(K=256) == ["flash_attn_2"]
    on(monkeypatch, 8, 0)
    assert able() == ["flash_attn_2"]
    on(monkeypatch, 7, 5)
    assert able() == []
    on(monkeypatch, 9, 4, cuda=())
    assert reasons(bind(**tensors())) == ["it needs an NVIDIA GPU, the tensors are on cpu"]
    on(monkeypatch, kind="cpu")
    assert reasons(bind(**tensors())) == ["it needs an NVIDIA GPU, the tensors are on cpu"]


def test_triton_is_preferred_for_little_and_few_queries_and_on_hopper_to_the_second(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("flash_attn_2", "flash_attn_3")
    large = bind(**tensors(T=4096, S=4096))
    assert (
        prefers(large, True) == ""
        and prefers(bind(**tensors()), True) == prefers(bind(**tensors(T=2, S=65536)), True) == "triton"
    )
    install(flash_attn_3="raise ImportError('an undefined symbol')")
    assert prefers(large, True) == "triton"
    on(monkeypatch, 8, 0)
    assert prefers(large, True) == ""


def test_it_is_chosen_behind_torch_s_kernels_and_before_triton_s(install: Install) -> None:
    names = [backend.name for backend in SPEC.backends]
    assert names.index("aten") < names.index("flash") < names.index("triton")
    assert choose(SPEC, bind(**tensors())).name == "aten"  # here it is the CPU's
    install("flash_attn_3")
    assert choose(SPEC, bind(**tensors())).name == "aten"
    assert choose(SPEC, bind(**tensors(), mask=Window(3, 3))).name == "flash"


def test_without_a_package_nothing_is_loaded_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_found", lambda package: False)
    told = foci.explain("softmax", **tensors(), mask=Window(3, 3))
    assert told.refused["flash"] == ["flash_attn or flash_attn_interface is not installed"]
    assert loaded() == []


FAULTS = {
    "cannot be used: ImportError: an undefined symbol": ("flash_attn_2", "raise ImportError('an undefined symbol\\n')"),
    "cannot be used: OSError": ("flash_attn_3", "raise OSError('no such file')"),
    "cannot be used: AttributeError": ("flash_attn_4", "flash_attn_func = real.fourth"),
    "another version: flash_attn_func takes no dropout_p, return_attn_probs": (
        "flash_attn_2",
        "def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)): ...",
    ),
    "another version: _flash_attn_backward takes no rng_state, window_size_left, window_size_right": (
        "flash_attn_2",
        "flash_attn_func = real.second\n"
        "def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,\n"
        "    window_size, softcap, alibi_slopes, deterministic): ...",
    ),
    "another version: flash_attn_func takes no return_attn_probs": (  # as flash-attn 2.8.3 has it: out alone
        "flash_attn_3",
        "def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)): ...",
    ),
    "another version: _flash_attn_bwd takes no dlse": (
        "flash_attn_4",
        "flash_attn_func = real.fourth\n"
        "def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, window_size_left=None,\n"
        "    window_size_right=None): ...",
    ),
    "out of a small call is off": (  # aligned top-left, as before flash-attn 2.1
        "flash_attn_2",
        "from functools import wraps\n"
        "@wraps(real.second)\n"
        "def flash_attn_func(q, k, v, **options):\n"
        "    k, v = (x[:, : q.shape[1]].contiguous() for x in (k, v))\n"
        "    return real.second(q, k, v, **options)\n"
        "_flash_attn_backward = real.second_backward",
    ),
    "lse of a small call is off by 44": (  # in base 2
        "flash_attn_3",
        "from functools import wraps\n"
        "@wraps(real.third)\n"
        "def flash_attn_func(*args, **options):\n"
        "    out, lse = real.third(*args, **options)\n"
        "    return out, lse / 0.6931471805599453\n"
        "_flash_attn_backward = real.third_backward",
    ),
    "out of a small call is off by": (  # a window of one key too many
        "flash_attn_4",
        "from functools import wraps\n"
        "@wraps(real.fourth)\n"
        "def flash_attn_func(*args, window_size, **options):\n"
        "    return real.fourth(*args, window_size=(window_size[0] + 1, window_size[1]), **options)\n"
        "_flash_attn_bwd = real.fourth_backward",
    ),
    "dq of a small call is off": (  # dlse is dropped
        "flash_attn_4",
        "from functools import wraps\n"
        "flash_attn_func = real.fourth\n"
        "@wraps(real.fourth_backward)\n"
        "def _flash_attn_bwd(*args, dlse, **options): return real.fourth_backward(*args, **options)",
    ),
    "dk of a small call is off": (
        "flash_attn_3",
        "from functools import wraps\n"
        "flash_attn_func = real.third\n"
        "@wraps(real.third_backward)\n"
        "def _flash_attn_backward(*args, dk, **options): real.third_backward(*args, dk=dk, **options); dk.mul_(1.1)",
    ),
    "cannot be used: ValueError: its lse is [2, 37, 4], not [2, 4, 37]": (
        "flash_attn_3",
        "from functools import wraps\n"
        "@wraps(real.third)\n"
        "def flash_attn_func(*args, **options):\n"
        "    out, lse = real.third(*args, **options)\n"
        "    return out, lse.transpose(1, 2)\n"
        "_flash_attn_backward = real.third_backward",
    ),
}


@pytest.mark.parametrize("why", FAULTS)
def test_a_package_that_fails_or_computes_something_else_is_told_and_not_used(why: str, install: Install) -> None:
    name, text = FAULTS[why]
    install(**{name: text})
    given = tensors() | {"mask": Window(3, 3)}
    told = foci.explain("softmax", **given)
    found = [reason for reason in told.refused["flash"] if reason.startswith(name)]
    assert len(found) == 1 and why in found[0] and "\n" not in found[0]
    assert told.chosen == "chunked"
    with pytest.raises(foci.Unsupported, match="flash"):
        foci.attention(**given, backend="flash")
    other = next(each for each in PLACES if each != name and not (name == "flash_attn_2" and each == "flash_attn_4"))
    install(other, **{name: text})
    assert flash._first(bind(**given)).name == other


def test_a_package_is_tried_once_and_not_while_a_graph_is_captured(install: Install, monkeypatch) -> None:
    install("flash_attn_3")
    tried: list[str] = []
    whole = flash._tried
    monkeypatch.setattr(flash, "_tried", lambda package, place: tried.append(package.name) or whole(package, place))
    for T in (24, 9):
        assert reasons(bind(**tensors(T))) == []
    assert tried == ["flash_attn_3"]
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "a CUDA graph is captured" in flash._fault("flash_attn_3", gpu)
    assert ("flash_attn_3", gpu) not in flash._FAULTS


def test_the_trial_heeds_neither_autocast_nor_modes(install: Install) -> None:
    install("flash_attn_3")
    with torch.autocast("cpu", torch.float16), FlopCounterMode(display=False):
        assert flash._fault("flash_attn_3", torch.device("cpu")) == ""


def test_the_first_call_may_be_one_within_vmap_a_gradient_transform_or_a_fake(install: Install) -> None:
    install("flash_attn_3")
    q, k, v = tensors().values()

    def loss(q: Tensor) -> Tensor:
        return foci.attention(q, k, v, mask=Causal(), backend="flash").float().square().sum()

    many = torch.vmap(loss)(torch.stack([q, 2 * q]))
    assert torch.equal(many, torch.stack([loss(q), loss(2 * q)]))
    flash._FAULTS.clear()
    gradient = torch.func.grad(loss)(q)
    leaf = q.clone().requires_grad_()
    assert torch.equal(gradient, torch.autograd.grad(loss(leaf), leaf)[0])
    flash._FAULTS.clear()
    with FakeTensorMode() as mode:
        out, lse = foci.attention_with_lse(*(mode.from_tensor(x) for x in (q, k, v)), backend="flash")
    assert out.shape == q.shape and lse.shape == q.shape[:3] and {("flash_attn_3", q.device): ""} == flash._FAULTS


def test_the_ledger_is_asked(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("flash_attn_3")
    defect = Defect("flash_attn_3", "veto", "wrong", "a/b#1", capability=(9, 0), when=lambda use: use.gradients)
    monkeypatch.setitem(ledger._VETOES, "flash_attn_3", (defect,))
    call = bind(**tensors())
    assert reasons(call) == []
    call.q.requires_grad_()
    assert any("ledger: wrong (a/b#1)" in reason for reason in reasons(call))
    monkeypatch.setitem(ledger._VETOES, "flash_attn_3", (replace(defect, capability=(8, 0)),))
    assert reasons(call) == []


def test_determinism_is_passed_on_or_refused(install: Install) -> None:
    install("flash_attn_3")
    wide = bind(**tensors(K=200))
    wide.q.requires_grad_()
    assert reasons(wide) == []
    torch.use_deterministic_algorithms(True)
    try:
        assert any("not deterministic" in reason for reason in reasons(wide))
        assert reasons(bind(**tensors())) == []
    finally:
        torch.use_deterministic_algorithms(False)


@EACH
def test_it_is_one_op_to_the_compiler(name: str, install: Install) -> None:
    install(name)
    given = tensors()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = foci.attention_with_lse(q, k, v, mask=Causal() & Window(3, None), backend="flash")
        return out.float().sum() + lse.sum()

    leaves = [x.requires_grad_() for x in given.values()]
    eager = torch.autograd.grad(loss(*leaves), leaves)
    flash._FAULTS.clear()  # tried while it is traced
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for one, two in zip(torch.autograd.grad(compiled(*leaves), leaves), eager, strict=True):
        assert torch.equal(one, two)


def test_sides_that_hide_nothing_are_open() -> None:
    def sides(T: int, S: int, mask: Mask) -> tuple[int | None, int | None]:
        return flash._asked(bind(**tensors(T, S), mask=mask))[4:]

    assert sides(9, 24, Window(22, 7)) == (22, 7) and sides(9, 24, Window(23, 8)) == (None, None)
    assert sides(1, 24, Causal()) == (None, None) and sides(9, 24, Causal() & Window(3, 5)) == (3, 0)
    assert isinstance(bind(**tensors()), Call) and "foci.ops.softmax.flash" in sys.modules and set(TEXTS) == set(PLACES)
