"""What FLA's signatures share: every argument is honoured, checked or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foci import ShapeError, Unsupported
from foci.compat import fla as ours
from foci.compat.fla.arguments import Run, gate, gated, refuse, tuning, written

X = torch.ones(1, 6, 2, 4)
ENDS = torch.tensor([0, 2, 6])


def test_chunk_sizes_are_powers_of_two() -> None:
    for size in (16, 32, 64, 128):
        torch.testing.assert_close(ours.chunk_simple_gla(X, X, X, chunk_size=size), ours.chunk_simple_gla(X, X, X))
    for wrong in (0, -64, 48, 64.0):
        with pytest.raises(ValueError, match="chunk_size must be a power of 2, got"):
            ours.chunk_simple_gla(X, X, X, chunk_size=wrong)  # type: ignore[arg-type]


def test_the_copy_of_cu_seqlens_is_one() -> None:
    packed = ours.chunk_gla(X, X, X, -X, cu_seqlens=ENDS)
    torch.testing.assert_close(ours.chunk_gla(X, X, X, -X, cu_seqlens=ENDS, cu_seqlens_cpu=ENDS.clone()), packed)
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu must be the copy of cu_seqlens, \[0, "):
        ours.chunk_gla(X, X, X, -X, cu_seqlens=ENDS, cu_seqlens_cpu=ENDS + 1)
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu must be the copy of cu_seqlens \(shape \[3\]\)"):
        ours.chunk_gla(X, X, X, -X, cu_seqlens=ENDS, cu_seqlens_cpu=ENDS[:2])
    with pytest.raises(ValueError, match=r"cu_seqlens_cpu must be the copy of cu_seqlens \(shape None\)"):
        ours.chunk_gla(X, X, X, -X, cu_seqlens_cpu=ENDS)


def test_flags_are_booleans() -> None:
    tuning(safe_gate=True, disable_recompute=False)
    with pytest.raises(ValueError, match="disable_recompute must be True or False, got 1"):
        tuning(disable_recompute=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda **flag: ours.chunk_gla(X, X, X, -X, **flag), "state_v_first"),
        (lambda **flag: ours.chunk_gla(X, X, X, -X, **flag), "output_final_state"),
        (lambda **flag: ours.fused_recurrent_gla(X, X, X, **flag), "reverse"),
        (lambda **flag: ours.chunk_linear_attn(X, X, X, **flag), "normalize"),
        (lambda **flag: ours.parallel_simple_gla(X, X, X, **flag), "output_attentions"),
        (lambda **flag: ours.chunk_delta_rule(X, X, X, X[..., 0], **flag), "use_qk_l2norm_in_kernel"),
        (lambda **flag: ours.chunk_gdn(X, X, X, -X[..., 0], X[..., 0], **flag), "use_gate_in_kernel"),
        (lambda **flag: ours.chunk_gdn(X, X, X, -X[..., 0], X[..., 0], **flag), "use_beta_sigmoid_in_kernel"),
        (lambda **flag: ours.chunk_gdn(X, X, X, -X[..., 0], X[..., 0], **flag), "allow_neg_eigval"),
        (lambda **flag: ours.chunk_hgrn(X.flatten(2), X.flatten(2), **flag), "output_final_state"),
    ],
)
def test_a_word_is_no_flag(function, name) -> None:
    """ "False" meant True."""
    with pytest.raises(TypeError, match=f"^fla: {name} must be True or False, got 'False'"):
        function(**{name: "False"})
    function(**{name: 0})


STATE = torch.zeros(1, 2, 4, 4)
FUNCTIONS: dict[str, Callable[..., object]] = {
    "gla": lambda **given: ours.chunk_gla(X, X, X, -X, **given),
    "columns": lambda **given: ours.fused_recurrent_gla(X, X, X, gv=-X, **given),
    "backwards": lambda **given: ours.fused_recurrent_gla(X, X, X, reverse=True, **given),
    "delta": lambda **given: ours.chunk_gdn(X, X, X, -X[..., 0], X[..., 0], **given),
    "two steps a token": lambda **given: ours.chunk_iplr_delta_rule(X, X, X, X, X, **given),
    "product": lambda **given: ours.chunk_gated_delta_product(X, X, X, None, X[..., 0], 1, **given),
    "slots": lambda initial_state=None, **given: ours.chunk_gsa(
        X, X, X, X, initial_state=None if initial_state is None else (initial_state,) * 2, **given
    ),
    "hgrn": lambda initial_state=None, **given: ours.fused_recurrent_hgrn(
        X.flatten(2), -X.flatten(2), None if initial_state is None else initial_state.flatten(1)[:, :8], **given
    ),
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cu_seqlens": ENDS[:2]}, r"cu_seqlens must rise from 0 to T=6, got \[0, 2\]"),
        ({"cu_seqlens": ENDS.float()}, r"cu_seqlens must be a 1-D int32 or int64 tensor \[N \+ 1\], got float32 \[3\]"),
        ({"cu_seqlens": ENDS[None]}, r"cu_seqlens must be a 1-D .*, got int64 \[1, 3\]"),
        ({"cu_seqlens": ENDS[:0]}, "cu_seqlens is empty"),
        ({"cu_seqlens": [0, 6]}, r"cu_seqlens must be a tensor, got \[0, 6\]"),
        ({"cu_seqlens": ENDS, "initial_state": STATE}, "initial_state has 1 rows; expected 2, the packed documents"),
        ({"initial_state": STATE.expand(3, 2, 4, 4)}, "initial_state has 3 rows; expected 1, the rows in the batch"),
        ({"initial_state": STATE.long()}, "initial_state must be a floating tensor, got int64"),
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_wrong_with_documents_and_states_is_said_by_their_names_in_fla(function, given, said) -> None:
    """It was in our operators' words, with twice the tokens where a token is two steps, or torch.split's."""
    with pytest.raises((TypeError, ValueError), match=f"^fla: {said}"):
        FUNCTIONS[function](**given)


def test_what_is_no_batch_of_one_and_no_state_is_refused() -> None:
    with pytest.raises(ShapeError, match="fla: cu_seqlens need a batch of 1"):
        ours.chunk_gla(*(X.expand(2, 6, 2, 4),) * 3, -X.expand(2, 6, 2, 4), cu_seqlens=ENDS)
    for state, expected in ((STATE[0], r"\[2, 4, 4\]; expected \[N, H, V, K\]"), (STATE.sum(), r"\[\]")):
        with pytest.raises(ShapeError, match=f"fla: initial_state has shape {expected}"):
            ours.chunk_gla(X, X, X, -X, initial_state=state, state_v_first=True)
    with pytest.raises(ValueError, match="initial_state is not a pair; expected"):
        ours.chunk_gsa(X, X, X, X, initial_state=STATE)
    with pytest.raises(ShapeError, match="gv has shape"):
        ours.fused_recurrent_gla(X, X, X, gv=-X[..., :3])


def test_a_state_of_other_sizes_is_told_in_the_layout_that_was_given() -> None:
    """The operators told it in theirs, K x V, whatever was given."""
    for V, state, expected in (
        (5, STATE, "1, 2, 5, 4"),
        (4, STATE[:, :1], "1, 2, 4, 4"),
        (4, STATE[..., :3], "1, 2, 4, 4"),
    ):
        given = ", ".join(map(str, state.shape))
        said = rf"^fla: initial_state has shape \[{given}\]; expected \[N, H, V, K\] = \[{expected}\]"
        with pytest.raises(ShapeError, match=said):
            ours.chunk_gla(X, X, torch.zeros(1, 6, 2, V), -X, initial_state=state, state_v_first=True)
    with pytest.raises(ShapeError, match=r"^fla: .* \[1, 2, 4, 3\]; expected \[N, H, K, V\] = \[1, 2, 4, 4\]"):
        ours.chunk_gdn(X, X, X, -X[..., 0], X[..., 0], initial_state=STATE[..., :3])
    with pytest.raises(ShapeError, match=r"^fla: initial_state has shape \[1, 7\]; expected \[N, D\] = \[1, 8\]"):
        ours.chunk_hgrn(X.flatten(2), -X.flatten(2), STATE.flatten(1)[:, :7])


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("gk", {"g": -X[..., 0], "gk": -X[..., 0]}, r"4: \[B, T, H, K\]"),  # beta in gk's place
        ("gk", {"g": -X[..., 0], "gk": -X[:, :1]}, "T=6"),
        ("g", {"g": -X[..., :1, 0], "gk": -X}, "H=2"),
        ("g", {"g": -X[:, :1, :, 0], "gv": -X}, "T=6"),
        ("gk", {"gk": -X[:, :, :1], "gv": -X}, "H=2"),
    ],
)
def test_decays_that_are_added_do_not_broadcast(name, given, expected) -> None:
    with pytest.raises(ShapeError, match=f"^fla: {name} has .*(expected|says) {expected}"):
        ours.fused_recurrent_gated_delta_rule(X, X, X, **given)


ROW, HEAD = -X, -X[..., 0]


@pytest.mark.parametrize(
    ("name", "call", "rank"),
    [
        ("g", lambda: ours.chunk_gla(X, X, X, HEAD), 4),
        ("g", lambda: ours.fused_chunk_gla(X, X, X, HEAD), 4),
        ("gk", lambda: ours.fused_recurrent_gla(X, X, X, gk=HEAD), 4),
        ("gv", lambda: ours.fused_recurrent_gla(X, X, X, gv=HEAD), 4),
        ("g", lambda: ours.chunk_simple_gla(X, X, X, ROW), 3),
        ("g", lambda: ours.parallel_simple_gla(X, X, X, ROW), 3),
        ("g_gamma", lambda: ours.chunk_simple_gla(X, X, X, g_gamma=HEAD), 1),
        ("w", lambda: ours.chunk_rwkv6(X, X, X, HEAD, X[0, 0]), 4),
        ("u", lambda: ours.chunk_rwkv6(X, X, X, ROW, X[0, 0, 0]), 2),
        ("g", lambda: ours.chunk_gated_delta_rule(X, X, X, ROW, X[..., 0]), 3),
        ("g", lambda: ours.chunk_gated_delta_rule(X, X, X, HEAD[0, 0], X[..., 0]), 3),
        ("g", lambda: ours.fused_recurrent_gdn(X, X, X, ROW), 3),
        ("g", lambda: ours.chunk_kda(X, X, X, HEAD, X[..., 0]), 4),
        ("g", lambda: ours.chunk_kda(X, X, X, HEAD, X[..., 0], use_gate_in_kernel=True, A_log=X[0, 0, :, 0]), 4),
        ("g", lambda: ours.chunk_gdn2(X, X, X, HEAD, X, X), 4),
        ("b", lambda: ours.chunk_gdn2(X, X, X, ROW, X[..., 0], X), 4),
    ],
)
def test_a_gate_of_another_variant_s_rank_raises(name, call, rank) -> None:
    """The operators take a decay of any rank: chunk_gla with a gate per head was chunk_simple_gla."""
    with pytest.raises(ShapeError, match=f"^fla: {name} has . dimensions, shape .*; expected {rank}: "):
        call()


def test_a_gate_that_fla_needs_is_not_left_out() -> None:
    for call in (ours.chunk_gla, ours.fused_chunk_gla):
        with pytest.raises(TypeError, match=r"^fla: g must be a tensor, got None"):
            call(X, X, X, None)  # type: ignore[arg-type]


def test_gates_that_would_have_no_effect_raise() -> None:
    numbers = torch.zeros(2)
    for name, value in (("A_log", numbers), ("dt_bias", numbers), ("lower_bound", -5.0)):
        given = {"A_log": None, "dt_bias": None, "lower_bound": None, name: value}
        with pytest.raises(ValueError, match=f"{name} has no effect without use_gate_in_kernel=True"):
            gated(X[..., 0], use_gate_in_kernel=False, **given)  # type: ignore[arg-type]
    assert gated(None, use_gate_in_kernel=False, A_log=None, dt_bias=None) is None


def test_gates_that_lack_something_raise() -> None:
    numbers = torch.zeros(2)
    with pytest.raises(ValueError, match="needs g, the gate before its activation"):
        gated(None, use_gate_in_kernel=True, A_log=numbers, dt_bias=None)
    with pytest.raises(ValueError, match="needs A_log"):
        gated(X[..., 0], use_gate_in_kernel=True, A_log=None, dt_bias=None)
    with pytest.raises(ValueError, match=r"lower_bound must be negative, got 1\.0"):
        gated(X, use_gate_in_kernel=True, A_log=None, dt_bias=None, lower_bound=1.0)
    for bound in (None, -6.0):
        with pytest.raises(ValueError, match=r"need lower_bound in \[-5, 0\)"):
            gated(X, use_gate_in_kernel=True, A_log=numbers, dt_bias=None, lower_bound=bound, safe_gate=True)
    with pytest.raises(ShapeError, match=r"A_log has shape \[3\]; expected 2 numbers"):
        gate(X, torch.zeros(3), None)
    with pytest.raises(ShapeError, match=r"dt_bias has shape \[2\]; expected 8 numbers"):
        gate(X, numbers, numbers)
    with pytest.raises(ValueError, match="use_beta_sigmoid_in_kernel=True needs beta"):
        written(X, None, True, False)


def test_refusals_name_the_function_and_each_argument() -> None:
    refuse("f", {"cp_context": None, "use_graph": False})
    with pytest.raises(Unsupported) as caught:
        refuse("f", {"cp_context": object(), "use_graph": True, "max_num_seqs": None})
    assert caught.value.what == "foci.compat.fla.f cannot honour this call"
    assert [reason.split(" ")[0] for reason in caught.value.reasons] == ["cp_context", "use_graph"]


def test_layouts_and_directions_undo_themselves() -> None:
    run = Run(None, None, True, ENDS, reverse=True, state_v_first=True)
    state, tokens = torch.randn(2, 3, 4, 5), torch.randn(1, 6, 3)
    torch.testing.assert_close(run.layout(run.layout(state)), state)
    torch.testing.assert_close(run.layout(state), state.transpose(-1, -2).flip(0))
    torch.testing.assert_close(run.turn(tokens), tokens.flip(1))
    assert run.offsets is not None and run.offsets.tolist() == [0, 4, 6]
