"""The attention layer: against the equation, with a cache, padding, windows and packed documents."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core.errors import ShapeError, Unsupported
from foci.nn.attention import Attention
from foci.nn.cache import BLOCK, Cache
from foci.nn.parts import rotary

SIZE = 24
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "head_dim": 8},
    "all": {"num_kv_heads": 2, "qk_norm": True, "softcap": 3.0, "window": 4, "sink": True},
    "no positions": {"rope_base": None, "num_kv_heads": 1},
}


def _layer(kind: str) -> Attention:
    torch.manual_seed(0)
    layer = Attention(SIZE, 4, **KINDS[kind], layer_index=0, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


class _Adapted(torch.nn.Module):
    """A projection with a low-rank one beside it, as LoRA has it: a module that only has a forward."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, (out, size) = base, base.weight.shape
        self.down, self.up = (torch.nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in ((2, size), (out, 2)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return y


def _x(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _literal(layer: Attention, x: Tensor) -> Tensor:
    """The equation, one query at a time."""
    q, k, v = (p(x).unflatten(2, (-1, layer.head_dim)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    if layer.rope_base is not None:
        q, k = (rotary(part, torch.arange(x.shape[1])) for part in (q, k))
    k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], 2) for part in (k, v))
    rows = []
    for t in range(x.shape[1]):
        first = 0 if layer.window is None else max(t - layer.window + 1, 0)
        z = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, first : t + 1]) * layer.head_dim**-0.5
        if layer.softcap is not None:
            z = layer.softcap * torch.tanh(z / layer.softcap)
        weight = z.exp()
        below = weight.sum(-1, keepdim=True)
        if layer.sinks is not None:
            below = below + layer.sinks.exp()[:, None]
        rows.append(torch.einsum("bhs,bshv->bhv", weight / below, v[:, first : t + 1]).flatten(1))
    return layer.o_proj(torch.stack(rows, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_layer_is_its_equation_with_every_gradient(kind):
    layer, x = _layer(kind), _x(2, 11).requires_grad_()
    inputs = [x, *layer.parameters()]
    ours, truth = layer(x), _literal(layer, x)
    torch.testing.assert_close(ours, truth)
    weight = torch.randn_like(truth)
    for one, other in zip(
        torch.autograd.grad(ours, inputs, weight), torch.autograd.grad(truth, inputs, weight), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[5, 1, 1, 4], [1] * 11, [0, 11], [3, 3, 5]])
def test_pieces_through_a_cache_equal_the_whole(kind, cuts):
    layer, x = _layer(kind), _x(2, 11)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            cache = Cache()
            pieces = [layer(piece, cache=cache) for piece in x.split(cuts, 1)]
            torch.testing.assert_close(torch.cat(pieces, 1), layer(x))
    assert cache.seen == 11
    if layer.window is not None:
        assert cache.layer(0)["k"].shape[1] == layer.window - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[5, 1, 5], [1] * 11, [8, 3]])
def test_one_parameter_trains_through_a_cache_where_the_others_are_frozen(kind, cuts):
    x = _x(2, 11)
    for trained, _ in _layer(kind).named_parameters():
        layer = _layer(kind)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name == trained)
        cache, whole = Cache(), layer(x)
        out = torch.cat([layer(piece, cache=cache) for piece in x.split(cuts, 1)], 1)
        with torch.no_grad():
            layer(x[:, :1], cache=cache)  # changes nothing that the backward needs
        ours, truth = (torch.autograd.grad(y.square().sum(), layer.get_parameter(trained))[0] for y in (out, whole))
        torch.testing.assert_close(ours, truth)


def test_where_nothing_is_trained_grad_mode_copies_nothing():
    layer, cache, places = _layer("all").requires_grad_(False), Cache(), set()
    for t in range(12):
        layer(_x(2, 12)[:, t : t + 1], cache=cache)
        places.add(cache.layer(0)["k"].untyped_storage().data_ptr())
    assert len(places) == 1


MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1], [1] * 7],
    "right": [[1, 1, 1, 1, 0, 0, 0], [1] * 7],
    "between": [[1, 0, 1, 1, 0, 0, 1], [0, 1, 0, 1, 0, 1, 0]],
    "empty row": [[0] * 7, [1] * 7],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MASKS)
def test_padding_changes_no_real_token_and_gives_zero(kind, name):
    layer, mask, x = _layer(kind), torch.tensor(MASKS[name]).bool(), _x(2, 7)
    x = x.masked_fill(~mask[..., None], float("nan"))
    out = layer(x, mask=mask)
    assert (out[~mask] == 0).all()
    for row in range(2):
        torch.testing.assert_close(out[row, mask[row]], layer(x[row : row + 1, mask[row]])[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MASKS)
def test_padded_rows_go_on_through_a_cache(kind, name):
    """Prefill in two padded pieces, then two tokens without a mask: as each row alone and whole."""
    layer, mask, x = _layer(kind), torch.tensor(MASKS[name]).bool(), _x(2, 16)
    mask = torch.cat([mask, mask.flip(0), torch.ones(2, 2, dtype=torch.bool)], 1)
    with torch.no_grad():
        cache = Cache()
        out = torch.cat([
            layer(x[:, :7], mask=mask[:, :7], cache=cache), layer(x[:, 7:14], mask=mask[:, 7:14], cache=cache),
            layer(x[:, 14:15], cache=cache), layer(x[:, 15:], mask=mask[:, 15:], cache=cache),
        ], 1)  # fmt: skip
        for row in range(2):
            torch.testing.assert_close(out[row, mask[row]], layer(x[row : row + 1, mask[row]])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_separate(kind):
    layer, x = _layer(kind), _x(1, 12)
    out = layer(x, offsets=torch.tensor([0, 5, 5, 6, 12]))
    for first, end in ((0, 5), (5, 6), (6, 12)):
        torch.testing.assert_close(out[:, first:end], layer(x[:, first:end]))


def test_compiles_whole_and_equals_eager():
    layer, x = _layer("all").float(), _x(2, 9).float()
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x), layer(x))
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9]).bool()
    torch.testing.assert_close(whole(x, mask=mask), layer(x, mask=mask))


@pytest.mark.parametrize("window", [None, 3])
def test_compiled_it_decodes_past_its_first_buffers(window):
    torch.compiler.reset()
    layer = Attention(SIZE, 4, window=window, dtype=torch.float64)
    compiled, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), _x(2, 2 * BLOCK)
    whole = layer(x)
    torch.testing.assert_close(compiled(x), whole)
    with torch.no_grad():
        for prompt in (4, 9):
            cache, out = Cache(), []
            for piece in x.split([prompt, *[1] * (x.shape[1] - prompt)], 1):
                out.append(compiled(piece, cache=cache))
            torch.testing.assert_close(torch.cat(out, 1), whole)
    torch.compiler.reset()


def test_compiled_it_decodes_after_a_padded_prompt():
    torch.compiler.reset()
    layer, x = _layer("all"), _x(2, 16)
    compiled, ours, theirs = torch.compile(layer, fullgraph=True, backend="aot_eager"), Cache(), Cache()
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9]).bool()
    with torch.no_grad():
        for piece, real in ((x[:, :9], mask), *((x[:, t : t + 1], None) for t in range(9, 16))):
            torch.testing.assert_close(compiled(piece, mask=real, cache=theirs), layer(piece, mask=real, cache=ours))
    torch.compiler.reset()


def test_what_does_not_fit_is_refused_with_its_name():
    layer, x = _layer("plain"), _x(2, 5)
    with pytest.raises(ShapeError, match=r"hidden has shape \[2, 5, 23\]"):
        layer(x[..., :-1])
    with pytest.raises(ShapeError, match=r"mask is torch\.int64"):
        layer(x, mask=torch.ones(2, 5).long())
    with pytest.raises(Unsupported, match="mask is given too"):
        layer(x[:1], offsets=torch.tensor([0, 5]), mask=torch.ones(1, 5).bool())
    with pytest.raises(TypeError, match=r"offsets is \[0, 5\]; expected a tensor"):
        layer(x[:1], offsets=[0, 5])
    with pytest.raises(TypeError, match=r"cache is {}; expected a foci\.nn\.Cache"):
        layer(x, cache={})
    with pytest.raises(ShapeError, match=r"offsets \[2\] with hidden \[2, 5, 24\]; expected \[N \+ 1\], batch 1"):
        layer(x, offsets=torch.tensor([0, 5]))


@pytest.mark.parametrize(
    ("size", "heads", "options", "told"),
    [
        (SIZE, 4, {"num_kv_heads": 3}, "num_heads is 4, num_kv_heads 3; expected a multiple of the second"),
        (SIZE, 4, {"num_kv_heads": 0}, "num_kv_heads is 0; expected an integer of at least 1"),
        (SIZE, 5, {}, "hidden_size is 24, no multiple of num_heads=5"),
        (SIZE, 4, {"head_dim": 0}, "head_dim is 0; expected an integer of at least 1"),
        (15, 5, {}, "head_dim is 3; expected an even number, for rotary, or rope_base=None"),
        (SIZE, 4, {"backend": "native"}, "backend is 'native'; expected None or one of 'aten', 'flash', 'triton'"),
        (SIZE, 4, {"window": 0}, "window is 0; expected an integer of at least 1"),
        (SIZE, 4, {"window": 2.5}, r"window is 2\.5; expected an integer of at least 1"),
        (SIZE, 4, {"softcap": -1.0}, r"softcap must be a positive finite number, got -1\.0"),
        *(
            (SIZE, 4, {"rope_base": base}, f"rope_base must be a positive finite number, got {base}")
            for base in (float("nan"), float("inf"), 0.0, -1.0)
        ),
    ],
)
def test_the_constructor_refuses_what_no_call_could_serve(size, heads, options, told):
    with pytest.raises(ValueError, match=f"Attention: {told}"):
        Attention(size, heads, **options)


def test_an_odd_head_without_positions_is_served():
    assert Attention(15, 5, rope_base=None)(torch.randn(1, 4, 15)).shape == (1, 4, 15)


@pytest.mark.parametrize("mask", [None, torch.ones(2, 3).bool()])
def test_keys_of_a_layer_with_other_heads_are_refused_with_both_shapes(mask):
    cache, x = Cache(), _x(2, 6)
    layer = _layer("plain")
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        with pytest.raises(ShapeError, match=r"cache holds k of heads by head_dim \[4, 6\]; expected \[2, 8\]"):
            _layer("grouped")(x[:, 3:], mask=mask, cache=cache)
        torch.testing.assert_close(layer(x[:, 3:], cache=cache), layer(x)[:, 3:])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("tokens", [1, 2 * BLOCK])
@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_keys_of_another_dtype_are_refused_whether_the_buffer_must_grow_or_not(grad, tokens, before, after):
    layer, cache = _layer("plain").to(before), Cache()
    with torch.set_grad_enabled(grad):
        layer(_x(2, 3).to(before), cache=cache)
        with pytest.raises(ValueError, match=rf"Attention: cache holds k in {before}; expected {after}"):
            layer.to(after)(_x(2, tokens).to(after), cache=cache)
        assert cache.layer(0)["k"].dtype == before and cache.seen == 3


@pytest.mark.parametrize("tokens", [1, 2 * BLOCK])
def test_autocast_goes_on_from_a_cache_in_float32_and_rounds_nothing_in_it(tokens):
    layer, cache, x = _layer("plain").float(), Cache(), _x(2, 3 + tokens).float()
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        prompt = cache.layer(0)["k"].clone()
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x[:, 3:], cache=cache)
        assert torch.equal(cache.layer(0)["k"][:, :3], prompt)
        torch.testing.assert_close(out.float(), layer(x)[:, 3:], rtol=0.1, atol=0.1)


def test_a_trace_is_of_any_batch_and_length() -> None:
    layer = Attention(16, 4)
    traced = torch.jit.trace(layer, torch.randn(2, 5, 16), check_trace=False)
    x = torch.randn(3, 9, 16)
    torch.testing.assert_close(traced(x), layer(x))


def test_a_projection_may_be_any_module() -> None:
    layer, x = _layer("grouped"), _x(2, 7)
    before = layer(x)
    adapted = layer.q_proj = _Adapted(layer.q_proj)  # type: ignore[assignment]
    assert not torch.allclose(layer(x), before)
    layer(x).square().sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in (adapted.down, adapted.up))


def _keep(layer: Attention, **heads: list[int]) -> Attention:
    """A copy with these heads of its projections, and of o_proj's columns those of q_proj."""
    part = copy.deepcopy(layer)
    for name, kept in heads.items():
        projection = part.get_submodule(name)
        rows = projection.weight.unflatten(0, (-1, layer.head_dim))[kept]
        projection.weight = torch.nn.Parameter(rows.flatten(0, 1))
    if "q_proj" in heads:
        columns = layer.o_proj.weight.unflatten(1, (-1, layer.head_dim))[:, heads["q_proj"]]
        part.o_proj.weight = torch.nn.Parameter(columns.flatten(1))
    return part


@pytest.mark.parametrize("kind", ["plain", "grouped", "no positions"])
def test_projections_cut_over_ranks_sum_to_the_layer(kind):
    """Queries and keys alike, unequally too, or queries alone where all read one key head."""
    layer, x = _layer(kind), _x(2, 7)
    each = 4 // layer.num_kv_heads
    parts = []
    for groups in ([0], list(range(1, layer.num_kv_heads))) if each < 4 else ():
        own = [group * each + head for group in groups for head in range(each)]
        parts.append(_keep(layer, q_proj=own, k_proj=groups, v_proj=groups)(x))
    parts = parts or [_keep(layer, q_proj=own)(x) for own in ([0], [1, 2, 3])]
    torch.testing.assert_close(parts[0] + parts[1], layer(x))


def test_query_heads_that_would_meet_others_key_heads_are_refused():
    """Half of q_proj's columns were taken for half of every group: wrong numbers without a word."""
    layer, x = _layer("grouped"), _x(2, 7)
    for kept, said in (({"q_proj": [0, 1]}, "2 of 4 heads where there are 2"), ({"k_proj": [0]}, "4 of 4 .* are 1")):
        with pytest.raises(ShapeError, match=f"Attention: q_proj gives {said} of 2 key heads; expected the same part"):
            _keep(layer, **kept)(x)
    pruned = _keep(layer, q_proj=[1, 2])
    pruned.num_heads = 2
    torch.testing.assert_close(pruned(x), _literal(pruned, x))
    layer.q_proj.weight = torch.nn.Parameter(layer.q_proj.weight[:-1])
    with pytest.raises(ShapeError, match="Attention: q_proj gives 31 channels; expected heads of 8 each"):
        layer(x)


def test_a_layer_made_on_meta_begins_as_a_new_one() -> None:
    made = Attention(SIZE, 4, qk_norm=True, sink=True, device=torch.device("meta")).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(float("nan"))
    for module in made.modules():
        module.reset_parameters()
    assert not made.sinks.any() and (made.q_norm.weight == 1).all() and (made.k_norm.weight == 1).all()
    assert made(torch.randn(1, 5, SIZE)).isfinite().all()
