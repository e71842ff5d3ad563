"""foci.nn.linear: each layer against its paper's equation, written out over all pairs or token by token."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foci.core.errors import ShapeError
from foci.nn.cache import Cache
from foci.nn.linear import (
    HGRN2,
    GatedLinearAttention,
    GatedSlotAttention,
    LinearAttention,
    MultiScaleRetention,
    SimpleGatedLinearAttention,
)
from foci.nn.parts import FEATURE_MAPS, rotary

D, H, G, K, V, T = 24, 4, 2, 6, 5, 8
SIZES = {"num_key_heads": G, "head_dim": K, "value_dim": V}


def shaken(layer: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in layer.double().parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return layer


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, T, D).double()


def heads(projection: torch.nn.Linear, x: Tensor, count: int) -> Tensor:
    """[B, H, T, ...], every head with its own queries and keys."""
    y = (x @ projection.weight.T).unflatten(-1, (count, -1)).transpose(1, 2)
    return y.repeat_interleave(H // count, 1)


def merged(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """The recurrence of one matrix a head: q, k, log_decay [B,H,T,K], v [B,H,T,V]."""
    state, out = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        state = log_decay[:, :, t, :, None].exp() * state + k[:, :, t, :, None] * v[:, :, t, None]
        out.append((q[:, :, t, :, None] * state).sum(2))
    return torch.stack(out, 2)


def gated(layer, x: Tensor, out: Tensor) -> Tensor:
    """Norm of each head, gate, output projection."""
    normal = F.rms_norm(out, (V,), layer.o_norm.weight, layer.o_norm.eps) * F.silu(heads(layer.g_proj, x, H))
    return merged(normal) @ layer.o_proj.weight.T


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_linear_attention_is_an_average_by_feature_products(x: Tensor, name: str) -> None:
    normalise = name != "identity"
    layer = shaken(LinearAttention(D, H, **SIZES, feature_map=name, normalise=normalise))
    phi = FEATURE_MAPS[name]
    q, k = phi(heads(layer.q_proj, x, G)), phi(heads(layer.k_proj, x, G))
    weights = (q @ k.mT).tril()
    weights = weights / weights.sum(-1, keepdim=True) if normalise else weights * q.shape[-1] ** -0.5
    right = merged(weights.nan_to_num() @ heads(layer.v_proj, x, H)) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x), right, rtol=1e-6, atol=1e-8)


def test_a_normaliser_that_may_vanish_is_refused() -> None:
    with pytest.raises(ValueError, match="normalise is True with feature_map 'identity'"):
        LinearAttention(D, H, feature_map="identity")
    with pytest.raises(ValueError, match="feature_map is 'gelu'; expected one of 'elu'"):
        LinearAttention(D, H, feature_map="gelu")
    with pytest.raises(ValueError, match=r"LinearAttention: feature_map is \['elu'\]; expected one of 'elu'"):
        LinearAttention(D, H, feature_map=["elu"])


def test_layers_without_slots_or_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="GatedSlotAttention: num_slots is 0; expected an integer of at least 1"):
        GatedSlotAttention(D, H, num_slots=0)
    with pytest.raises(ValueError, match="GatedLinearAttention: gate_rank is 0; expected an integer of at least 1"):
        GatedLinearAttention(D, H, gate_rank=0)


def test_queries_without_features_give_nothing_and_no_nan(x: Tensor) -> None:
    layer = LinearAttention(D, H, feature_map="relu").double()
    torch.nn.init.zeros_(layer.q_proj.weight)
    out = layer(x)
    out.sum().backward()
    assert not out.any() and all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("autocast", [False, True])
def test_sums_beyond_float16_are_averaged_whole_in_pieces_and_in_steps(autocast: bool) -> None:
    """64 channels, every product near 8 each: float16 ends after some 1000 tokens of these."""
    layer, T = LinearAttention(64, 1, feature_map="relu", dtype=torch.float64), 3000
    with torch.no_grad():
        layer.q_proj.weight.copy_(torch.eye(64))
        layer.k_proj.weight.copy_(torch.eye(64))
    x = (3 + torch.randn(1, T, 64)).half()
    wide = x.double().requires_grad_()
    right = layer(wide)
    weight = torch.randn_like(right)
    right_grad = torch.autograd.grad(right, wide, weight)[0]
    layer, x = (layer.float(), x.float()) if autocast else (layer.half(), x)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        out = layer(x.requires_grad_())
        grad = torch.autograd.grad(out, x, weight.to(out.dtype))[0]
        with torch.no_grad():
            cache = Cache()
            cut = torch.cat([layer(piece, cache=cache) for piece in x.split([T - 3, 1, 2], 1)], 1)
    assert out.dtype == cut.dtype == torch.float16
    for got, true in ((out, right), (cut, right), (grad, right_grad)):
        assert (got[:, -1000:].double() - true[:, -1000:]).norm() < 0.01 * true[:, -1000:].norm()


def test_heads_of_a_rank_are_as_wide_as_all(x: Tensor) -> None:
    """Projections cut over ranks (tensor parallelism) give fewer heads, not narrower ones: parts sum to the whole."""
    layer, parts = shaken(LinearAttention(D, 4, head_dim=K)), []
    for rank in range(2):
        part = copy.deepcopy(layer)
        for name, cut in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            projection = part.get_submodule(name)
            projection.weight = torch.nn.Parameter(projection.weight.chunk(2, cut)[rank])
        parts.append(part(x))
    torch.testing.assert_close(parts[0] + parts[1], layer(x))
    cut = shaken(MultiScaleRetention(D, 4, head_dim=K))
    for projection in (cut.q_proj, cut.k_proj, cut.v_proj):
        projection.weight = torch.nn.Parameter(projection.weight.chunk(2)[0])
    with pytest.raises(ShapeError, match="log_decay has shape"):
        cut(x)


@pytest.mark.parametrize(
    ("make", "names", "said"),
    [
        (LinearAttention, ("v_proj",), "v_proj gives 2 of 4 heads where there are 2 of 2 key heads"),
        (LinearAttention, ("q_proj", "k_proj"), "v_proj gives 4 of 4 heads where there are 1 of 2 key heads"),
        (HGRN2, ("q_proj", "f_proj"), "i_proj gives 4 of 4 heads where there are 2 of 4 key heads"),
    ],
)
def test_heads_that_would_meet_others_key_heads_are_refused(x: Tensor, make: type, names: tuple, said: str) -> None:
    layer = make(D, 4, head_dim=K, **({"num_key_heads": 2} if make is LinearAttention else {}))
    for name in names:
        projection = layer.get_submodule(name)
        projection.weight = torch.nn.Parameter(projection.weight.chunk(2)[0])
    with pytest.raises(ShapeError, match=f"{make.__name__}: {said}"):
        layer(x.float())


def test_key_heads_that_every_rank_has_serve_the_heads_of_each(x: Tensor) -> None:
    layer = shaken(LinearAttention(D, 4, num_key_heads=1, head_dim=K))
    parts = [copy.deepcopy(layer) for _ in range(2)]
    for rank, part in enumerate(parts):
        for name, cut in (("v_proj", 0), ("o_proj", 1)):
            projection = part.get_submodule(name)
            projection.weight = torch.nn.Parameter(projection.weight.chunk(2, cut)[rank])
    torch.testing.assert_close(parts[0](x) + parts[1](x), layer(x))
    parts[0].k_proj.weight = torch.nn.Parameter(layer.k_proj.weight[:-1])
    with pytest.raises(ShapeError, match=f"k_proj gives {K - 1} channels; expected heads of {K} each"):
        parts[0](x)


def test_retention_decays_with_distance(x: Tensor) -> None:
    layer = shaken(MultiScaleRetention(D, H, **SIZES))
    place = torch.arange(T)
    q, k = (rotary(heads(p, x, G).transpose(1, 2), place).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    distance = (place[:, None] - place).double()
    decay = torch.stack([(1 - 2.0 ** (-5 - h)) ** distance for h in range(H)]).tril()
    out = (q @ k.mT * K**-0.5 * decay) @ heads(layer.v_proj, x, H)
    torch.testing.assert_close(layer(x), gated(layer, x, out))
    with pytest.raises(ValueError, match="MultiScaleRetention: head_dim is 5; expected an even number"):
        MultiScaleRetention(D, H, head_dim=5)


@pytest.mark.parametrize("kind", [SimpleGatedLinearAttention, GatedLinearAttention])
def test_gated_linear_attention(x: Tensor, kind: type) -> None:
    layer = shaken(kind(D, H, **SIZES))
    logits = x
    for projection in [layer.gk_proj] if isinstance(layer.gk_proj, torch.nn.Linear) else layer.gk_proj:
        logits = F.linear(logits, projection.weight, projection.bias)
    log_decay = (F.logsigmoid(logits) / 16).unflatten(-1, (H, -1)).transpose(1, 2).expand(2, H, T, K)
    q, k = heads(layer.q_proj, x, G) * K**-0.5, heads(layer.k_proj, x, G)
    torch.testing.assert_close(layer(x), gated(layer, x, attend(q, k, heads(layer.v_proj, x, H), log_decay)))


@pytest.mark.parametrize("lower_bound", [0.0, 0.4])
def test_hgrn2_writes_what_it_forgets(x: Tensor, lower_bound: float) -> None:
    layer = shaken(HGRN2(D, H, head_dim=K, value_dim=V, lower_bound=lower_bound))
    f = lower_bound + (1 - lower_bound) * torch.sigmoid(heads(layer.f_proj, x, H))
    out = attend(F.silu(heads(layer.q_proj, x, H)) * K**-0.5, 1 - f, heads(layer.i_proj, x, H), f.log())
    right = F.rms_norm(merged(out), (H * V,), layer.o_norm.weight, layer.o_norm.eps) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x), right)
    with pytest.raises(ValueError, match="HGRN2: lower_bound is 1"):
        HGRN2(D, H, lower_bound=1)
    with pytest.raises(TypeError, match="HGRN2: lower_bound must be a number, got 'x'"):
        HGRN2(D, H, lower_bound="x")


def test_hgrn2_saturated_gates_keep_their_gradient() -> None:
    layer = HGRN2(D, H)
    with torch.no_grad():
        layer.f_proj.weight.mul_(1e3)
    layer(torch.randn(1, T, D)).sum().backward()
    assert layer.f_proj.weight.grad.isfinite().all()


def test_gated_slot_attention_slot_by_slot(x: Tensor) -> None:
    M = 3
    layer = shaken(GatedSlotAttention(D, H, **SIZES, num_slots=M))
    q, k, v = (F.silu(heads(p, x, n)) for p, n in ((layer.q_proj, G), (layer.k_proj, G), (layer.v_proj, H)))
    keep = torch.sigmoid(heads(layer.f_proj, x, H)) ** (1 / 8)
    keys, values, out = torch.zeros(2, H, M, K).double(), torch.zeros(2, H, M, V).double(), []
    for t in range(T):
        a = keep[:, :, t, :, None]
        keys = a * keys + (1 - a) * k[:, :, t, None]
        values = a * values + (1 - a) * v[:, :, t, None]
        weights = (keys @ q[:, :, t, :, None])[..., 0].softmax(-1)
        out.append((weights[..., None] * values).sum(2))
    normal = F.rms_norm(F.silu(merged(torch.stack(out, 2))), (H * V,), layer.o_norm.weight, layer.o_norm.eps)
    torch.testing.assert_close(layer(x), normal @ layer.o_proj.weight.T)
