"""What the Triton kernels of both scans promise beside their cases: cut or whole, any strides and memory, causality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foci.check.memory import poisoned, strided
from foci.core import tune
from tests.ops.in_triton import DEVICE, InTriton, there
from tests.ops.recurrences import BUDGET, answers

MANY = tune.TARGETS["sm_90"]._replace(processors=10_000)  # so that every sequence of 128 tokens is cut


class InScans(InTriton):
    """A subclass says how a problem of this operator is made."""

    def problem(self, T: int, D: int = 5, B: int = 1, N: int | None = None) -> dict[str, Any]:
        raise NotImplementedError

    def launches(self, inputs: dict[str, Any]) -> tuple[list[str], list[str]]:
        """The kernels of a forward and of a backward, by name, without launching them."""
        meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
        call = self.spec.bind(**meta)
        with tune.record_launches(MANY) as forward:
            made = self.module.forward(call, *(True,) * hasattr(self.module, "kept"))
        needs = [getattr(call, name) is not None for name in self.spec.differentiable]
        with tune.record_launches(MANY) as backward:
            self.module.backward(call, made, made[:2], needs)
        return [each.kernel.__name__ for each in forward], [each.kernel.__name__ for each in backward]

    @pytest.fixture
    def cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sequences of 128 tokens are cut into stretches of 32."""
        monkeypatch.setattr(tune, "TARGETS", tune.TARGETS | {"sm_90": MANY})

    @pytest.mark.parametrize("T", [1, 7, 8, 9, 16, 17, 31, 33, 65])
    def test_any_length(self, T: int) -> None:
        assert max(self.apart(self.problem(T)).values()) < BUDGET[torch.float32]

    @pytest.mark.parametrize("D", [1, 3, 64, 70])
    def test_any_number_of_channels(self, D: int) -> None:
        assert max(self.apart(self.problem(9, D)).values()) < BUDGET[torch.float32]

    @pytest.mark.parametrize("pick", [min, max])
    def test_every_block_that_may_be_tried_is_right(self, pick: Any) -> None:
        inputs = self.problem(40)
        with tune.override_configs({}) as asked:
            self.apart(inputs)
        assert all(each.vary for each in asked.values())
        chosen = {
            key: replace(each.rule, blocks={**each.rule.blocks, **{name: pick(n) for name, n in each.vary.items()}})
            for key, each in asked.items()
        }
        with tune.override_configs(chosen):
            assert max(self.apart(inputs).values()) < BUDGET[torch.float32]

    def test_documents(self) -> None:
        inputs = self.problem(100, N=8) | {"offsets": torch.tensor([0, 0, 1, 32, 33, 65, 65, 100, 100])}
        assert max(self.apart(inputs).values()) < BUDGET[torch.float32]

    def test_cut(self, cut: None) -> None:
        assert max(self.apart(self.problem(130, 3, B=2), "chunked").values()) < BUDGET[torch.float32]

    def test_documents_cut(self, cut: None) -> None:
        inputs = self.problem(150, 3, N=7) | {"offsets": torch.tensor([0, 0, 1, 33, 33, 100, 150, 150])}
        assert max(self.apart(inputs, "chunked").values()) < BUDGET[torch.float32]

    def test_extremes_cut(self, cut: None) -> None:
        assert max(self.apart(self.extreme(140), "chunked").values()) < BUDGET[torch.float32]

    def test_float16_cut(self, cut: None) -> None:
        inputs = {n: x.half() if x.dim() == 3 and x.shape[1] == 128 else x for n, x in self.problem(128, 3).items()}
        assert max(self.apart(inputs, "chunked").values()) < BUDGET[torch.float16]

    def extreme(self, T: int) -> dict[str, Any]:
        raise NotImplementedError

    @pytest.mark.parametrize("long", [False, True])
    def test_the_past_does_not_know_the_future(self, long: bool, request: pytest.FixtureRequest) -> None:
        """Bit for bit, gradients of a loss on the past too, whatever the gates behind it are."""
        T, at = (132, 69) if long else (40, 21)
        if long:
            request.getfixturevalue("cut")
        found = []
        for other in (False, True):
            inputs = there(self.problem(T, 3))
            if other:
                inputs = {n: self.spoiled(n, x, at) for n, x in inputs.items()}
            leaves = {n: x.requires_grad_() for n, x in inputs.items()}
            out = self.function(**leaves, backend="triton")[0][:, :at]
            gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()))
            found.append([out, *(x[:, :at] if x.dim() == 3 and x.shape[1] == T else x for x in gradients)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def spoiled(self, name: str, x: torch.Tensor, at: int) -> torch.Tensor:
        """Another value from token `at` on."""
        raise NotImplementedError

    def test_a_row_does_not_know_its_neighbours(self) -> None:
        inputs = there(self.problem(20, B=3))
        alone = {n: x[1:2] if x.shape[0] == 3 else x for n, x in inputs.items()}
        together, single = (self.function(**each, backend="triton")[0] for each in (inputs, alone))
        assert torch.equal(together[1:2], single)

    def test_neither_strides_nor_what_memory_held_matter(self) -> None:
        inputs = self.problem(35, N=4) | {"offsets": torch.tensor([0, 3, 3, 20, 35])}
        found = answers(self.function, self.spec, there(inputs), "triton")
        turned = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in inputs.items()}
        with poisoned():
            for other in (strided(inputs), turned):
                again = answers(self.function, self.spec, {n: x.to(DEVICE) for n, x in other.items()}, "triton")
                assert all(torch.equal(found[n], again[n]) for n in found)

    def test_a_gradient_may_be_one_number_for_all(self) -> None:
        """out.sum() hands back a tensor of strides 0, and only what is asked for is given."""
        inputs = there(self.problem(12))
        names = [n for n in inputs if n in self.spec.differentiable]
        leaves = {n: inputs[n].clone().requires_grad_() for n in names}
        gradients = []
        for backend in ("triton", "chunked"):
            out, final = self.function(**inputs | leaves, return_state=True, backend=backend)
            gradients.append(torch.autograd.grad(out.sum() + 2 * final.sum(), list(leaves.values())))
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
        for name, expected in zip(names, gradients[0], strict=True):
            leaf = inputs[name].clone().requires_grad_()
            out, final = self.function(**inputs | {name: leaf}, return_state=True, backend="triton")
            assert torch.equal(torch.autograd.grad(out.sum() + 2 * final.sum(), leaf)[0], expected), name

    def test_offsets_on_the_cpu_are_checked(self) -> None:
        inputs = self.problem(10, N=2)
        for wrong in ([0, 4, 11], [0, 4, 9], [1, 4, 10], [0, 11, 10]):
            with pytest.raises(ValueError, match="offsets must rise from 0 to T=10"):
                self.function(**there(inputs) | {"offsets": torch.tensor(wrong)}, backend="triton")

    @pytest.mark.parametrize("place", [0, 1])
    def test_a_gradient_may_be_absent(self, place: int) -> None:
        gradients = []
        for backend in ("triton", "chunked"):
            leaves = {n: x.requires_grad_() for n, x in there(self.problem(12)).items()}
            loss = self.function(**leaves, return_state=True, backend=backend)[place].square().sum()
            given = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            gradients.append(given)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
