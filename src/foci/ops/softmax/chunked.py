"""Plain torch in chunks: the CPU backend, O(T) memory, its own backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from foci.merge.partial import absorb
from foci.ops.masks import Segment, live_keys, segments
from foci.ops.softmax.call import Call, Gradients, Rows, never_empty, together, without_padding
from foci.ops.softmax.dropout import keep

# Logits of a tile: few enough to stay in a core's cache between passes, enough to amortise the overhead of a call.
_TILE = 1 << 20


def reasons(call: Call) -> list[str]:
    return []


class Tile(NamedTuple):
    """A block of queries i0:i1 against all keys j0:j1 that any of them may see, for some batch rows and key heads.

    i and j index the tensors; `row` and `column` are i0 and j0 counted from the segment's start.
    """

    b0: int
    b1: int
    g0: int
    g1: int
    i0: int
    i1: int
    j0: int
    j1: int
    row: int
    column: int
    segment: Segment


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """One pass over the tiles. A tile holds every key of its rows, so its softmax is final and needs no rescaling.

    out = sum_s exp(z - m) v_s / L with m = max_s z, L = sum_s exp(z - m) + exp(sink - m); lse = log L + m
    """
    call = together(call)
    heads = _Heads(call)
    B, T, _, H, _, _, V = call.sizes
    out = call.v.new_zeros(B, T, H, V)
    lse = _initial_lse(call)
    for tile, m, mass, weighted in _sums(call, heads):
        total = mass.log().add_(m)
        if call.sink is not None:
            sink = call.sink.to(m.dtype)[tile.g0 * heads.R : tile.g1 * heads.R, None, None]
            total, mass = torch.logaddexp(total, sink), mass.add_(torch.exp(sink - m))
        weighted.div_(mass.masked_fill_(mass == 0, 1.0))  # an empty row's sum is 0
        _place(out, tile, heads.R).copy_(weighted)
        _place(lse, tile, heads.R).copy_(total[..., 0])
    return out, lse


def forward_part(call: Call, out: Tensor, lse: Tensor) -> None:
    """Merge attention over these keys into that of other keys: out [B,T,H,V] and lse [B,T,H] change in place.

    out is in the accumulator's dtype, lse in float64 (merge/partial.py: absorb). A sink is a part of its own, not in
    this call. Scratch memory: a copy of q, and one tile.
    """
    call = together(call)
    heads = _Heads(call)
    for tile, m, mass, weighted in _sums(call, heads):
        m = m[..., 0].masked_fill(mass[..., 0] == 0, -torch.inf)
        absorb(_place(out, tile, heads.R), _place(lse, tile, heads.R), weighted, m, mass[..., 0])


def _sums(call: Call, heads: _Heads) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor]]:
    """For each tile: m = max_s z (0 for an empty row), sum_s exp(z - m) and sum_s exp(z - m) v_s."""
    for tile in _tiles(call, heads.segments):
        z, _ = heads.logits(tile)
        m = z.amax(-1, keepdim=True)
        m.masked_fill_(m == -torch.inf, 0.0)  # an empty row: exp(-inf - 0) = 0 where exp(-inf + inf) would be NaN
        p = z.sub_(m).exp_()
        mass = p.sum(-1, keepdim=True)
        if call.seed is not None:
            p.mul_(_kept(call, tile, heads.R))
        yield tile, m, mass, heads.unfold(torch.bmm(heads.fold(p), heads.values(tile)), tile)


def backward(
    call: Call, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, sink, with p recomputed per tile from the saved lse.

    dp = dout v^T;  dz = p * (dp - delta) with delta[t] = sum_s p dp - dlse;  dsink = -sum_t exp(sink - lse) delta

    The sum over s equals sum_v dout out, but a tile holds whole rows, so it need not carry the rounding of a half out.
    """
    B, T, S, H, G, K, V = call.sizes
    dtype, given, call = call.accumulator, call, together(call)
    out, lse = outputs
    dout = torch.zeros_like(out, dtype=dtype) if grads[0] is None else grads[0].to(dtype)
    delta = torch.zeros_like(lse) if grads[1] is None else grads[1].neg().contiguous()
    steady = never_empty(lse)
    dq = torch.zeros(B, T, H, K, dtype=dtype, device=out.device)
    dk, dv = (torch.zeros(B, G, S, n, dtype=dtype, device=out.device) for n in (K, V))
    dbias = torch.zeros(call.bias.shape, dtype=dtype, device=out.device) if call.bias is not None and needs[3] else None
    into = Gradients(dq, dk.transpose(1, 2), dv.transpose(1, 2), dbias)
    _add_gradients(call, steady, dout, delta, into, rows_are_whole=True)
    if call is not given:  # excluded tokens were multiplied by 0, which leaves NaN if a real token has NaN
        dq, dk, dv = without_padding(given._replace(q=dq, k=into.dk, v=into.dv))[:3]
        dk, dv = dk.transpose(1, 2), dv.transpose(1, 2)
    dsink = None
    if call.sink is not None and needs[4]:
        share = torch.exp(call.sink.to(dtype) - steady)
        dsink = share.mul_(delta).sum((0, 1)).neg_().to(call.sink.dtype)
    return (
        dq.to(call.q.dtype) if needs[0] else None,
        dk.transpose(1, 2).to(call.k.dtype).contiguous() if needs[1] else None,
        dv.transpose(1, 2).to(call.v.dtype).contiguous() if needs[2] else None,
        None if dbias is None else dbias.to(call.bias.dtype),  # type: ignore[union-attr]
        dsink,
    )


def backward_part(call: Call, rows: Rows, into: Gradients) -> None:
    """Accumulate the gradients of attention to these keys, in place."""
    _add_gradients(call, never_empty(rows.lse), rows.dout, rows.delta, into, rows_are_whole=False)


def _add_gradients(
    call: Call, steady: Tensor, dout: Tensor, delta: Tensor, into: Gradients, rows_are_whole: bool
) -> None:
    """One pass over the tiles. With `rows_are_whole`, `delta` still lacks sum_s p dp, which is added in place."""
    heads = _Heads(call)
    dk, dv = into.dk.transpose(1, 2), into.dv.transpose(1, 2)
    for tile in _tiles(call, heads.segments):
        z, capped = heads.logits(tile, keep_cap=True)
        p = z.sub_(_place(steady, tile, heads.R)[..., None]).exp_()
        do = heads.fold(_place(dout, tile, heads.R).contiguous())
        dp = heads.unfold(torch.bmm(do, heads.values(tile).transpose(1, 2), out=heads.scratch(tile)), tile)
        seen = p
        if call.seed is not None:
            kept = _kept(call, tile, heads.R)
            seen, dp = p * kept, dp.mul_(kept)
        _keys(dv, tile).baddbmm_(heads.fold(seen).transpose(1, 2), do)
        dz = dp.mul_(p)
        row = _place(delta, tile, heads.R)
        if rows_are_whole:
            row.add_(dz.sum(-1))
        dz.addcmul_(p, row[..., None], value=-1)
        if into.dbias is not None:
            _add_reduced(into.dbias, dz, tile, heads.R)
        if capped is not None:  # d cap(x) / dx = 1 - tanh(x/c)^2
            dz.mul_(capped.square_().neg_().add_(1.0))
        folded = heads.fold(dz)
        _place(into.dq, tile, heads.R).add_(heads.unfold(torch.bmm(folded, heads.keys(tile)), tile), alpha=call.scale)
        # queries(tile) carried the scale (over the cap, if any), so dk has it already.
        _keys(dk, tile).baddbmm_(folded.transpose(1, 2), heads.queries(tile), alpha=heads.chain)


class _Heads:
    """q, k, v with heads first and in the accumulator's dtype, and the tile products they take part in."""

    def __init__(self, call: Call) -> None:
        *_, H, G, _, _ = call.sizes
        self.call, self.R = call, H // G
        dtype = call.accumulator
        # tanh needs z / c: the division is folded into q's scale. A half-precision matmul would round z and exceed the
        # LSE budget.
        inner = call.scale if call.softcap is None else call.scale / call.softcap
        self.chain = call.softcap if call.softcap is not None else 1.0
        B, T, _, K = call.q.shape
        self.q = torch.empty(B, H, T, K, dtype=dtype, device=call.q.device).copy_(call.q.transpose(1, 2)).mul_(inner)
        self.segments = segments(call.visible, B, T, call.k.shape[1])
        spans = _spans(self.segments, B)
        self.k, self.v = _heads_first(call.k, dtype, spans), _heads_first(call.v, dtype, spans)
        self._buffers: dict[str, Tensor] = {}

    def queries(self, tile: Tile) -> Tensor:
        part = self.q[tile.b0 : tile.b1, tile.g0 * self.R : tile.g1 * self.R, tile.i0 : tile.i1]
        return self.fold(part)

    def keys(self, tile: Tile) -> Tensor:
        return _keys(self.k, tile)

    def values(self, tile: Tile) -> Tensor:
        return _keys(self.v, tile)

    def fold(self, x: Tensor) -> Tensor:
        """[rows, heads, i, n] -> [rows * key heads, (H/G) * i, n]: the heads that share a key head share a product."""
        rows, heads, i, n = x.shape
        return x.reshape(rows * heads // self.R, self.R * i, n)

    def unfold(self, x: Tensor, tile: Tile) -> Tensor:
        return x.view(tile.b1 - tile.b0, (tile.g1 - tile.g0) * self.R, tile.i1 - tile.i0, x.shape[-1])

    def scratch(self, tile: Tile, name: str = "dp") -> Tensor:
        """A reused buffer for one tile of logits: page faults of fresh memory would cost as much as the work."""
        shape = ((tile.b1 - tile.b0) * (tile.g1 - tile.g0), self.R * (tile.i1 - tile.i0), tile.j1 - tile.j0)
        count = shape[0] * shape[1] * shape[2]
        held = self._buffers.get(name)
        if held is None or held.numel() < count:
            held = self._buffers[name] = self.q.new_empty(count)
        return held[:count].view(shape)

    def logits(self, tile: Tile, keep_cap: bool = False) -> tuple[Tensor, Tensor | None]:
        """z of one tile, masked; with `keep_cap` also tanh(x / c), for the backward."""
        call = self.call
        z = torch.bmm(self.queries(tile), self.keys(tile).transpose(1, 2), out=self.scratch(tile, "z"))
        capped = None
        if call.softcap is not None:
            z.tanh_()
            if keep_cap:
                capped = self.unfold(z, tile)
                z = torch.mul(z, call.softcap, out=self.scratch(tile, "capped"))
            else:
                z.mul_(call.softcap)
        z = self.unfold(z, tile)
        if call.bias is not None:
            z.add_(_pairs(call.bias, tile, self.R))
        _hide(z, tile)
        if call.dense is not None:
            z.masked_fill_(~_pairs(call.dense, tile, self.R), -torch.inf)
        return z, capped


class Span(NamedTuple):
    """A range of keys that some query of these rows may see."""

    rows: slice
    keys: slice


def _spans(parts: list[Segment], B: int) -> list[Span]:
    """The spans of k and v that are read; rows with the same keys, and adjacent documents, are joined."""
    found: list[Span] = []
    for part in parts:
        first, last = live_keys(part, 0, part.q_stop - part.q_start)
        if part.q_start == part.q_stop or first >= last:
            continue
        rows, keys = slice(*part.rows.indices(B)[:2]), slice(part.k_start + first, part.k_start + last)
        before = found[-1] if found else None
        if before and before.keys == keys and before.rows.stop == rows.start:
            found[-1] = Span(slice(before.rows.start, rows.stop), keys)
        elif before and before.rows == rows and before.keys.stop == keys.start:
            found[-1] = Span(rows, slice(before.keys.start, keys.stop))
        else:
            found.append(Span(rows, keys))
    return found


def _heads_first(x: Tensor, dtype: torch.dtype, spans: list[Span]) -> Tensor:
    """[B, S, G, n] as [B, G, S, n] in this dtype; a copy of the spans, unless each head's keys are contiguous already.

    Outside the spans the copy is uninitialised.
    """
    x = x.transpose(1, 2)
    dense = x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] and x.stride(0) == x.shape[1] * x.stride(1)
    if dense and x.dtype == dtype:
        return x
    copy = torch.empty(x.shape, dtype=dtype, device=x.device)
    for rows, keys in spans:
        copy[rows, :, keys] = x[rows, :, keys]
    return copy


def _tiles(call: Call, parts: list[Segment]) -> Iterator[Tile]:
    *_, H, G, _, _ = call.sizes
    R = H // G
    B = call.q.shape[0]
    for segment in parts if R else ():
        rows, length = range(B)[segment.rows], segment.q_stop - segment.q_start
        reach = segment.k_stop - segment.k_start
        if segment.low is not None and segment.high is not None:
            reach = min(reach, max(0, segment.high - segment.low) + 1)
        block = max(1, min(length, 256, max(32, _TILE // max(1, R * reach)) if R * reach else 256))
        group = max(1, _TILE // max(1, R * block * min(reach + block, segment.k_stop - segment.k_start)))
        b_step, g_step = (max(1, group // G), G) if group >= G else (1, group)
        for i in range(0, length, block):
            stop = min(i + block, length)
            first, last = live_keys(segment, i, stop)
            if first >= last:
                continue
            for b in range(rows.start, rows.stop, b_step):
                for g in range(0, G, g_step):
                    yield Tile(
                        b, min(b + b_step, rows.stop), g, min(g + g_step, G),
                        segment.q_start + i, segment.q_start + stop,
                        segment.k_start + first, segment.k_start + last,
                        i, first, segment,
                    )  # fmt: skip


def _hide(z: Tensor, tile: Tile) -> None:
    """Mask the corners of a tile outside the segment's band; every row sees the columns between them."""
    rows, columns = z.shape[-2:]
    low, high = tile.segment.low, tile.segment.high
    if high is not None:
        start = max(0, tile.row + high + 1 - tile.column)
        if start < columns:
            corner = z[..., start:]
            hidden = torch.ones(rows, columns - start, dtype=torch.bool, device=z.device)
            corner.masked_fill_(hidden.triu_(tile.row + high + 1 - tile.column - start), -torch.inf)
    if low is not None:
        stop = min(columns, tile.row + rows - 1 + low - tile.column)
        if stop > 0:
            hidden = torch.ones(rows, stop, dtype=torch.bool, device=z.device)
            z[..., :stop].masked_fill_(hidden.tril_(tile.row + low - tile.column - 1), -torch.inf)


def _pairs(x: Tensor, tile: Tile, R: int) -> Tensor:
    """A tile's part of a bias or mask that broadcasts to [B, H, T, S]; dimensions of size 1 stay 1."""
    bounds = ((tile.b0, tile.b1), (tile.g0 * R, tile.g1 * R), (tile.i0, tile.i1), (tile.j0, tile.j1))
    for dim, (start, stop) in zip(range(-x.dim(), 0), bounds[4 - x.dim() :], strict=True):
        if x.shape[dim] != 1:
            x = x.narrow(dim, start, stop - start)
    return x


def _add_reduced(total: Tensor, part: Tensor, tile: Tile, R: int) -> None:
    """Add a tile of dz to the gradient of a bias, summed over the bias's broadcast dimensions."""
    place = _pairs(total, tile, R)
    place.add_(part.sum_to_size(place.shape) if place.shape != part.shape else part)


def _place(x: Tensor, tile: Tile, R: int) -> Tensor:
    """The [rows, heads, i, ...] view of a [B, T, H, ...] tensor that a tile writes or reads."""
    return x[tile.b0 : tile.b1, tile.i0 : tile.i1, tile.g0 * R : tile.g1 * R].transpose(1, 2)


def _keys(x: Tensor, tile: Tile) -> Tensor:
    """The [rows * key heads, j, n] view of a [B, G, S, n] tensor; a tile has all key heads or one row."""
    part = x[tile.b0 : tile.b1, tile.g0 : tile.g1, tile.j0 : tile.j1]
    return part.view(part.shape[0] * part.shape[1], *part.shape[2:])


def _initial_lse(call: Call) -> Tensor:
    B, T, _, H, *_ = call.sizes
    lse = torch.full((B, T, H), -torch.inf, dtype=call.accumulator, device=call.q.device)
    return lse if call.sink is None else lse.copy_(call.sink)


def _kept(call: Call, tile: Tile, R: int) -> Tensor:
    """The dropout factor of a tile: 1 / (1 - p) where the probability is kept, else 0."""
    assert call.seed is not None
    bounds = ((tile.b0, tile.b1), (tile.g0 * R, tile.g1 * R), (tile.i0, tile.i1), (tile.j0, tile.j1))
    index = [
        torch.arange(*bound, device=call.q.device).view([-1 if dim == place else 1 for place in range(4)])
        for dim, bound in enumerate(bounds)
    ]
    return keep(call.seed, call.dropout, *index).to(call.accumulator).div_(1 - call.dropout)
