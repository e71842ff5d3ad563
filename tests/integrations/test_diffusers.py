"""foci.integrations.diffusers: the model's own outputs and gradients, one instance at a time, undone exactly."""

from __future__ import annotations

import copy
import gc
import io
import sys
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foci.core.errors import MissingExtra
from foci.integrations.diffusers import Handle, install
from tests.integrations.models import BUILDERS, Small, build

SITES = {"flux": 4, "sd3": 4, "pixart": 4, "sana": 2, "dit": 2, "unet": 8, "wan": 4, "hunyuan": 5, "auraflow": 2}
CALLS = {"wan": 2}  # written in the code of one site: of the text, and of an image if there is one


def results(small: Small) -> dict[str, Tensor]:
    """The output of a model and the gradient of every parameter and input."""
    small.model.zero_grad()
    for name in small.differentiable:
        small.inputs[name] = small.inputs[name].detach().requires_grad_()
    out = small.run()
    out.square().sum().backward()
    parameters = {name: p.grad.clone() for name, p in small.model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **parameters, **{name: small.inputs[name].grad for name in small.differentiable}}


def copied(small: Small, dtype: torch.dtype = torch.float64) -> Small:
    return small._replace(model=copy.deepcopy(small.model)).to(dtype)


def assert_equal(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Relative RMS error 1e-5; where a gradient cancels (that of a key bias is 0), its own rounding."""
    assert got.keys() == expected.keys() == exact.keys()
    for name, value in expected.items():
        error, rounding = (got[name] - value).norm(), (value - exact[name]).norm()
        budget = 1e-5 * value.norm() if name == "out" else torch.maximum(1e-5 * value.norm(), 10 * rounding)
        assert error <= budget, f"{name}: {error:.1e} of {budget:.1e}"


def sites(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "processor")}


def set_all(model: nn.Module, processor: Any) -> None:
    for site in sites(model).values():
        site.processor = processor


@pytest.mark.parametrize("backend", [None, "chunked"])
@pytest.mark.parametrize("name", BUILDERS)
def test_outputs_and_gradients_are_the_models_own(name: str, backend: str | None) -> None:
    small = build(name)
    before, exact = results(small), results(copied(small))
    plan = None if backend is None else dict.fromkeys(sites(small.model), backend)
    with install(small.model, plan) as handle:
        assert len(handle.sites) == SITES[name] and {site.calls for site in handle.sites} == {CALLS.get(name, 1)}
        assert all(site.backend == backend for site in handle.sites)
        assert_equal(results(small), before, exact)
    after = results(small)
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", BUILDERS)
def test_in_float64_every_gradient_is_exact(name: str) -> None:
    small = copied(build(name))
    before = results(small)
    with install(small.model, dict.fromkeys(sites(small.model), "chunked")):
        after = results(small)
    noise = 1e-13 * max(value.norm() for value in before.values())
    for key, value in before.items():
        assert (after[key] - value).norm() <= 1e-10 * value.norm() + noise, key


def test_it_is_foci_that_runs() -> None:
    small = build("flux")
    with install(small.model, {"transformer_blocks.0.attn": "chunked"}), torch.profiler.profile() as profile:
        small.run()
    assert sum("foci::softmax_chunked" in event.name for event in profile.events()) == 1


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_another_model_the_classes_and_the_modules_are_untouched(name: str) -> None:
    small, other = build(name), build(name)
    kinds = {type(site) for site in sites(small.model).values()} | {
        type(site.processor) for site in sites(small.model).values()
    }
    scopes = {sys.modules[kind.__module__] for kind in kinds} | {F, torch, torch.nn}
    before = [dict(vars(thing)) for thing in (*kinds, *scopes)]
    processors = {path: site.processor for path, site in sites(other.model).items()}
    expected = other.run()
    handle = install(small.model)
    assert [dict(vars(thing)) for thing in (*kinds, *scopes)] == before
    assert all(site.processor is processors[path] for path, site in sites(other.model).items())
    assert torch.equal(other.run(), expected)
    handle.restore()


def test_a_processor_shared_by_two_models_is_routed_in_one() -> None:
    from diffusers.models.attention_processor import AttnProcessor2_0

    shared, first, second = AttnProcessor2_0(), build("dit"), build("dit")
    set_all(first.model, shared)
    set_all(second.model, shared)
    with install(first.model):
        routed = {id(site.processor) for site in sites(first.model).values()}
        assert len(routed) == 1 and id(shared) not in routed
        assert all(site.processor is shared for site in sites(second.model).values())
    assert all(site.processor is shared for site in sites(first.model).values())


def test_mixed_plan_and_what_it_leaves() -> None:
    small = build("flux")
    before, exact = results(small), results(copied(small))
    plan = {
        "transformer_blocks.0.attn": "chunked",
        "transformer_blocks.1.attn": "reference",
        "single_transformer_blocks.0.attn": None,
    }
    handle = install(small.model, plan)
    assert [(site.name, site.backend) for site in handle.sites] == list(plan.items())[:2]
    assert handle.skipped == (
        ("single_transformer_blocks.0.attn", "the plan leaves it"),
        ("single_transformer_blocks.1.attn", "the plan leaves it"),
    )
    assert_equal(results(small), before, exact)


def test_linear_attention_is_left_and_listed() -> None:
    handle = install(build("sana").model)
    assert [name for name, _ in handle.skipped] == ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]
    assert "no call of scaled_dot_product_attention" in handle.skipped[0][1]


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"blocks.9.attn": "aten"}, r"plan names 'blocks.9.attn', which is no attention site .* and 1 more"),
        ({"transformer_blocks.0.attn": "cutlass"}, r"plan\['transformer_blocks.0.attn'\] is 'cutlass'; .* 'aten'"),
    ],
)
def test_a_plan_for_another_model_is_refused(plan: dict[str, str | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        install(build("flux").model, plan)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(TypeError, match="plan must map names of sites to backends"):
        install(build("dit").model, "chunked")  # type: ignore[arg-type]


def test_things_without_attention() -> None:
    with pytest.raises(ValueError, match=r"Linear has no attention site"):
        install(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model is a str; expected an nn.Module or a Diffusers pipeline"):
        install("a-model")


def test_without_diffusers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("dit").model
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'foci\[diffusers\]'"):
        install(model)


def test_installing_twice_is_refused() -> None:
    model = build("dit").model
    first = install(model, {"transformer_blocks.0.attn1": "aten"})
    with pytest.raises(ValueError, match=r"transformer_blocks.0.attn1 is already routed by foci; call restore\(\)"):
        install(model)
    second = install(model, {"transformer_blocks.1.attn1": "aten"})
    first.restore()
    second.restore()
    second.restore()
    assert not any(hasattr(site.processor, "_foci_routes") for site in sites(model).values())


def test_a_processor_set_since_is_not_undone() -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    model, mine = build("flux").model, FluxAttnProcessor()
    handle = install(model)
    model.set_attn_processor(mine)
    handle.restore()
    assert all(site.processor is mine for site in sites(model).values())


def test_a_backend_chosen_by_the_user_stays_theirs() -> None:
    small = build("flux")
    first, *_ = sites(small.model).values()
    first.set_attention_backend("_native_math")
    handle = install(small.model)
    assert handle.skipped == (("transformer_blocks.0.attn", "set_attention_backend chose '_native_math' for it"),)
    handle.restore()


def test_a_choice_made_after_installation_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    small, ran = build("flux"), []
    native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
    monkeypatch.setitem(
        _AttentionBackendRegistry._backends,
        AttentionBackendName.NATIVE,
        lambda **arguments: ran.append(1) or native(**arguments),
    )
    install(small.model)
    small.run()
    assert not ran
    small.model.transformer_blocks[1].attn.set_attention_backend("native")
    small.run()
    assert len(ran) == 1


def test_state_is_one_with_the_original() -> None:
    class Scaled:
        def __init__(self) -> None:
            self.scale, self.seen = 1.0, []

        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
            self.seen.append(hidden_states.shape)
            value = attn.to_v(hidden_states).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            out = F.scaled_dot_product_attention(value, value, value).transpose(1, 2).flatten(2)
            return self.scale * attn.to_out[0](out)

    small, mine = build("dit"), Scaled()
    set_all(small.model, mine)
    handle = install(small.model)
    one = small.run()
    mine.scale = 0.5
    assert not torch.allclose(one, small.run())
    handle.restore()
    assert len(mine.seen) == 4


def flux_forward(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
    """What FluxAttnProcessor does, as users write it."""
    from diffusers.models.embeddings import apply_rotary_emb

    def heads(x):
        return x.unflatten(-1, (attn.heads, -1))

    query, key = attn.norm_q(heads(attn.to_q(hidden_states))), attn.norm_k(heads(attn.to_k(hidden_states)))
    value = heads(attn.to_v(hidden_states))
    if encoder_hidden_states is not None:
        query = torch.cat([attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states))), query], 1)
        key = torch.cat([attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states))), key], 1)
        value = torch.cat([heads(attn.add_v_proj(encoder_hidden_states)), value], 1)
    query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1).transpose(1, 2)
    key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, key, value.transpose(1, 2)).transpose(1, 2).flatten(2)
    if encoder_hidden_states is None:
        return out
    text, image = out.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], 1)
    return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


CallOnly = type("CallOnly", (), {"__call__": flux_forward})
ModuleCallOnly = type("ModuleCallOnly", (nn.Module,), {"__call__": flux_forward})
ForwardOnly = type("ForwardOnly", (), {"forward": flux_forward})
ModuleForwardOnly = type("ModuleForwardOnly", (nn.Module,), {"forward": flux_forward})
Both = type("Both", (nn.Module,), {"__call__": flux_forward, "forward": flux_forward})


@pytest.mark.parametrize("kind", [CallOnly, ModuleCallOnly, ForwardOnly, ModuleForwardOnly, Both])
def test_custom_processors_of_every_shape(kind: type) -> None:
    small = build("flux")
    before, exact = results(small), results(copied(small))
    mine = kind()
    set_all(small.model, mine)
    plan = dict.fromkeys(sites(small.model), "chunked")
    handle = install(small.model, plan)
    assert len(handle.sites) == 4 and not handle.skipped
    assert_equal(results(small), before, exact)
    handle.restore()
    assert all(site.processor is mine for site in sites(small.model).values())


def test_forward_only_receives_what_diffusers_filters_by_name() -> None:
    from diffusers.models.attention_processor import Attention

    class Rotary(nn.Module):
        def forward(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
            q = hidden_states[:, None]
            return F.scaled_dot_product_attention(q, q, q)[:, 0] + image_rotary_emb

    attn, hooked = Attention(query_dim=8, heads=2, dim_head=4), []
    attn.set_processor(Rotary())
    attn.processor.register_forward_hook(lambda *args: hooked.append(1))
    x = torch.randn(1, 3, 8)
    handle = install(nn.Sequential(attn))
    out = attn(x, image_rotary_emb=torch.ones(8))
    torch.testing.assert_close(out - 1, F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0])
    assert hooked == [1]
    handle.restore()
    with pytest.raises(TypeError):
        attn(x, image_rotary_emb=torch.ones(8))


def test_forward_only_with_arithmetic_of_its_own_gets_its_call() -> None:
    class Mean:
        def forward(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
            return hidden_states.mean(1, keepdim=True).expand_as(hidden_states)

    small, mine = build("dit"), Mean()
    set_all(small.model, mine)
    handle = install(small.model)
    assert not handle.sites and len(handle.skipped) == 2
    small.run()
    handle.restore()
    assert all(site.processor is mine for site in sites(small.model).values())


def test_a_function_for_a_processor() -> None:
    def plain(attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        q = hidden_states[:, None]
        return attn.to_out[0](F.scaled_dot_product_attention(q, q, q)[:, 0])

    small = build("dit")
    set_all(small.model, plain)
    expected = small.run()
    handle = install(small.model)
    assert len(handle.sites) == 2
    torch.testing.assert_close(small.run(), expected)
    with pytest.raises(ValueError, match="already routed"):
        install(small.model)
    handle.restore()
    assert small.model.transformer_blocks[0].attn1.processor is plain


class Slotted:
    __slots__ = ("scale",)

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        q = hidden_states[:, None]
        return F.scaled_dot_product_attention(q, q, q)[:, 0]


COUNT = 0


class Flagged:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        q = hidden_states[:, None]
        return F.scaled_dot_product_attention(q, q, q)[:, 0] + COUNT


@pytest.mark.parametrize("kind, why", [(Slotted, "__slots__"), (Flagged, "reads the global COUNT = 0")])
def test_what_cannot_be_copied_is_left_and_listed(kind: type, why: str) -> None:
    small, mine = build("dit"), kind()
    set_all(small.model, mine)
    handle = install(small.model)
    assert not handle.sites and all(why in reason for _, reason in handle.skipped)
    assert all(site.processor is mine for site in sites(small.model).values())


@pytest.mark.parametrize("module", [False, True])
def test_copies_and_pickles_are_of_the_original(module: bool) -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor

    small = build("flux")
    if module:
        for block in small.model.transformer_blocks:
            block.attn.set_processor(FluxIPAdapterAttnProcessor(32, 16))
    expected = None if module else small.run()
    keys = list(small.model.state_dict())
    handle = install(small.model)
    assert list(small.model.state_dict()) == keys
    file = io.BytesIO()
    torch.save(small.model, file)
    file.seek(0)
    for twin in (copy.deepcopy(small.model), torch.load(file, weights_only=False)):
        assert {type(site.processor) for site in sites(twin).values()} <= {
            FluxAttnProcessor,
            FluxIPAdapterAttnProcessor,
        }
        assert list(twin.state_dict()) == keys
        if expected is not None:
            assert torch.equal(Small(twin, small.inputs, ()).run(), expected)
    handle.restore()
    assert list(small.model.state_dict()) == keys


def test_ip_adapter_calls_are_counted_and_equal() -> None:
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    small = build("flux")
    attn = small.model.transformer_blocks[0].attn
    attn.set_processor(FluxIPAdapterAttnProcessor(32, 16))
    hidden, text, image = torch.randn(2, 5, 32), torch.randn(2, 3, 32), [torch.randn(2, 4, 16)]
    expected = attn(hidden, text, ip_hidden_states=image)
    handle = install(small.model)
    assert handle.sites[0].calls == 2
    for got, one in zip(attn(hidden, text, ip_hidden_states=image), expected, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-5)


def test_pipelines_are_named_by_component() -> None:
    class Pipeline:
        def __init__(self, **components: Any) -> None:
            self.components = components

    small = build("dit")
    handle = install(Pipeline(transformer=small.model, text_encoder=nn.Linear(2, 2), scheduler=object()))
    assert handle.sites[0].name == "transformer.transformer_blocks.0.attn1"
    assert handle.skipped[0][0] == "text_encoder" and "no attention processor" in handle.skipped[0][1]


def test_attention_outside_processors_is_listed() -> None:
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock

    handle = install(nn.ModuleDict({"dit": build("dit").model, "vae": WanAttentionBlock(4)}))
    assert handle.skipped == (("vae", "WanAttentionBlock calls attention in its own forward, without a processor"),)


def test_a_new_processor_of_the_present_class_is_an_original() -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    model = build("flux").model
    install(model)
    assert type(type(model.transformer_blocks[0].attn.processor)()) is FluxAttnProcessor


def test_nothing_keeps_a_routed_model_alive() -> None:
    small = build("dit")
    handle = install(small.model)
    alive = weakref.ref(small.model)
    del small, handle
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("name", ["sd3", "pixart", "unet"])
def test_half_precision_and_autocast(name: str) -> None:
    small = build(name)
    for half, context in (
        (small, torch.autocast("cpu", torch.bfloat16)),
        (copied(small, torch.bfloat16), nullcontext()),
    ):
        with context, torch.no_grad():
            expected = half.run()
            with install(half.model):
                got = half.run()
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_a_padding_matrix_is_read_as_diffusers_reads_it() -> None:
    attn = build("flux").model.transformer_blocks[0].attn
    hidden, text = torch.randn(8, 5, 32), torch.randn(8, 3, 32)
    seen = torch.arange(8) < torch.arange(1, 9)[:, None]  # [B, S], and as large as [T, S]
    expected = attn(hidden, text, attention_mask=seen)
    install(attn)
    for got, one in zip(attn(hidden, text, attention_mask=seen), expected, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["flux", "dit"])
def test_compiles_in_one_graph(name: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    small, counter = build(name), CompileCounterWithBackend("aot_eager")
    if name == "dit":  # the keyword filter reads the signature that foci gives a processor with only `forward`
        set_all(small.model, type("OnlyForward", (nn.Module,), {"forward": _dit_forward})())
        with install(small.model):
            expected = small.run()
    else:
        expected = small.run()
    torch._dynamo.reset()
    handle: Handle = install(small.model)
    compiled = torch.compile(small.model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(**small.inputs, return_dict=False)[0], expected, rtol=1e-5, atol=1e-5)
        assert counter.frame_count == 1
        handle.restore()
        if name == "flux":
            torch.testing.assert_close(compiled(**small.inputs, return_dict=False)[0], expected, rtol=1e-5, atol=1e-5)
            assert counter.frame_count == 2


def test_repeated_blocks_share_their_graphs() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    small, counter = build("flux"), CompileCounterWithBackend("eager")
    expected = small.run()
    torch._dynamo.reset()
    install(small.model)
    small.model.compile_repeated_blocks(fullgraph=True, backend=counter)
    with torch.no_grad():
        torch.testing.assert_close(small.run(), expected, rtol=1e-5, atol=1e-5)
    assert (
        counter.frame_count == 3
    )  # as without foci: the second single block's input has other strides than the first's


def _dit_forward(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
    q = hidden_states[:, None]
    return attn.to_out[0](F.scaled_dot_product_attention(q, q, q)[:, 0])
