"""Plain torch in chunks: the CPU backend, O(T) memory, its own backward."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from foci.ops import arguments
from foci.ops.selective_scan.call import NAME, Call, rates

# Tokens of a slab, whose states [K, D] are held at once, and its rows, limited by a core's share of the cache.
_TOKENS, _NUMBERS = 32, 1 << 20


def reasons(call: Call) -> list[str]:
    return []


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """y_t = h_t C_t + skip x_t, slab by slab; the states of a slab are gone when the next one is computed."""
    scan = _Scan(call)
    y, state = torch.empty_like(scan.x), scan.first()
    for stretch in scan.stretches:
        h = state[stretch.states]
        for slab in _slabs(stretch):
            _, hs = scan.states(slab, h)
            h.copy_(hs[-1])
            y[slab] = _pair(scan.C[slab], hs)
    if call.skip is not None:
        y.addcmul_(call.skip.to(y.dtype), scan.x)
    final = arguments.ends(call, state.transpose(1, 2)).contiguous()
    return y.transpose(0, 1).to(call.x.dtype).contiguous(), final


def backward(
    call: Call, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """States are computed again, first those between slabs, then from the last slab to the first all of a slab.

    dh_t = dy_t C_t^T + a_{t+1} dh_{t+1} with a_t = exp(dt_t A); as new_t = u_t B_t^T, u_t = dt_t x_t: du_t = dh_t B_t;
    dB_t = u_t dh_t;  dC_t = dy_t h_t;  the log decay dt_t A gets e_t = dh_t a_t h_{t-1}
    """
    scan = _Scan(call)
    dy = torch.zeros_like(scan.x) if grads[0] is None else grads[0].to(scan.dtype).transpose(0, 1)
    dstate = scan.first() if grads[1] is None else _copy(grads[1].transpose(1, 2), scan.dtype)
    if grads[1] is None:
        dstate.zero_()
    du, ddt, dA = torch.empty_like(scan.x), torch.empty_like(scan.x), torch.zeros_like(scan.A)
    dB, dC = torch.empty_like(scan.B), torch.empty_like(scan.C)
    state = scan.first()
    for stretch in scan.stretches:
        slabs, h, borders, later = list(_slabs(stretch)), state[stretch.states], [], dstate[stretch.states]
        for slab in slabs:
            borders.append(h.clone())
            h.copy_(scan.states(slab, h)[1][-1])
        for slab, border in zip(reversed(slabs), reversed(borders), strict=True):
            a, hs = scan.states(slab, border)
            dh = scan.gradients(slab, dy[slab], a, later)
            torch.mul(a[0], dh[0], out=later)
            dC[slab], dB[slab] = _sum(hs, dy[slab]), _sum(dh, scan.u[slab])
            du[slab] = _pair(scan.B[slab], dh)
            e = dh.mul_(a)
            e[0].mul_(border)
            e[1:].mul_(hs[:-1])
            dA += torch.mul(e, scan.dt[slab][:, :, None], out=hs).sum((0, 1))
            ddt[slab] = torch.mul(e, scan.A, out=hs).sum(2)
    dx = du * scan.dt
    ddt.addcmul_(du, scan.x)
    dskip = None
    if call.skip is not None:
        dx.addcmul_(call.skip.to(dx.dtype), dy)
        dskip = (dy * scan.x).sum((0, 1))
    found = (dx.transpose(0, 1), ddt.transpose(0, 1), dA.t(), dB.transpose(0, 1), dC.transpose(0, 1), dskip)
    given = (call.x, call.dt, call.A, call.B, call.C, call.skip, call.state)
    return tuple(
        gradient.to(tensor.dtype).contiguous() if need and gradient is not None and tensor is not None else None
        for gradient, tensor, need in zip((*found, dstate.transpose(1, 2)), given, needs, strict=True)
    )


Slab = tuple[slice, slice]  # tokens and rows


def _slabs(stretch: arguments.Stretch) -> Iterator[Slab]:
    for start in range(stretch.start, stretch.stop, _TOKENS):
        yield slice(start, min(start + _TOKENS, stretch.stop)), stretch.rows


class _Scan:
    """The inputs in the accumulator's dtype, tokens first and channels last, and the states of one slab.

    Channels last and K before them, because a step then is one pass over whole vectors, whatever K is.
    """

    def __init__(self, call: Call) -> None:
        batch, T, D, K, _ = call.sizes
        self.call, self.dtype = call, call.accumulator
        self.x, self.dt, self.B, self.C = (
            each.to(self.dtype).transpose(0, 1).contiguous() for each in (call.x, call.dt, call.B, call.C)
        )
        self.A = rates(call.A, self.dtype).t().contiguous()
        self.powers = self.A * math.log2(math.e)  # torch's exp2 takes less than half the time of its exp
        self.u = self.dt * self.x
        most = max(1, _NUMBERS // max(1, _TOKENS * K * D))
        self.stretches = arguments.stretches(NAME, call.offsets, batch, T, most)
        shape = (min(_TOKENS, T), min(most, batch), K, D)
        self.buffers = [self.x.new_empty(shape) for _ in range(3)]

    def first(self) -> Tensor:
        """A copy [N, K, D] of the states before the first tokens."""
        _, _, D, K, N = self.call.sizes
        if self.call.state is None:
            return self.x.new_zeros(N, K, D)
        return _copy(self.call.state.transpose(1, 2), self.dtype)

    def states(self, slab: Slab, h: Tensor) -> tuple[Tensor, Tensor]:
        """Decays exp(dt_t A) and states of a slab [tokens, rows, K, D] that begins with the state h."""
        a, hs = (self._buffer(n, slab) for n in (0, 1))
        torch.mul(self.dt[slab][:, :, None], self.powers, out=a).exp2_()
        torch.mul(self.u[slab][:, :, None], self.B[slab][..., None], out=hs)
        for decay, new in zip(a.unbind(), hs.unbind(), strict=True):
            h = new.addcmul_(decay, h)
        return a, hs

    def gradients(self, slab: Slab, dy: Tensor, a: Tensor, later: Tensor) -> Tensor:
        """dh of a slab, of which `later` is what reaches its last state from the tokens behind it."""
        dhs = torch.mul(dy[:, :, None], self.C[slab][..., None], out=self._buffer(2, slab))
        steps, decays = dhs.unbind(), a.unbind()
        steps[-1].add_(later)
        for t in range(len(steps) - 2, -1, -1):
            steps[t].addcmul_(decays[t + 1], steps[t + 1])
        return dhs

    def _buffer(self, number: int, slab: Slab) -> Tensor:
        tokens, rows = (each.stop - each.start for each in slab)
        return self.buffers[number][:tokens, :rows]


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _pair(key: Tensor, h: Tensor) -> Tensor:
    """sum_k key[k] h[k, d] for each token and row."""
    return torch.matmul(key[..., None, :], h)[..., 0, :]


def _sum(h: Tensor, value: Tensor) -> Tensor:
    """sum_d h[k, d] value[d] for each token and row."""
    return torch.matmul(value[..., None, :], h.transpose(-1, -2))[..., 0, :]  # as h @ value it is far slower
