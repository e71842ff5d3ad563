"""Where the stretch of tokens that a program walks lies, its rows, and the stretches before it joined to a state."""

from __future__ import annotations

import triton
import triton.language as tl

from foci.tiles.state import chunk_at, sequence


@triton.jit
def stretch(offsets_ptr, index, T, N, STRETCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """(sequence, row of the batch, its start, its stop, the stretch's first token, its end, its slot).

    STRETCH tokens each, 0: sequence `index` as a whole. Packed, the last N programs have a document each, for those
    without a token, whose state must be handed on too; -1 as sequence has nothing to do.
    """
    UNIT: tl.constexpr = STRETCH if STRETCH > 0 else 1
    n, place, spare = index, 0, -1
    if STRETCH > 0:
        n, _, first, _, _ = chunk_at(offsets_ptr, index, N, T, STRETCH)
        if offsets_ptr is not None:
            spare = index - (T // STRETCH + N)
            n = tl.where(spare >= 0, spare, n)
    b, start, stop, slot = sequence(offsets_ptr, tl.maximum(n, 0), T, UNIT)
    if STRETCH > 0:
        place = tl.where(spare >= 0, 0, (first - start) // STRETCH)
    n = tl.where((spare >= 0) & (start < stop), -1, n)
    first = start + place * STRETCH
    end = tl.minimum(first + STRETCH, stop) if STRETCH > 0 else stop
    return n, b, start, stop, first, tl.where(n < 0, first, end), slot + place


@triton.jit
def row(ptr, t, end, stride, columns, inside):  # type: ignore[no-untyped-def]
    """Row t at places `columns`; 0 from `end` on and where not `inside`."""
    there = ptr + tl.cast(t, tl.int64) * stride
    return tl.load(there + columns, mask=inside & (t < end), other=0.0)


@triton.jit
def rows(ptr, t0, end, stride, columns, inside, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """COUNT rows from row t0: loads that do not wait for each other."""
    ptr += tl.cast(t0, tl.int64) * stride
    found = ()
    for i in tl.static_range(COUNT):
        there = ptr + tl.cast(stride, tl.int64) * i
        found = found + (tl.load(there + columns, mask=inside & (t0 + i < end), other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def join(  # type: ignore[no-untyped-def]
    state, decays_ptr, ends_ptr, slot, count, size, inside, STEP: tl.constexpr, BATCH: tl.constexpr = 8,
    decays_size=None, decays_inside=None,
):  # fmt: skip
    """What `count` stretches from `slot` on, in steps of STEP, make of a state: decay state + end, one by one.

    BATCH of them are loaded at once. Decays are as many as ends, or have a size and an inside of their own.
    """
    for s0 in range(0, count, BATCH):
        decays, ends = (), ()
        for i in tl.static_range(BATCH):
            place, there = tl.cast(slot + (s0 + i) * STEP, tl.int64), s0 + i < count
            of_decays = decays_ptr + place * (size if decays_size is None else decays_size)
            wanted = inside if decays_inside is None else decays_inside
            decays = decays + (tl.load(of_decays, mask=wanted & there, other=1.0),)  # type: ignore[assignment]  # noqa: RUF005
            ends = ends + (tl.load(ends_ptr + place * size, mask=inside & there, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(BATCH):
            state = decays[i] * state + ends[i]
    return state


@triton.jit
def arrive(flag_ptr):  # type: ignore[no-untyped-def]
    """Says to who does `await_stretches` that what this program has stored is there."""
    tl.debug_barrier()  # all of its threads have
    tl.atomic_xchg(flag_ptr, 1, sem="release")


@triton.jit
def await_stretches(flags_ptr, slot, count, size, STEP: tl.constexpr, BATCH: tl.constexpr = 128):  # type: ignore[no-untyped-def]
    """Until `count` stretches from `slot` on, in steps of STEP, have arrived; flags that are 0 before, `size` apart.

    Those must be programs of lower numbers in this launch, none of which is missing: a GPU has begun with them, so that
    they come to an end whoever waits. BATCH: a multiple of the threads, so that each has a flag of its own.
    """
    for s0 in range(0, count, BATCH):
        each = s0 + tl.arange(0, BATCH)
        flags, missing = flags_ptr + (slot + each * STEP).to(tl.int64) * size, True
        while missing:
            seen = tl.atomic_add(flags, 0, mask=each < count, sem="acquire")
            missing = tl.min(tl.where(each < count, seen, 1), 0) == 0
    tl.debug_barrier()


@triton.jit
def count_one(arrived_ptr):  # type: ignore[no-untyped-def]
    """`arrive` by one number that counts who has, for who does `await_count`."""
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr, 1, sem="release")


@triton.jit
def await_count(arrived_ptr, count):  # type: ignore[no-untyped-def]
    """`await_stretches`, of whom so many arrive at one number, 0 before."""
    while tl.atomic_add(arrived_ptr, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()


@triton.jit
def decay_rates(places, inside):  # type: ignore[no-untyped-def]
    """A in powers of 2, for exp2(dt A); half the lowest number for -inf, since 0 * -inf is NaN."""
    A = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    return tl.maximum(A, -1.7014117e38) * 1.4426950408889634


@triton.jit
def join_states(  # type: ignore[no-untyped-def]
    S, decays_ptr, ends_ptr, slot, count, h, H, k0, K, v0, V, STEP: tl.constexpr,
):  # fmt: skip
    """`join` of head h's block S of a state [K,V]: decays [slots,H,K] of its rows, ends [slots,H,K,V]."""
    k, v = (k0 + tl.arange(0, S.shape[0]))[:, None], (v0 + tl.arange(0, S.shape[1]))[None, :]
    decays, ends = decays_ptr + h * K + k, ends_ptr + h * K * V + k * V + v
    return join(S, decays, ends, slot, count, H * K * V, (k < K) & (v < V), STEP, 2, H * K, k < K)
