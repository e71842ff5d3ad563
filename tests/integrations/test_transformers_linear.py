"""foci in the linear layers of transformers models: equal to their own code, here only, gone without a trace."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from foci.core.errors import Unsupported
from foci.integrations import transformers_recurrences
from foci.integrations.reroute import CannotReroute
from foci.integrations.transformers import find_sites, install
from foci.integrations.transformers_linear import find
from tests.integrations.linear_models import MODELS
from tests.integrations.transformers_models import padding, relative, tokens

BUDGET = 1e-5
MIXING = {"mamba2", "mamba", "falcon_mamba", "jamba", "zamba", "rwkv", "recurrent_gemma", "xlstm"}
CACHELESS = {"rwkv", "xlstm", "recurrent_gemma", "minimax"}  # their states are not in a transformers cache
PADDED = {"none", "right", "left"}


def logits_and_gradients(model: nn.Module, real: Tensor | None, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of the real tokens only."""
    model.zero_grad()
    out = model(tokens() if ids is None else ids, attention_mask=real, use_cache=False)[0]
    kept = out if real is None else out[real.bool()]
    kept.square().mean().backward()
    return kept.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def cache_name(name: str) -> str:
    """A cache under another name is not read: the model makes its own."""
    return "cache_params" if "mamba" in name else "past_key_values"


def linear_sites(model: nn.Module) -> list[str]:
    return [name for name, recurrence in find_sites(model)[0].items() if recurrence is not None]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_their_own(name: str) -> None:
    model = MODELS[name]()
    for side in PADDED:
        expected = logits_and_gradients(model, padding(side))
        with install(model) as handle:
            assert set(handle.sites) >= set(linear_sites(model)) != set()
            assert not handle.skipped
            got = logits_and_gradients(model, padding(side))
        error = max(relative(g, e) for g, e in zip(got, expected, strict=True))
        assert error < BUDGET or error < 2 * rounding(model, padding(side)), (side, error)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in CACHELESS | {"glm5_next"}])
def test_convolutions_and_gated_norms_on_a_gpu_equal_their_own(name: str) -> None:
    """Logits and gradients, then tokens one by one with a cache."""
    model = MODELS[name]()
    expected = logits_and_gradients(model, padding("left"))
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    text = model.generate(tokens(), attention_mask=padding("left"), **options)
    with install(model):
        got = logits_and_gradients(model, padding("left"))
        found = model.generate(tokens(), attention_mask=padding("left"), **options)
    error = max(relative(g, e) for g, e in zip(got, expected, strict=True))
    assert error < BUDGET or error < 2 * rounding(model, padding("left"))
    assert torch.equal(found.sequences, text.sequences)
    assert max(relative(g, e) for g, e in zip(found.logits, text.logits, strict=True)) < BUDGET


def rounding(model: nn.Module, real: Tensor | None) -> float:
    """By how much its own gradient and logits change at most when its weights are rounded anew to float32.

    Some models' gradients in float32 mean no more digits than that (zamba's, 8e-6), whoever computes them.
    """
    expected, found = logits_and_gradients(model, real), []
    for seed in range(4):
        other, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in other.parameters():
                weight.mul_(1 + 2.0**-24 * torch.randn(weight.shape, generator=draw))
        found += [relative(x, y) for x, y in zip(logits_and_gradients(other, real), expected, strict=True)]
    return max(found)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "glm5_next"])
def test_generation_equals_their_own_token_for_token(name: str) -> None:
    model, real = MODELS[name](), None if name in CACHELESS - {"minimax"} else padding("left")
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(tokens(), attention_mask=real, **options)
    with install(model):
        got = model.generate(tokens(), attention_mask=real, **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert max(relative(g, e) for g, e in zip(got.logits, expected.logits, strict=True)) < BUDGET


@pytest.mark.parametrize("name", [name for name in MODELS if name not in CACHELESS])
@torch.no_grad()
def test_several_tokens_after_a_cache_equal_their_own(name: str) -> None:
    model, ids = MODELS[name](), tokens()

    def run() -> Tensor:
        past = transformers.DynamicCache(config=model.config)
        return torch.cat([model(part, **{cache_name(name): past})[0] for part in ids.split([5, 4, 1, 2], dim=1)], 1)

    expected = run()
    with install(model):
        assert relative(run(), expected) < BUDGET


@pytest.mark.parametrize("name", [name for name in MODELS if name not in MIXING])
@torch.no_grad()
def test_packed_documents_stay_apart(name: str) -> None:
    """Without foci the same models refuse documents or let them see each other, so each alone is the truth."""
    model, ids, lengths = MODELS[name](), tokens(rows=1), [5, 1, 6]
    expected = torch.cat([model(part, use_cache=False)[0] for part in ids.split(lengths, dim=1)], 1)
    offsets = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    ends = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 6, "max_length_k": 6}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    with install(model):
        for given in (ends, ends | {"seq_idx": numbers}, {"seq_idx": numbers}):
            got = model(ids, position_ids=positions, use_cache=False, **given)[0]
            assert relative(got, expected) < BUDGET


@pytest.mark.parametrize("name", sorted(MIXING))
def test_documents_that_do_not_reach_the_layers_are_refused(name: str) -> None:
    model = MODELS[name]()
    offsets = torch.tensor([0, 5, 12])
    with install(model):
        for given in ({"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}, {"seq_idx": torch.zeros(1, 12)}):
            with pytest.raises(Unsupported, match="cannot keep packed documents apart"):
                model(tokens(rows=1), **given)
    model(tokens(rows=1))  # and nothing is refused afterwards


@torch.no_grad()
def test_several_rows_with_document_numbers_are_refused() -> None:
    model = MODELS["bamba"]()
    with install(model), pytest.raises(Unsupported, match=r"seq_idx has shape \[3, 12\]"):
        model(tokens(), seq_idx=torch.zeros(3, 12, dtype=torch.int32))


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "mamba2", "mamba"])
@torch.no_grad()
def test_decoding_changes_the_state_where_it_lies(name: str) -> None:
    model = MODELS[name]()
    with install(model):
        past = model(tokens(), use_cache=True)
        cache = past.get("past_key_values", None) or past["cache_params"]
        state = cache.layers[0].recurrent_states[0]
        before = state.clone()
        model(tokens()[:, :1], **{cache_name(name): cache})
        assert cache.layers[0].recurrent_states[0] is state
    assert not torch.equal(state, before)


@pytest.mark.parametrize(("name", "length"), [("olmo_hybrid", 1), ("olmo_hybrid", 3), ("kimi_linear", 1), ("bamba", 3)])
def test_tokens_after_a_cache_have_gradients(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own have none: the cache writes the new state over the one that the gradient needs. Here it keeps both."""
    model, found = MODELS[name](), []
    for routed in (False, True):
        with torch.no_grad():
            past = model(tokens(), use_cache=True).past_key_values
        layer = next(layer for layer in past.layers if hasattr(layer, "recurrent_states"))
        model.zero_grad()
        with monkeypatch.context() as patch:
            if not routed:
                patch.setattr(layer, "update_recurrent_state", lambda states, *rest, **options: states)
            handle = install(model) if routed else None
            model(tokens()[:, :length], past_key_values=past).logits.square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        if handle is not None:
            handle.restore()
    assert relative(found[1], found[0]) < BUDGET


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "olmo_hybrid", "bamba", "mamba"])
@pytest.mark.parametrize("where", ["a CPU", "a GPU"])
@torch.no_grad()
def test_half_precision_is_as_near_the_truth_as_theirs(name: str, where: str, request: pytest.FixtureRequest) -> None:
    """On a GPU, where tokens keep their dtype, too."""
    if where == "a GPU":
        request.getfixturevalue("on_a_gpu")
    truth = MODELS[name]()(tokens())[0]
    model = MODELS[name]().bfloat16()
    theirs = model(tokens())[0]
    with install(model):
        out = model(tokens())[0]
    assert out.dtype == theirs.dtype
    assert relative(out.float(), truth) < 1.25 * relative(theirs.float(), truth)


class TestInstallation:
    def test_it_comes_and_goes_without_a_trace(self) -> None:
        model, other = MODELS["bamba"](), MODELS["bamba"]()
        before = [dict(vars(module)) for module in model.modules()]
        methods = {type(module): dict(vars(type(module))) for module in model.modules()}
        handle = install(model)
        assert "forward" in vars(model.model.layers[0].mamba) and "forward" in vars(model.model.layers[0].mamba.norm)
        assert all("forward" not in vars(module) for module in other.modules())
        assert all(dict(vars(cls)) == known for cls, known in methods.items())
        handle.restore()
        handle.restore()
        assert [dict(vars(module)) for module in model.modules()] == before

    def test_a_method_that_another_put_since_is_left(self) -> None:
        model = MODELS["mamba2"]()
        handle = install(model)
        mixer = model.backbone.layers[0].mixer
        mixer.forward = replaced = lambda *args, **keywords: None
        handle.restore()
        assert mixer.forward is replaced
        with install(model) as second:
            assert second.sites == ("backbone.layers.1.mixer",)
            assert second.skipped == (
                ("backbone.layers.0.mixer", "its forward was replaced (by a hook?), which foci leaves alone"),
            )

    def test_a_plan_names_linear_and_softmax_layers(self) -> None:
        model = MODELS["qwen3_next"]()
        linear, softmax = find_sites(model)[0]
        expected = logits_and_gradients(model, padding("left"))
        for plan in ({linear: "reference"}, {softmax: "chunked"}, {linear: "reference", softmax: None}):
            with install(model, plan) as handle:
                assert handle.sites == tuple(name for name, backend in plan.items() if backend)
                assert all(why == "left by the plan" for _, why in handle.skipped)
                assert ("forward" in vars(model.model.layers[0].linear_attn)) == (linear in handle.sites)
                got = logits_and_gradients(model, padding("left"))
            assert max(relative(g, e) for g, e in zip(got, expected, strict=True)) < BUDGET
        with pytest.raises(ValueError, match=r"linear_attn'\] is 'aten'; expected None or one of 'native'"):
            install(model, {linear: "aten"})  # a softmax backend

    @pytest.mark.usefixtures("on_a_gpu")
    def test_training_keeps_bfloat16_where_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, seen = MODELS["qwen3_next"]().bfloat16(), []
        monkeypatch.setattr(transformers_recurrences, "installed", lambda package: False)
        run = transformers_recurrences.delta_rule

        def spy(q: Tensor, *given: Any, **rest: Any) -> Any:
            seen.append(q.dtype)
            return run(q, *given, **rest)

        monkeypatch.setattr(transformers_recurrences, "delta_rule", spy)
        for asked, dtype in ((False, torch.float32), (True, torch.bfloat16)):
            seen.clear()
            with install(model, keep_bfloat16=asked):
                logits_and_gradients(model, None)
            assert {*seen} == {dtype}

    def test_keeping_bfloat16_without_a_recurrence_is_refused(self) -> None:
        model = MODELS["qwen3_next"]()
        softmax = find_sites(model)[0].keys() - set(linear_sites(model))
        with pytest.raises(ValueError, match="keep_bfloat16 is True, but no recurrence is routed"):
            install(model, dict.fromkeys(softmax, "chunked"), keep_bfloat16=True)
        with pytest.raises(TypeError, match="keep_bfloat16 must be True or False, got 1"):
            install(model, keep_bfloat16=1)  # type: ignore[arg-type]
        assert all("forward" not in vars(module) for module in model.modules())

    @pytest.mark.parametrize("name", ["rwkv", "minimax", "recurrent_gemma", "xlstm"])
    def test_so_it_is_where_no_recurrence_has_that_choice(self, name: str) -> None:
        """It was accepted and had no effect."""
        model = MODELS[name]()
        with pytest.raises(ValueError, match=r"keep_bfloat16 is True, but .* has no such choice; expected False"):
            install(model, keep_bfloat16=True)
        install(model).restore()

    def test_a_second_installation_is_refused(self) -> None:
        for name in ("mamba2", "recurrent_gemma"):
            model = MODELS[name]()
            with install(model), pytest.raises(ValueError, match="installed in this model already"):
                install(model)

    @torch.no_grad()
    def test_a_copy_runs_on_its_own_weights(self) -> None:
        model = MODELS["kimi_linear"]()
        with install(model):
            twin = copy.deepcopy(model)
        for parameter in twin.model.layers[0].self_attn.parameters():
            parameter.mul_(1.5)
        plain = MODELS["kimi_linear"]()
        plain.load_state_dict(twin.state_dict())
        assert twin.model.layers[0].self_attn.forward.__self__ is twin.model.layers[0].self_attn
        assert relative(twin(tokens()).logits, plain(tokens()).logits) < BUDGET

    @pytest.mark.parametrize("name", ["bamba", "recurrent_gemma"])
    @torch.no_grad()
    def test_a_pickle_comes_back_with_its_own_code_in_the_linear_layers(self, name: str) -> None:
        model = MODELS[name]()
        expected = model(tokens(), use_cache=False).logits
        with install(model) as handle:
            again = pickle.loads(pickle.dumps(model))
        linear = again.get_submodule(next(site for site in handle.sites if site in linear_sites(model)))
        method = "_rnn_scan" if name == "recurrent_gemma" else "forward"
        assert getattr(linear, method).__func__ is getattr(type(linear), method)
        assert relative(again(tokens(), use_cache=False).logits, expected) < BUDGET

    def test_a_recurrence_that_foci_does_not_know_is_named(self) -> None:
        class NewMambaMixer(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x

        NewMambaMixer.__module__ = "transformers.models.new.modeling_new"
        model = MODELS["bamba"]()
        model.model.layers[1].mlp = NewMambaMixer()
        _, skipped = find_sites(model)
        assert skipped == [("model.layers.1.feed_forward", "NewMambaMixer runs no recurrence that foci knows")] or (
            skipped == [("model.layers.1.mlp", "NewMambaMixer runs no recurrence that foci knows")]
        )

    def test_what_holds_a_recurrence_is_not_named_for_having_none(self) -> None:
        class NewMambaLayer(nn.Sequential):
            __module__ = "transformers.models.new.modeling_new"

        model = MODELS["mamba2"]()
        layer = model.backbone.layers[0]
        layer.mixer = NewMambaLayer(nn.Sequential(layer.mixer))
        sites, skipped = find(model)
        assert "backbone.layers.0.mixer.0.0" in sites and not skipped

    def test_code_that_is_not_transformers_own_is_left_alone(self) -> None:
        """Whatever its names are, which mean something else there."""

        def mamba_selective_scan(x: Tensor) -> Tensor:
            return x

        class MambaMixer(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return mamba_selective_scan(x)

        model = nn.Sequential(MODELS["mamba"](), MambaMixer())
        sites, skipped = find(model)
        assert sites and all(name.startswith("0.") for name in sites) and not skipped

    def test_each_layer_has_the_backend_that_the_plan_gives_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, seen = MODELS["mamba2"](), []
        run = transformers_recurrences.linear_attention

        def spy(*given: Any, **rest: Any) -> Any:
            seen.append(rest["backend"])
            return run(*given, **rest)

        monkeypatch.setattr(transformers_recurrences, "linear_attention", spy)
        with install(model, dict(zip(find_sites(model)[0], ("reference", "chunked"), strict=True))):
            model(tokens(), use_cache=False)
        assert seen == ["reference", "chunked"]

    def test_a_norm_whose_forward_was_replaced_is_left_alone(self) -> None:
        model = MODELS["bamba"]()
        norm = model.model.layers[0].mamba.norm
        norm.forward = replaced = lambda *args, **keywords: None
        with install(model):
            assert norm.forward is replaced and "forward" in vars(model.model.layers[0].mamba)
        assert norm.forward is replaced

    def test_a_layer_that_cannot_be_routed_is_left_and_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*given: Any) -> Any:
            raise CannotReroute("it has no source")

        monkeypatch.setattr("foci.integrations.transformers_linear._instead", refused)
        model = MODELS["qwen3_next"]()
        linear, softmax = find_sites(model)[0]
        with install(model) as handle:
            assert handle.sites == (softmax,) and handle.skipped == ((linear, "it has no source"),)
            assert "forward" not in vars(model.get_submodule(linear))

    def test_documents_are_refused_by_a_part_of_the_model_too(self) -> None:
        model, offsets = MODELS["mamba2"](), torch.tensor([0, 5, 12])
        with install(model), pytest.raises(Unsupported, match="Mamba2Model cannot keep packed documents apart"):
            model.backbone(tokens(rows=1), cu_seq_lens_q=offsets)

    @torch.no_grad()
    def test_keywords_that_may_change_the_result_are_refused(self) -> None:
        for name in ("qwen3_next", "bamba"):
            model = MODELS[name]()
            with install(model), pytest.raises(Unsupported, match=r"head_mask=\.\.\. may change the result"):
                model(tokens(), head_mask=torch.ones(4))
