"""What the compiled backend promises, of linear attention and of the delta rule alike."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

import foci
from foci.core.errors import Unsupported
from foci.core.spec import Spec
from foci.ops import native
from tests.ops.recurrences import BUDGET, answers, error, exact, forgetful, inputs_of, remembering

BUILT = pytest.mark.skipif(bool(native._unavailable()), reason=f"no compiled recurrences: {native._unavailable()}")


class InNative:
    """Every length and dtype against the equation; what is kept, what is refused; a subclass says of which operator."""

    spec: Spec
    function: Any
    module: ModuleType

    def problem(self, T: int, D: int | None = None, B: int = 1, K: int = 20, V: int = 12) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(T)
        inputs = {"q": torch.randn(B, T, 2, K, generator=draw), "v": torch.randn(B, T, 4, V, generator=draw)}
        inputs["k"] = torch.nn.functional.normalize(torch.randn(B, T, 2, K, generator=draw), dim=-1)
        shape = (B, T, 4) if D is None else (B, T, 4, K)
        if "beta" in self.spec.differentiable:
            inputs["beta"] = torch.rand(B, T, 4, generator=draw)
        inputs["state"] = torch.randn(B, 4, K, V, generator=draw)
        return inputs | {"log_decay": -torch.rand(shape, generator=draw)}

    def apart(self, inputs: dict[str, Any], backend: str = "native") -> dict[str, float]:
        found = answers(self.function, self.spec, inputs, backend)
        truth = answers(self.function, self.spec, exact(inputs), "chunked")
        return {n: error(found[n], truth[n]) for n in truth}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_every_case_equals_the_equation_or_is_refused(self, dtype: torch.dtype) -> None:
        assert self.spec.bind is not None
        for case in self.spec.cases:
            inputs = inputs_of(self.spec, case.name, dtype)
            if self.module.reasons(self.spec.bind(**inputs)):
                assert foci.explain(self.spec.name, **inputs).chosen == "chunked"
                continue
            found = answers(self.function, self.spec, inputs, "native")
            truth = answers(self.function, self.spec, exact(inputs), "reference")
            errors = {n: error(found[n], truth[n]) for n in truth if truth[n].numel()}
            assert all(e <= BUDGET[dtype] for e in errors.values()), (case.name, errors)

    @pytest.mark.parametrize("D", [None, 20])
    @pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 129, 200])
    def test_any_length(self, T: int, D: int | None) -> None:
        assert max(self.apart(self.problem(T, D)).values()) < BUDGET[torch.float32]

    @pytest.mark.parametrize("D", [None, 20])
    def test_long_memories_stay_within_the_budget(self, D: int | None) -> None:
        errors = self.apart(remembering(self.problem(8192, D)))
        assert max(errors.values()) < BUDGET[torch.float32], errors

    @pytest.mark.parametrize("D", [None, 20])
    def test_nothing_depends_on_a_gate_that_forgets_everything(self, D: int | None) -> None:
        inputs, forgotten = forgetful(self.problem(70, D))
        assert not answers(self.function, self.spec, inputs, "native")["dlog_decay"][forgotten].any()

    @pytest.mark.parametrize("D", [None, 20])
    @pytest.mark.parametrize("sizes", [(1, 1), (16, 16), (17, 33), (64, 8), (3, 70)])
    def test_any_size(self, sizes: tuple[int, int], D: int | None) -> None:
        inputs = self.problem(70, D, K=sizes[0], V=sizes[1])
        assert max(self.apart(inputs).values()) < BUDGET[torch.float32]

    @pytest.mark.parametrize("D", [None, 20])
    def test_documents(self, D: int | None) -> None:
        inputs = self.problem(200, D)
        offsets = torch.tensor([0, 0, 1, 64, 65, 129, 129, 200])
        inputs |= {"offsets": offsets, "state": torch.randn(7, *inputs["state"].shape[1:])}
        assert max(self.apart(inputs).values()) < BUDGET[torch.float32]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half(self, dtype: torch.dtype) -> None:
        inputs = self.problem(100, 20)
        inputs |= {n: inputs[n].to(dtype) for n in "qkv"}
        assert max(self.apart(inputs).values()) < BUDGET[dtype]

    def test_the_prefix_does_not_know_what_follows(self) -> None:
        """Bit for bit, and whatever the gates behind it are."""
        long = self.problem(150, 20)
        short = {n: x if n == "state" else x[:, :77] for n, x in long.items()}
        long["log_decay"][:, 77:] = -torch.inf
        long["v"][:, 77:] *= 1e4
        whole, prefix = (self.function(**x, backend="native")[0] for x in (long, short))
        assert torch.equal(whole[:, :77], prefix)

    def test_a_row_does_not_know_its_neighbours(self) -> None:
        inputs = self.problem(70, 20, B=3)
        alone = {n: x[1:2] for n, x in inputs.items()}
        together, single = (self.function(**x, backend="native")[0] for x in (inputs, alone))
        assert torch.equal(together[1:2], single)

    def test_any_strides(self) -> None:
        fused = torch.randn(2, 70, 3, 4, 8)
        q, k, v = fused.unbind(2)
        rest = {"log_decay": -torch.rand(2, 70, 8, 4).transpose(2, 3)}
        if "beta" in self.spec.differentiable:
            rest |= {"beta": torch.rand(2, 4, 70).transpose(1, 2), "erase": torch.randn(2, 70, 8, 4).mT / 8}
        odd = {"q": q.transpose(2, 3).contiguous().transpose(2, 3), "k": k, "v": v}
        plain = {n: x.contiguous() for n, x in {"q": q, "k": k, "v": v, **rest}.items()}
        found, wanted = (self.function(**x, backend="native")[0] for x in (odd | rest, plain))
        assert torch.equal(found, wanted)

    @pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 128, 200, 1000])
    def test_there_is_room_for_every_state_that_is_kept(self, T: int) -> None:
        """That of every 64 tokens of each row or document, the last of them begun or not, and little more."""
        rows, packed = self.problem(T, B=3), self.problem(T)
        ends = [0, 0, T // 3, T // 3 + T // 2, T, T]
        packed |= {"offsets": torch.tensor(ends), "state": None}
        for inputs, lengths in ((rows, [T] * 3), (packed, [b - a for a, b in pairwise(ends)])):
            room = self.module.kept(self.spec.bind(**inputs)).shape[0]
            needed = sum(-(-length // 64) for length in lengths)
            assert needed <= room <= needed + len(lengths) + 2

    def test_two_channels_decay_each_by_itself(self) -> None:
        """The fewest that there can be: one of its own for each is still not one for all."""
        inputs = self.problem(40, 2, K=2)
        assert inputs["log_decay"].shape[-1] == 2
        errors = self.apart(inputs)
        assert max(errors.values()) < BUDGET[torch.float32], errors
        token = {n: x if n == "state" else x[:, 0] for n, x in inputs.items()}
        state, step = token.pop("state").clone(), getattr(foci, f"{self.function.__name__}_step")
        given = [token.pop(name) for name in ("q", "k", "v", "beta") if name in token]
        out = step(*given, state, **token)
        wanted, after = self.function(
            **{n: x if n == "state" else x[:, :1] for n, x in inputs.items()}, return_state=True, backend="reference"
        )
        torch.testing.assert_close(out, wanted[:, 0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-5)

    def test_it_keeps_a_state_every_64_tokens(self) -> None:
        inputs = self.problem(130)
        call = self.spec.bind(**inputs)
        made = self.module.forward(call, True)[2]
        declared = self.module.kept(call)
        assert tuple(made.shape) == declared.shape
        assert made.dtype == declared.dtype
        torch.testing.assert_close(made[0, :, :20], inputs["state"][0])
        before = self.function(**{n: x if n == "state" else x[:, :64] for n, x in inputs.items()}, return_state=True)[1]
        torch.testing.assert_close(made[1, :, :20], before[0])

    def test_refusals_have_reasons(self) -> None:
        inputs = self.problem(4)
        with pytest.raises(Unsupported, match="float64 is not supported"):
            self.function(**exact(inputs), backend="native")
        with pytest.raises(Unsupported, match="a size is 0"):
            self.function(**{n: x if n == "state" else x[:, :0] for n, x in inputs.items()}, backend="native")
        assert foci.explain(self.spec.name, **exact(inputs)).chosen == "chunked"
        assert foci.explain(self.spec.name, **inputs).chosen == "native"

    def test_bad_offsets_are_named(self) -> None:
        inputs = self.problem(10) | {"offsets": torch.tensor([0, 4, 11])}
        inputs["state"] = torch.cat([inputs["state"]] * 2)
        with pytest.raises(ValueError, match="offsets must rise from 0 to T=10"):
            self.function(**inputs, backend="native")
