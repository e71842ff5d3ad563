"""What FLA's signatures have in common: packed documents, states, directions, gates, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from foci.core.errors import ShapeError, Unsupported
from foci.core.shapes import Signature, dense
from foci.core.spec import accumulator
from foci.nn.parts import l2norm
from foci.nn.recurrent import selective_decay
from foci.ops.arguments import check_documents, check_near, check_rest, number, plain, switch
from foci.ops.decay.api import linear_attention
from foci.ops.delta.api import delta_rule

Maybe = TypeVar("Maybe", Tensor, Tensor | None)
Pair = tuple[Tensor, Tensor | None]
Row = Float[Tensor, "B T G K"]
Value = Float[Tensor, "B T H V"]
Gate = Float[Tensor, "B T H"]
Decay = Float[Tensor, "B T H K"]

_REFUSED = {
    "cp_context": "FLA's context-parallel contexts are not read; states are handed on with foci.Affine",
    "chunk_indices": "foci makes its own chunks from cu_seqlens",
    "return_intermediate_states": "states at FLA's chunk borders are not kept; cut the sequence and hand the state on",
    "use_graph": "a padded cu_seqlens that leaves rows undefined is not supported",
    "max_num_seqs": "it says how far use_graph pads, which is not supported",
}


@dataclass(frozen=True)
class Run:
    """The options that FLA's functions share, and our operators run with them.

    reverse: from the last token of every document to its first. state_v_first: states are [N,H,V,K].
    """

    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    cu_seqlens: Tensor | None
    reverse: bool = False
    state_v_first: bool = False

    def __post_init__(self) -> None:
        if self.cu_seqlens is not None:
            dense("fla", "cu_seqlens", self.cu_seqlens)
        if self.initial_state is not None and not dense("fla", "initial_state", self.initial_state).dim():
            raise ShapeError("fla: initial_state has shape []; expected [N, ...]")
        for name in ("output_final_state", "reverse", "state_v_first"):
            switch("fla", name, getattr(self, name))

    def check(self, x: Tensor) -> None:
        """Raise, by FLA's names, for documents or a state that do not fit x [B,T,...]."""
        check_rest("fla", x, {"initial_state": self.initial_state})
        check_documents("fla", self.cu_seqlens, self.initial_state, x.shape[0], ("cu_seqlens", "initial_state"))
        if self.cu_seqlens is not None:
            check_near("fla", self.cu_seqlens, x.shape[1], "cu_seqlens")

    def linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None = None,
        *,
        bonus: Tensor | None = None,
        value_decay: Tensor | None = None,
    ) -> Pair:
        """`linear_attention`; value_decay [B,T,H,V] is a decay of the state's columns."""
        state = self._state(q, v)
        q, k, v = map(self.turn, (q, k, v))
        log_decay, value_decay = map(self.turn, (log_decay, value_decay))
        if value_decay is not None:
            v, log_decay, state = _columns(v, log_decay, value_decay, state)
        out, final = linear_attention(
            q, k, v, log_decay=log_decay, bonus=bonus, scale=self.scale, state=state, offsets=self.offsets,
            return_state=bool(self.output_final_state),
        )  # fmt: skip
        return self._back(out, final, value_decay)

    def delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None = None,
        *,
        erase: Tensor | None = None,
        value_decay: Tensor | None = None,
    ) -> Pair:
        """`delta_rule`, erase rounded to keys' dtype; value_decay as in `linear`."""
        state = self._state(q, v)
        q, k, v, beta = map(self.turn, (q, k, v, beta))
        erase = None if erase is None else self.turn(erase.to(k.dtype))
        log_decay, value_decay = map(self.turn, (log_decay, value_decay))
        if value_decay is not None:
            beta = beta.repeat_interleave(v.shape[-1], dim=2)
            v, log_decay, state = _columns(v, log_decay, value_decay, state)
        out, final = delta_rule(
            q, k, v, beta, log_decay=log_decay, erase=erase, scale=self.scale, state=state, offsets=self.offsets,
            return_state=bool(self.output_final_state),
        )  # fmt: skip
        return self._back(out, final, value_decay)

    def turn(self, x: Maybe) -> Maybe:
        """[B,T,...] in the order of the recurrence, or back; what has no tokens stays."""
        return x.flip(1) if self.reverse and x is not None and x.dim() > 1 else x

    @property
    def offsets(self) -> Tensor | None:
        ends = self.cu_seqlens
        return (ends[-1] - ends).flip(0) if self.reverse and ends is not None else ends

    def layout(self, state: Tensor | None) -> Tensor | None:
        """From FLA's layout to ours, or back: a sequence read backwards has its documents in the other order too."""
        if state is None:
            return None
        state = state.transpose(-1, -2) if self.state_v_first else state
        return state.flip(0) if self.reverse and self.cu_seqlens is not None else state

    def _state(self, q: Tensor, v: Tensor) -> Tensor | None:
        """The initial state in our operators' layout, checked, in FLA's, against q [B,T,G,K] and v [B,T,H,V]."""
        state = self.initial_state
        wanted, last = ("[N, H, V, K]", (v, q)) if self.state_v_first else ("[N, H, K, V]", (q, v))
        if state is not None and state.dim() != 4:
            raise ShapeError(f"fla: initial_state has shape {list(state.shape)}; expected {wanted}")
        if dense("fla", "q", q).dim() == dense("fla", "v", v).dim() == 4:  # the operator says what is wrong with others
            self.check(v)
            sizes = [v.shape[2], *(x.shape[3] for x in last)]
            if state is not None and [*state.shape[1:]] != sizes:
                expected = f"{wanted} = {[len(state), *sizes]}"
                raise ShapeError(f"fla: initial_state has shape {list(state.shape)}; expected {expected}")
        return self.layout(state)

    def _back(self, out: Tensor, final: Tensor | None, value_decay: Tensor | None) -> Pair:
        if value_decay is not None:
            heads = value_decay.shape[2:]
            out = out.squeeze(-1).unflatten(2, heads)
            final = None if final is None else final.squeeze(-1).unflatten(1, heads).transpose(-1, -2)
        return self.results(out, final)

    def results(self, out: Tensor, final: Tensor | None) -> Pair:
        """What ran in the order and layout of our operators, in those that were asked for; contiguous, as theirs."""
        final = self.layout(final)
        return self.turn(out).contiguous(), None if final is None else final.contiguous()


def _columns(v: Tensor, log_decay: Tensor | None, value_decay: Tensor, state: Tensor | None) -> tuple[Tensor, ...]:
    """Every column of the state as a head of its own, with values of size 1: they never meet, so each may decay alone.

    v [B,T,H,V] -> [B,T,HV,1]; both decays -> [B,T,HV] or [B,T,HV,K]; state [N,H,K,V] -> [N,HV,K,1]. Their shapes were
    held to v's before: a sum of two decays would broadcast.
    """
    decay = value_decay
    if log_decay is not None and log_decay.dim() == 4:
        decay = log_decay[:, :, :, None] + value_decay[..., None]
    elif log_decay is not None:
        decay = log_decay[..., None] + value_decay
    columns = None if state is None else state.transpose(-1, -2).flatten(1, 2)[..., None]
    return v.flatten(2)[..., None], decay.flatten(2, 3), columns  # type: ignore[return-value]


def gate(raw: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    """log_decay = -exp(A_log) softplus(raw + dt_bias); with a bound, lower_bound * sigmoid(exp(A_log) (raw + dt_bias)).

    raw [B,T,H] (Gated DeltaNet) or [B,T,H,K] (KDA), A_log one number a head, dt_bias as many as raw has a token.
    """
    shape = raw.shape[2:]
    for name, tensor, size in (("A_log", A_log, shape[0]), ("dt_bias", dt_bias, shape.numel())):
        if tensor is not None and tensor.numel() != size:
            raise ShapeError(f"{name} has shape {list(tensor.shape)}; expected {size} numbers for g {list(raw.shape)}")
    if lower_bound is None:
        if A_log is None:
            raise ValueError("use_gate_in_kernel=True needs A_log (or, in KDA and GDN-2, lower_bound)")
        bias = None if dt_bias is None else dt_bias.reshape(-1)
        return selective_decay(A_log.reshape(-1), raw.flatten(2), bias).view(raw.shape)
    wide = raw.to(accumulator(raw.dtype))
    if dt_bias is not None:
        wide = wide + dt_bias.to(wide.dtype).reshape(shape)
    if A_log is not None:
        wide = A_log.to(wide.dtype).reshape(shape[0], *[1] * (len(shape) - 1)).exp() * wide
    return lower_bound * torch.sigmoid(wide)


def gated(
    g: Tensor | None,
    *,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
    safe_gate: bool = False,
) -> Tensor | None:
    """The log_decay that FLA's gate arguments mean; ValueError for those that would have no effect."""
    if switch("fla", "use_gate_in_kernel", use_gate_in_kernel):
        if g is None:
            raise ValueError("use_gate_in_kernel=True needs g, the gate before its activation")
        below_zero("lower_bound", lower_bound)
        if safe_gate and (lower_bound is None or lower_bound < -5):
            raise ValueError(
                f"safe_gate=True and use_gate_in_kernel=True need lower_bound in [-5, 0), got {lower_bound}"
            )
        return gate(g, A_log, dt_bias, lower_bound)
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
        if value is not None:
            raise ValueError(f"{name} has no effect without use_gate_in_kernel=True")
    return g


def written(v: Tensor, beta: Tensor | None, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> Tensor:
    """beta, or sigmoid(beta), or 2 sigmoid(beta), as FLA's flags say; 1 for every token and head of v without beta."""
    sigmoid = switch("fla", "use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel)
    if switch("fla", "allow_neg_eigval", allow_neg_eigval) and not sigmoid:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if not sigmoid:
        return ones(v) if beta is None else beta
    if beta is None:
        raise ValueError("use_beta_sigmoid_in_kernel=True needs beta")
    return beta.to(accumulator(beta.dtype)).sigmoid() * (2 if allow_neg_eigval else 1)


def hold(signature: Signature, tensors: dict[str, Tensor | None]) -> None:
    """Raise, by FLA's names, for what is no tensor, has other sizes, holds whole numbers or lies elsewhere."""
    signature.bind(tensors)
    first = next(x for x in tensors.values() if x is not None)
    check_rest("fla", first, tensors)


def ones(v: Tensor) -> Tensor:
    """[B,T,H] of v [B,T,H,V]."""
    return v.new_ones(v.shape[:3])


def unit(use_qk_l2norm_in_kernel: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, of length 1 where FLA's flag asks for it: x / sqrt(sum(x^2) + 1e-6)."""
    wanted = switch("fla", "use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
    return tuple(l2norm(x) for x in tensors) if wanted else tensors


def below_zero(name: str, value: float | None) -> None:
    """Raise unless it is None or a negative number."""
    if value is not None and not number("fla", name, value) < 0:
        raise ValueError(f"{name} must be negative, got {value}")


def refuse(function: str, given: Mapping[str, object]) -> None:
    """Unsupported for those of the arguments that foci does not honour and that were given: neither None nor False."""
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if given:
        reasons = [f"{name} was given: {_REFUSED[name]}" for name in given]
        raise Unsupported(f"foci.compat.fla.{function} cannot honour this call", reasons)


def tuning(
    *,
    chunk_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    disable_recompute: bool = False,
) -> None:
    """Checks what tunes FLA's kernels and can change no result."""
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1 or chunk_size & (chunk_size - 1)):
        raise ValueError(f"chunk_size must be a power of 2, got {chunk_size!r}")
    if cu_seqlens_cpu is not None:
        dense("fla", "cu_seqlens_cpu", cu_seqlens_cpu)
        shape = None if cu_seqlens is None else list(dense("fla", "cu_seqlens", cu_seqlens).shape)
        if shape != list(cu_seqlens_cpu.shape) or cu_seqlens_cpu.device.type != "cpu":
            got = f"{list(cu_seqlens_cpu.shape)} on {cu_seqlens_cpu.device}"
            raise ValueError(f"cu_seqlens_cpu must be the copy of cu_seqlens (shape {shape}) on the CPU, got {got}")
        if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and plain(cu_seqlens) and plain(cu_seqlens_cpu):
            own, copy = cu_seqlens.tolist(), cu_seqlens_cpu.tolist()
            if own != copy:
                raise ValueError(f"cu_seqlens_cpu must be the copy of cu_seqlens, {own!r:.99}, got {copy!r:.99}")
    for name, flag in (("safe_gate", safe_gate), ("disable_recompute", disable_recompute)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")
