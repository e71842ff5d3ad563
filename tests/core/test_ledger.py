"""Each entry strikes exactly where its issue says, and is still true of this torch where that can be run."""

from __future__ import annotations

import platform as host
import signal
import subprocess
import sys

import pytest
import torch

from foci.core.device import Platform, platform
from foci.core.ledger import LEDGER, Use, in_force, vetoes

H200 = Platform("cuda", (2, 13, 0), (13, 0), (9, 20, 0), (9, 0))
H200_LATER = Platform("cuda", (2, 14, 0), (13, 0), (9, 26, 0), (9, 0))
B200 = Platform("cuda", (2, 13, 0), (13, 0), (9, 20, 0), (10, 0))
A100_OLD = Platform("cuda", (2, 11, 0), (12, 6), (9, 10, 2), (8, 0))
CPU = Platform("cpu", (2, 13, 0))

plain = {"T": 704, "S": 704, "G": 8}
CASES = [
    ("cudnn", Use(**plain, tensor_mask=True, gradients=True), H200, "pytorch#196678"),
    ("cudnn", Use(**plain, tensor_mask=True), H200, None),
    ("cudnn", Use(**plain, gradients=True), H200, None),
    ("cudnn", Use(T=704, S=640, G=8, tensor_mask=True, gradients=True), H200, None),
    ("cudnn", Use(**plain, tensor_mask=True, gradients=True), B200, None),
    ("cudnn", Use(T=1, S=128, G=8, gradients=True), H200_LATER, "NVIDIA/cudnn-frontend#1072"),
    ("cudnn", Use(T=1, S=128, G=8, gradients=True), H200, None),
    ("cudnn", Use(T=1, S=128, G=4), B200, "pytorch#193893"),
    ("cudnn", Use(T=1, S=128, G=8), B200, None),
    ("cudnn", Use(**plain, gradients=True), A100_OLD, "pytorch#169849"),
    ("efficient", Use(T=65537, S=65537, G=8, causal=True), H200, "pytorch#162588"),
    ("efficient", Use(T=65536, S=65536, G=8, causal=True), H200, None),
    ("efficient", Use(T=65537, S=65537, G=8), H200, None),
    ("cpu_flash", Use(T=0, S=8, G=1), CPU, "pytorch#141219"),
    ("cpu_flash", Use(T=8, S=0, G=1), CPU, "pytorch#141219"),
    ("cpu_flash", Use(T=8, S=8, G=1), CPU, None),
    ("flex", Use(T=8, S=8, G=1), A100_OLD, "pytorch#181645"),
    ("flex", Use(T=8, S=8, G=1), H200, None),
    ("flex", Use(T=8, S=8, G=1, gradients=True), CPU, "pytorch#148752"),
    ("unheard-of", Use(T=0, S=0, G=1), CPU, None),
]


@pytest.mark.parametrize(("kernel", "use", "place", "issue"), CASES)
def test_entry_strikes_exactly_there(kernel: str, use: Use, place: Platform, issue: str | None) -> None:
    reasons = vetoes(kernel, use, place)
    if issue is None:
        assert reasons == []
    else:
        assert len(reasons) == 1
        assert reasons[0].startswith("ledger: ")
        assert f"({issue})" in reasons[0]


def test_every_veto_has_a_case_that_it_refuses() -> None:
    struck = {reason for kernel, use, place, _ in CASES for reason in vetoes(kernel, use, place)}
    assert struck == {f"ledger: {defect.what} ({defect.issue})" for defect in LEDGER if defect.kind == "veto"}


def test_every_veto_has_a_public_thread() -> None:
    for defect in LEDGER:
        assert defect.url.startswith("https://github.com/") or (defect.kind != "veto" and "measured" in defect.issue)
    urls = {defect.url for defect in LEDGER}
    assert "https://github.com/pytorch/pytorch/issues/196678" in urls
    assert "https://github.com/NVIDIA/cudnn-frontend/issues/1072" in urls


def test_in_force_is_what_this_platform_has() -> None:
    assert {defect.kernel for defect in in_force(CPU)} == {"cpu_flash", "flex"}
    assert {defect.kernel for defect in in_force(B200)} == {"cudnn", "efficient"}
    assert any(defect.kind == "normalised" for defect in in_force(CPU))


def test_vetoes_do_not_break_a_graph() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        reasons = vetoes("cpu_flash", Use(T=x.shape[0], S=3, G=1), platform(x.device))
        return x + len(reasons)

    assert torch.compile(f, backend="eager", fullgraph=True)(torch.zeros(2)).tolist() == [0, 0]


flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.mark.skipif(host.machine() not in {"x86_64", "AMD64"}, reason="integer division by zero traps on x86 only")
def test_cpu_flash_really_ends_the_process_on_no_queries() -> None:
    code = "import torch; x = torch.ones(1, 1, 2, 4); f = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu; "
    crashed = subprocess.run([sys.executable, "-c", code + "f(x[:, :, :0], x, x)"], check=False)
    assert crashed.returncode == -signal.SIGFPE


def test_cpu_flash_really_gives_lse_zero_on_empty_rows_and_zero_for_nan() -> None:
    x = torch.randn(1, 1, 3, 4)
    mask = torch.zeros(3, 3)
    mask[0] = -torch.inf
    assert flash(x, x, x, attn_mask=mask)[1][0, 0, 0] == 0.0
    broken = x.clone()
    broken[0, 0, 1] = torch.nan
    assert flash(broken, x, x)[0][0, 0, 1].tolist() == [0.0] * 4
