"""What a gradient of lse that is folded into `out` promises, by torch and by a kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


class InOut:
    """A subclass says which `fold`, and where its tensors are to be."""

    fold: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    device = torch.device("cpu")

    def folded(self, dlse: Tensor, dout: Tensor, out: Tensor, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What `fold` makes of tensors that it leaves as they are."""
        lse = torch.zeros_like(dlse) if lse is None else lse
        given = [x.to(self.device) for x in (dlse, lse, dout, out)]
        before = [x.clone() for x in given]
        pulls, shares = type(self).fold(*given)
        assert all(x.allclose(was, 0.0, 0.0, equal_nan=True) for x, was in zip(given, before, strict=True))
        assert pulls.dtype == shares.dtype == out.dtype and pulls.shape == shares.shape == out.shape
        return pulls.cpu(), shares.cpu()

    @pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
    @pytest.mark.parametrize("width", [3, 4, 5, 32, 300])
    @pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
    def test_sums_come_out_less_by_it(self, size: float, width: int, dtype: torch.dtype) -> None:
        """Also where dout is 0; dout stays as it was but for 2^-40, or 0 for 0."""
        torch.manual_seed(0)
        dout, out = (torch.randn(2, 9, 3, width).to(dtype) for _ in range(2))
        dout *= size
        dout[0, 2], dout[1, 4], dout[1, 5] = 0.0, dout[1, 4] * 1e-3, dout[1, 5] * 1e-12
        dlse = size * torch.randn(2, 9, 3)
        dout[0, 7], dlse[0, 7], dlse[1, 7] = 0.0, 0.0, 0.0
        pulls, shares = self.folded(dlse, dout, out)
        assert pulls[0, 7].eq(0).all() and shares[0, 7].equal(out[0, 7]) and shares[1, 7].equal(out[1, 7])
        assert ((pulls - dout).abs() <= (dout.abs().amax(-1, keepdim=True) * 2.0**-40).clamp_min(2.0**-64)).all()
        assert (_off(pulls, shares, dout, out, dlse) <= _rounding(dout, out, dlse)).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
    @pytest.mark.parametrize("few", [0.0, 1e-36, 1e-39, 1e-20])
    @pytest.mark.parametrize("width", [3, 8, 64])
    def test_one_number_is_all_that_dout_has(self, width: int, few: float, dtype: torch.dtype) -> None:
        """Or others are so small that what they would take of it is no number."""
        torch.manual_seed(0)
        dout, out = (few * torch.randn(1, width, 1, width)).to(dtype), torch.randn(1, width, 1, width).to(dtype)
        dlse = torch.randn(1, width, 1) * torch.logspace(-3, 4, width)[None, :, None]
        dout[0, :, 0].fill_diagonal_(10.0)
        pulls, shares = self.folded(dlse, dout, out)
        assert (pulls - dout).abs().max() <= 10 * 2.0**-40
        assert (_off(pulls, shares, dout, out, dlse) <= _rounding(dout, out, dlse)).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
    def test_tensors_may_lie_as_they_like(self, dtype: torch.dtype) -> None:
        """lse as cuDNN gives it, one gradient of lse for all, dout's numbers apart; an empty row has none."""
        torch.manual_seed(0)
        dout, out = (torch.randn(2, 20, 7, 5).to(dtype).permute(0, 3, 2, 1) for _ in range(2))
        lse, dlse = torch.randn(2, 7, 5).transpose(1, 2), torch.tensor(0.7).expand(2, 5, 7)
        lse[1, 3] = -torch.inf
        pulls, shares = self.folded(dlse, dout, out, lse)
        assert shares[1, 3].equal(out[1, 3]) and pulls[1, 3].equal(dout[1, 3])
        dlse = torch.where(lse == -torch.inf, 0.0, dlse)
        assert (_off(pulls, shares, dout, out, dlse) <= _rounding(dout, out, dlse)).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize("where", ["dlse", "dout", "out"])
    def test_what_is_no_number_shows_in_its_row(self, where: str, bad: float, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        given = {"dlse": torch.randn(1, 2, 1), "dout": torch.randn(1, 2, 1, 9), "out": torch.randn(1, 2, 1, 9)}
        given = {name: x if name == "dlse" else x.to(dtype) for name, x in given.items()}
        given[where][0, 0].view(-1)[0] = bad
        pulls, shares = self.folded(**given)
        delta = (pulls.float() * shares.float()).sum(-1)
        assert not delta[0, 0].isfinite() and delta[0, 1].isfinite()


def _off(pulls: Tensor, shares: Tensor, dout: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
    """How far what a kernel adds up in float32 is from delta - dlse."""
    return ((pulls.float() * shares.float()).sum(-1).double() - (dout.double() * out.double()).sum(-1) + dlse).abs()


def _rounding(dout: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
    """That of float32 sums, here and in a kernel; three numbers of eight digits hold as many."""
    return 2.0**-22 * ((dout.double() * out.double()).abs().sum(-1) + dlse.abs()) + 2.0**-80
