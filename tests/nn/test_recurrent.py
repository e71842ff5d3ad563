"""foci.nn.recurrent: what every recurrent layer promises of padding, documents, caches, compilation and bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foci import nn
from foci.core.errors import ShapeError, Unsupported
from foci.nn.recurrent import Recurrent, begin_gates, gate_parameters, selective_decay

D, H, T = 24, 4, 9
DOUBLE = torch.float64
MAKES = {
    "LinearAttention": {},
    "MultiScaleRetention": {"num_key_heads": 2},
    "SimpleGatedLinearAttention": {"num_key_heads": 2},
    "GatedLinearAttention": {"num_key_heads": 2, "value_dim": 5},
    "HGRN2": {"lower_bound": 0.3, "value_dim": 5},
    "GatedSlotAttention": {"num_key_heads": 2, "num_slots": 5},
    "Mamba2": {"num_key_heads": 2, "head_dim": 8, "value_dim": 6},
    "RWKV6TimeMix": {"mix_rank": 3, "decay_rank": 5},
    "DeltaNet": {"num_key_heads": 2, "value_dim": 5},
    "GatedDeltaNet": {"num_key_heads": 2, "negative_eigenvalues": True},
    "KimiDeltaAttention": {"num_key_heads": 2, "value_dim": 5},
}
MASK = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 1, 1], [1] * T]).bool()


@pytest.fixture(params=MAKES)
def layer(request) -> Recurrent:
    made = getattr(nn, request.param)(D, H, **MAKES[request.param], dtype=DOUBLE)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(2, T, D, dtype=DOUBLE)


def close(got: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("children_first", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_a_layer_made_on_meta_is_given_memory_and_begins_as_a_new_one(name: str, children_first: bool) -> None:
    """As torch's modules do, each resets its own parameters; in whichever order, none is left as memory was found."""
    make = getattr(nn, name)
    made = make(D, H, **MAKES[name], device=torch.device("meta")).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(float("nan"))
    own = [module for module in made.modules() if module._parameters]
    for module in reversed(own) if children_first else own:
        module.reset_parameters()
    new = {key: value.detach() for key, value in make(D, H, **MAKES[name]).named_parameters()}
    for key, value in made.named_parameters():
        drawn = new[key].numel() > 1 and new[key].std() > 0
        torch.testing.assert_close(value.mean(), new[key].mean(), rtol=0, atol=3.0 if drawn else 0.0)
        assert not drawn or 0.3 < value.std() / new[key].std() < 3, key


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_seed_gives_the_same_gates_in_every_dtype(dtype: torch.dtype) -> None:
    """And takes as many random numbers, so that what is drawn after them is the same too."""
    found = []
    for each in (torch.float32, dtype):
        torch.manual_seed(5)
        gates = gate_parameters(3, 6, None, each)
        begin_gates(*gates)
        found.append((*gates, torch.rand(2)))
    for got, wide in zip(*reversed(found), strict=True):
        assert got.equal(wide.to(got.dtype))


def test_gates_begin_as_mamba_s_and_decay_as_it_is_written() -> None:
    a_log, dt_bias = gate_parameters(4000, 4000, None, torch.float64)
    begin_gates(a_log, dt_bias)
    rate, dt = a_log.detach().exp(), torch.nn.functional.softplus(dt_bias.detach())
    assert 1 <= rate.min() < 1.1 and 15.9 < rate.max() <= 16.001
    assert 0.00099 < dt.min() < 0.0011 and 0.09 < dt.max() <= 0.1001 and 0.008 < dt.median() < 0.012  # log-uniform
    got = selective_decay(torch.tensor([0.0, 1.0]).log(), torch.tensor([[5.0, 0.0]]).bfloat16())
    assert got.dtype == torch.float32 and got[0, 0] == 0
    torch.testing.assert_close(got[0, 1], -torch.tensor(2.0).log())


def test_one_token_goes_through_the_backend_that_is_named(hidden: Tensor) -> None:
    """And is refused as it refuses: a step of another in its place would be a silent fall-back."""
    layer, cache = nn.DeltaNet(D, H, dtype=DOUBLE), nn.Cache()
    with torch.no_grad():
        layer(hidden, cache=cache)
        layer.backend = "triton"
        with pytest.raises(Unsupported, match="triton"):
            layer(hidden[:, :1], cache=cache)


def test_which_heads_may_be_a_rank_s() -> None:
    """A part of both alike, or of values some that all read one key head."""
    layer = nn.DeltaNet(D, 4, num_key_heads=2)

    def check(keys: int, values: int) -> None:
        layer._check_share(torch.ones(1, 1, keys, 3), torch.ones(1, 1, values, 3), "v_proj")

    for keys, values in ((2, 4), (1, 2), (1, 1)):
        check(keys, values)
    for keys, values in ((2, 1), (2, 2), (1, 4), (1, 3)):
        with pytest.raises(ShapeError, match=f"v_proj gives {values} of 4 heads where there are {keys} of 2 key heads"):
            check(keys, values)


def test_every_layer_of_the_room_is_tested_here() -> None:
    assert set(MAKES) == {n for n in nn.__all__ if isinstance(t := getattr(nn, n), type) and issubclass(t, Recurrent)}


@pytest.mark.parametrize("grad", [False, True])
def test_prefill_then_steps_is_the_whole(layer: Recurrent, hidden: Tensor, grad: bool) -> None:
    cache = nn.Cache()
    with torch.set_grad_enabled(grad):
        cuts = ((0, 4), (4, 7), (7, 8), (8, 9))
        out = torch.cat([layer(hidden[:, start:stop], cache=cache) for start, stop in cuts], 1)
        close(out, layer(hidden))
    assert cache.seen == T
    assert out.requires_grad == grad


def test_gradients_cross_the_cache(layer: Recurrent, hidden: Tensor) -> None:
    cache = nn.Cache()
    first, second = layer(hidden[:, :4], cache=cache), layer(hidden[:, 4:], cache=cache)
    parameters = list(layer.parameters())
    pieces = torch.autograd.grad(torch.cat([first, second], 1).square().sum(), parameters)
    for got, right in zip(pieces, torch.autograd.grad(layer(hidden).square().sum(), parameters), strict=True):
        close(got, right)


def test_padding_changes_nothing_whatever_it_holds(layer: Recurrent, hidden: Tensor) -> None:
    spoiled = hidden.clone()
    spoiled[~MASK] = torch.nan
    spoiled.requires_grad_()
    out = layer(spoiled, mask=MASK)
    close(out[0][MASK[0]], layer(hidden[:1, MASK[0]])[0])
    close(out[1], layer(hidden[1:])[0])
    assert not out[~MASK].any()
    out.square().sum().backward()
    assert not spoiled.grad[~MASK].any()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in layer.parameters())


def test_a_padded_prefill_goes_on_from_its_last_real_token(layer: Recurrent, hidden: Tensor) -> None:
    cache, new = nn.Cache(), torch.randn(2, 2, D, dtype=DOUBLE)
    with torch.no_grad():
        layer(hidden, mask=MASK, cache=cache)
        layer(new[:, :1], mask=torch.zeros(2, 1).bool(), cache=cache)  # a token that is none
        steps = torch.cat([layer(new[:, t : t + 1], cache=cache) for t in range(2)], 1)
        close(steps[:1], layer(torch.cat([hidden[:1, MASK[0]], new[:1]], 1))[:, -2:])
        close(steps[1:], layer(torch.cat([hidden[1:], new[1:]], 1))[:, -2:])


def test_a_row_of_nothing_but_padding_gives_nothing(layer: Recurrent, hidden: Tensor) -> None:
    mask = MASK.clone()
    mask[0] = False
    out = layer(hidden, mask=mask)
    assert not out[0].any()
    close(out[1], layer(hidden[1:])[0])
    out.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_packed_documents_are_themselves_alone_and_go_on(layer: Recurrent, hidden: Tensor) -> None:
    first, second = hidden[:1, :3], hidden[1:]
    cache = nn.Cache()
    with torch.no_grad():
        packed = layer(torch.cat([first, second], 1), offsets=torch.tensor([0, 0, 3, 3 + T]), cache=cache)
        close(packed, torch.cat([layer(first), layer(second)], 1))
        new = torch.randn(3, 1, D, dtype=DOUBLE)
        close(
            layer(torch.cat([*new, new[2]])[None, :, :], offsets=torch.tensor([0, 1, 2, 4]), cache=cache)[0, :2],
            torch.cat([layer(new[:1])[0], layer(torch.cat([first, new[1:2]], 1))[0, -1:]]),
        )
        last = torch.randn(3, 1, D, dtype=DOUBLE)
        close(layer(last, cache=cache)[0], layer(torch.cat([new[:1], last[:1]], 1))[0, -1:])


def test_no_token_sees_a_later_one(layer: Recurrent, hidden: Tensor) -> None:
    other = hidden.clone()
    other[:, 5:] = 1e3
    assert torch.equal(layer(other)[:, :5], layer(hidden)[:, :5])


def test_every_parameter_gets_a_gradient(layer: Recurrent, hidden: Tensor) -> None:
    layer(hidden).square().sum().backward()
    assert [
        name for name, parameter in layer.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ] == []


def test_no_tokens(layer: Recurrent, hidden: Tensor) -> None:
    assert layer(hidden[:, :0]).shape == (2, 0, D)


def test_each_name_of_the_state_is_in_the_docstring(layer: Recurrent) -> None:
    text = type(layer).__doc__ or ""
    for name in layer.state_dict():
        first, _, rest = name.partition("_")
        grouped = any(f"{{{before}" in text or f",{before}" in text for before in (first,)) and f"}}_{rest}" in text
        assert name in text or grouped, name


def test_a_step_changes_states_in_place(layer: Recurrent, hidden: Tensor) -> None:
    cache = nn.Cache()
    with torch.no_grad():
        layer(hidden, cache=cache)
        held = cache.layer(0)
        before = {name: held[name].data_ptr() for name in held if name not in ("x", "positions")}
        layer(hidden[:, :1], cache=cache)
    assert before and {name: held[name].data_ptr() for name in before} == before


def test_compiles_whole_padded_and_cached(layer: Recurrent, hidden: Tensor) -> None:
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    close(compiled(hidden, mask=MASK), layer(hidden, mask=MASK))
    compiled(hidden, mask=MASK).sum().backward()
    ours, theirs = nn.Cache(), nn.Cache()
    with torch.no_grad():
        for piece in (hidden[:, :5], hidden[:, 5:6], hidden[:, 6:7]):
            close(compiled(piece, cache=theirs), layer(piece, cache=ours))
    torch.compiler.reset()


def test_compiles_packed_documents(hidden: Tensor) -> None:
    torch.compiler.reset()
    layer, offsets = nn.GatedDeltaNet(D, H, dtype=DOUBLE), torch.tensor([0, 3, 3, T])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ours, theirs = nn.Cache(), nn.Cache()
    close(compiled(hidden[:1], offsets=offsets, cache=theirs), layer(hidden[:1], offsets=offsets, cache=ours))
    close(theirs.layer(0)["state"], ours.layer(0)["state"])
    torch.compiler.reset()


def test_half_precision_keeps_its_dtype_and_its_states_float32(layer: Recurrent, hidden: Tensor) -> None:
    right, cache = layer(hidden), nn.Cache()
    out = layer.bfloat16()(hidden.bfloat16(), cache=cache)
    assert out.dtype == torch.bfloat16
    assert {t.dtype for n, t in cache.layer(0).items() if n in ("state", "keys", "values")} == {torch.float32}
    assert (out.double() - right).norm() < 0.1 * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_prefill_and_steps_run(layer: Recurrent, hidden: Tensor, dtype: torch.dtype) -> None:
    layer, hidden, cache = layer.float(), hidden.float(), nn.Cache()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        out = torch.cat([layer(piece, cache=cache) for piece in hidden.split([7, 1, 1], 1)], 1)
    assert out.dtype == dtype
    right = layer(hidden)
    assert (out.float() - right).norm() < 0.1 * right.norm()


def test_a_step_leaves_what_a_backward_needs(layer: Recurrent, hidden: Tensor) -> None:
    cache = nn.Cache()
    prompt = layer(hidden[:, :7], cache=cache)
    with torch.no_grad():
        steps = [layer(hidden[:, t : t + 1], cache=cache) for t in range(7, T)]
        close(torch.cat(steps, 1), layer(hidden)[:, 7:])
    prompt.sum().backward()


def test_a_cache_serves_several_layers(hidden: Tensor) -> None:
    layers = [nn.GatedDeltaNet(D, H, layer_index=i, dtype=DOUBLE) for i in range(2)]
    cache, out = nn.Cache(), []
    for piece in (hidden[:, :5], hidden[:, 5:]):
        out.append(layers[1](layers[0](piece, cache=cache), cache=cache))
    close(torch.cat(out, 1), layers[1](layers[0](hidden)))
    assert cache.seen == T


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        (
            {"mask": MASK.double()},
            ShapeError,
            r"DeltaNet: mask is torch.float64 \[2, 9\]; expected torch.bool \[2, 9\]",
        ),
        ({"mask": MASK[:, 1:]}, ShapeError, r"mask is torch.bool \[2, 8\]"),
        ({"offsets": torch.tensor([0, 9])}, ShapeError, r"offsets \[2\] with hidden \[2, 9, 24\]"),
        ({"offsets": [0, 9]}, TypeError, r"DeltaNet: offsets is \[0, 9\]; expected a tensor"),
        ({"cache": {}}, TypeError, "DeltaNet: cache is {}; expected a foci.nn.Cache"),
        ({"offsets": torch.tensor([0, 9]), "mask": MASK}, ValueError, "mask and offsets are both given"),
    ],
)
def test_bad_input_is_named(hidden: Tensor, given: dict, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        nn.DeltaNet(D, H, dtype=DOUBLE)(hidden, **given)


def test_bad_sizes_are_named(hidden: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"DeltaNet: hidden has shape \[2, 9, 23\]; expected \[B, T, 24\]"):
        nn.DeltaNet(D, H)(hidden[..., 1:])
    with pytest.raises(ValueError, match="num_heads is 4, num_key_heads 3; expected a multiple"):
        nn.DeltaNet(D, H, num_key_heads=3)
    with pytest.raises(ValueError, match="DeltaNet: value_dim is -1; expected an integer of at least 1"):
        nn.DeltaNet(D, H, value_dim=-1)
    with pytest.raises(ValueError, match="hidden_size is 26, no multiple of num_heads=4; expected one"):
        nn.DeltaNet(26, H)
    with pytest.raises(ValueError, match="GatedDeltaNet: num_heads is 0; expected an integer of at least 1"):
        nn.GatedDeltaNet(D, 0)
    with pytest.raises(ValueError, match="DeltaNet: conv_size is 0; expected an integer of at least 1"):
        nn.DeltaNet(D, H, conv_size=0)
    cache, layer = nn.Cache(), nn.DeltaNet(D, H, dtype=DOUBLE)
    layer(hidden, cache=cache)
    with pytest.raises(ShapeError, match="DeltaNet: cache holds q_conv1d of 2 rows; expected 3"):
        layer(hidden[[0, 1, 1]], cache=cache)
    for layer in (nn.DeltaNet, nn.LinearAttention):
        with pytest.raises(ValueError, match=rf"{layer.__name__}: backend is 'fast'; expected None or one of 'native'"):
            layer(D, H, backend="fast")
