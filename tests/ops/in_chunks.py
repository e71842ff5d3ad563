"""What a backend in chunks promises, of linear attention and of the delta rule alike."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from foci.core.spec import Spec
from tests.ops.recurrences import BUDGET, answers, error, exact, forgetful, remembering


class InChunks:
    """Lengths, slabs, strides and what is kept; a subclass says of which operator."""

    spec: Spec
    function: Any
    module: ModuleType

    def problem(self, T: int, D: int | None = None) -> dict[str, Any]:
        inputs = {n: torch.randn(1, T, 2, 8, dtype=torch.float64) for n in "qkv"}
        inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
        shape = (1, T, 2) if D is None else (1, T, 2, D)
        if "beta" in self.spec.differentiable:
            inputs["beta"] = torch.rand(1, T, 2, dtype=torch.float64)
        return inputs | {"log_decay": -torch.rand(shape, dtype=torch.float64)}

    @pytest.mark.parametrize("D", [None, 8])
    @pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127, 128, 129, 300])
    def test_any_length(self, T: int, D: int | None) -> None:
        inputs = self.problem(T, D)
        found, truth = (answers(self.function, self.spec, inputs, backend) for backend in ("chunked", "reference"))
        assert all(error(found[n], truth[n]) < 1e-12 for n in truth)

    @pytest.mark.parametrize("D", [None, 8])
    def test_long_memories_stay_within_the_budget(self, D: int | None) -> None:
        inputs = remembering({n: x.float() for n, x in self.problem(8192, D).items()})
        found = answers(self.function, self.spec, inputs, "chunked")
        truth = answers(self.function, self.spec, exact(inputs), "chunked")
        errors = {n: error(found[n], truth[n]) for n in truth}
        assert max(errors.values()) < BUDGET[torch.float32], errors

    @pytest.mark.parametrize("D", [None, 8])
    def test_nothing_depends_on_a_gate_that_forgets_everything(self, D: int | None) -> None:
        inputs, forgotten = forgetful(self.problem(70, D))
        assert not answers(self.function, self.spec, inputs, "chunked")["dlog_decay"][forgotten].any()

    def test_no_tokens(self) -> None:
        out, state = self.function(**self.problem(0), return_state=True)
        assert out.shape == (1, 0, 2, 8)
        assert not state.any()

    def test_many_slabs_with_and_without_states_kept(self) -> None:
        # 40 heads: a slab holds one chunk of each
        inputs = {n: x.expand(20, *x.shape[1:]).clone() for n, x in self.problem(200).items()}
        call = self.spec.bind(**inputs)
        kept = self.module.forward(call, True)[2]
        assert kept.shape == (6, 40, 8, 8)  # four slabs, and room for two more
        assert not kept[0].any()
        assert len(self.module.forward(call)) == 2
        _, before = self.function(**{n: x[:, :192] for n, x in inputs.items()}, return_state=True)
        torch.testing.assert_close(kept[3], before.flatten(0, 1))
        found, truth = (answers(self.function, self.spec, inputs, backend) for backend in ("chunked", "reference"))
        assert all(error(found[n], truth[n]) < 1e-12 for n in truth)

    @pytest.mark.parametrize("wanted", ["q", "k", "v", "log_decay"])
    def test_a_gradient_alone_is_the_same(self, wanted: str) -> None:
        inputs = self.problem(70, 8)
        every = {n: x.clone().requires_grad_() for n, x in inputs.items()}
        self.function(**every)[0].square().sum().backward()
        alone = inputs | {wanted: inputs[wanted].clone().requires_grad_()}
        self.function(**alone)[0].square().sum().backward()
        torch.testing.assert_close(alone[wanted].grad, every[wanted].grad, rtol=0, atol=0)

    def test_any_strides(self) -> None:
        fused = torch.randn(2, 70, 3, 4, 8)
        q, k, v = fused.unbind(2)
        rest = {"beta": torch.rand(2, 4, 70).transpose(1, 2)} if "beta" in self.spec.differentiable else {}
        packed = {n: x.contiguous() for n, x in {"q": q, "k": k, "v": v, **rest}.items()}
        assert torch.equal(self.function(q, k, v, **rest)[0], self.function(**packed)[0])
        leaf = fused.clone().requires_grad_()
        self.function(*leaf.unbind(2), **rest)[0].sum().backward()  # the gradient comes with stride 0
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()

    def test_under_checkpointing(self) -> None:
        inputs = {n: x.requires_grad_() for n, x in self.problem(70).items()}
        plain = torch.autograd.grad(self.function(**inputs)[0].square().sum(), list(inputs.values()))
        again = checkpoint(lambda: self.function(**inputs)[0], use_reentrant=False)
        for a, b in zip(plain, torch.autograd.grad(again.square().sum(), list(inputs.values())), strict=True):
            assert torch.equal(a, b)

    def test_nothing_is_kept_for_a_backward_that_nobody_asks_for(self) -> None:
        seen = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(str(op))
                return op(*args, **(kwargs or {}))

        inputs = self.problem(70)
        with Watch():
            out = self.function(**inputs, backend="chunked")[0]
            self.function(**{n: x.requires_grad_() for n, x in inputs.items()}, backend="chunked")
        ops = [op for op in seen if op.startswith("foci.")]
        assert [op.partition("chunked_")[2] for op in ops] == ["alone.default", "fwd.default"]
        torch.testing.assert_close(out, self.function(**inputs, backend="reference")[0])

    def test_states_are_kept_at_the_borders_of_slabs_only(self) -> None:
        T = 4096
        inputs = {n: x.float() for n, x in self.problem(T).items()}
        call = self.spec.bind(**inputs)
        assert self.module.kept(call).shape == (6, 2, 8, 8)  # four slabs, and room for two more
        assert self.module.kept(call._replace(offsets=torch.tensor([0, T]))).shape == (0, 2, 8, 8)
        assert self.module.reasons(call) == []
