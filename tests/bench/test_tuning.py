"""A search among configurations with a clock that only looks at them, and the table it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.bench.tuning import Attempt, Row, _apart, search, write
from foci.core.spec import Case
from foci.core.tune import Config, ConfigRequest, Target, candidates, configure, target_of
from foci.ops import SPECS

CPU = torch.device("cpu")
SPEC = SPECS["linear"]
CASE = SPEC.cases[0]


def rule(target: Target) -> Config:
    return Config({"BLOCK_V": 64}, warps=4, stages=2)


class Fake:
    """A backend without kernels: it asks for configurations, and its clock knows what each of them costs."""

    def __init__(self, cost: Callable[[Config], float], wrong: Callable[[Config], Any] = lambda config: False) -> None:
        self.cost, self.wrong = cost, wrong
        self.used: dict[str, Config] = {}

    def reasons(self, call: Any) -> list[str]:
        return [] if call.causal else ["not causal is not supported"]

    def _compute(self, name: str, call: Any) -> Tensor:
        config = self.used[name] = configure(name, (call.q.shape[-1],), rule, target_of(CPU), {"BLOCK_V": (32, 64)})
        return torch.ones(3) * (2.0 if self.wrong(config) else 1.0)

    def forward(self, call: Any) -> tuple[Tensor, ...]:
        self.last = "forward"
        return self._compute("forward", call), torch.ones(1)

    def backward(self, call: Any, outputs: Any, grads: Any, needs: list[bool]) -> tuple[Tensor | None, ...]:
        self.last = "backward"
        assert needs[:3] == [True] * 3
        assert grads[1] is None
        return self._compute("backward", call), None

    def clock(self, run: Callable[[], object]) -> float:
        run()
        return self.cost(self.used[self.last])


def found(fake: Fake, *cases: Case, **options: Any) -> tuple[dict[tuple[str, str], Row], list[str]]:
    said: list[str] = []
    rows = search(SPEC, fake, cases or (CASE,), torch.float32, CPU, clock=fake.clock, tell=said.append, **options)
    return dict(rows), said


def slower_by(config: Config) -> float:
    """1 s with 8 warps and blocks of 32, more the farther away."""
    return 1.0 + abs(config.warps - 8) / 8 + abs(config["BLOCK_V"] - 32) / 64 + abs(config.stages - 2) / 10


def test_the_fastest_is_found_for_every_kernel_with_the_times_of_both() -> None:
    rows, _ = found(Fake(slower_by))
    K = CASE.make(torch.float32, CPU, 0)["q"].shape[-1]
    assert set(rows) == {("forward", str(K)), ("backward", str(K))}
    row = rows["forward", str(K)]
    assert row == Row(Config({"BLOCK_V": 32}, 8, 2), 1000.0, 2000.0, f"{CASE.name} forward")


def test_the_rule_stays_where_nothing_is_clearly_faster() -> None:
    for cost in (lambda config: 1.0, lambda config: 1.0 - 0.01 * (config.warps == 8)):
        rows, said = found(Fake(cost))
        assert rows == {}
        assert said[0] == "linear: 2 kernels to measure"
        assert all(line.endswith("the rule's choice stays") for line in said[1:])


def test_a_candidate_with_another_result_is_none_however_fast() -> None:
    rows, _ = found(Fake(slower_by, wrong=lambda config: config.warps == 8))
    assert {row.config for row in rows.values() if row.config.warps == 8} == set()


def test_a_candidate_that_cannot_be_launched_is_told_and_left() -> None:
    def wrong(config: Config) -> bool:
        if config["BLOCK_V"] == 32:
            raise RuntimeError("out of resource: shared memory")
        return False

    rows, said = found(Fake(slower_by, wrong))
    assert {row.config["BLOCK_V"] for row in rows.values()} == {64}
    assert "  BLOCK_V=32 num_warps=4 num_stages=2: refused: out of resource: shared memory" in said


def test_where_the_rule_itself_fails_the_kernel_is_told_and_the_rest_goes_on() -> None:
    fake = Fake(slower_by)
    fake.backward = lambda *given: (_ for _ in ()).throw(RuntimeError("at 3:4:\n\nno such op"))  # type: ignore[method-assign]
    rows, said = found(fake)
    assert {kernel for kernel, _ in rows} == {"forward"}
    assert said[0] == f"linear {CASE.name}: at 3:4: ... no such op"  # nobody can say what its backward launches


def test_a_problem_that_is_refused_is_told_and_another_is_measured_in_its_place() -> None:
    refused = next(case for case in SPEC.cases if case.make(torch.float32, CPU, 0).get("causal") is False)
    rows, said = found(Fake(slower_by), refused, CASE, CASE)
    assert f"linear {refused.name}: not causal is not supported" in said
    assert {row.problem for row in rows.values()} == {f"{CASE.name} forward", f"{CASE.name} backward"}
    assert len([line for line in said if "[" in line]) == 2


def test_what_is_kept_for_the_backward_alone_may_hold_anything() -> None:
    class Keeping(Fake):
        def kept(self, call: Any) -> Any:
            raise AssertionError("only asked whether there is one")

        def forward(self, call: Any, keep: bool = False) -> tuple[Tensor, ...]:
            assert keep
            return *super().forward(call), torch.full((3,), torch.nan)

    assert {kernel for kernel, _ in found(Keeping(slower_by))[0]} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("given", "apart"),
    [((-torch.inf, 2.0), 0.0), ((-torch.inf, 4.0), 1.0), ((0.0, 2.0), torch.inf), ((torch.nan, 2.0), torch.nan)],
)
def test_minus_infinity_is_minus_infinity_and_nothing_else(given: tuple[float, float], apart: float) -> None:
    assert _apart(torch.tensor(given), torch.tensor([-torch.inf, 2.0])) == pytest.approx(apart, nan_ok=True)
    assert _apart(torch.zeros(3), torch.zeros(2)) == torch.inf


def test_what_most_problems_share_is_measured_first() -> None:
    rare = next(c for c in SPEC.cases if c.make(torch.float32, CPU, 0)["q"].shape[-1] not in (_width(CASE),))
    rows, _ = found(Fake(slower_by), rare, CASE, CASE)
    assert [int(key) for _, key in rows] == [_width(CASE)] * 2 + [_width(rare)] * 2


def _width(case: Case) -> int:
    return int(case.make(torch.float32, CPU, 0)["q"].shape[-1])


def test_past_the_limit_nothing_begins_and_what_is_left_out_is_said() -> None:
    asked: list[Any] = []
    rows, said = found(Fake(slower_by), until=0.0, ahead=asked.extend)
    assert rows == {} and asked == []
    assert said[-1].startswith("linear: the limit of time was reached; not measured: forward[")


def test_attempts_are_compiled_ahead_and_what_is_refused_there_is_told_and_not_run() -> None:
    asked: list[Attempt] = []

    def ahead(attempts: Sequence[Attempt]) -> list[str]:
        asked.extend(attempts)
        return ["its compiler died" if each.config and each.config.warps == 8 else "" for each in attempts]

    rows, said = found(Fake(slower_by), ahead=ahead)
    assert {row.config.warps for row in rows.values()} <= {2, 4}
    assert "  BLOCK_V=32 num_warps=8 num_stages=2: its compiler died" in said
    assert [each.stage for each in asked[:2]] == ["forward", "backward"] and asked[0].config is None
    # The rule's own stages first, then the others of the best alone.
    assert {each.config.stages for each in asked[2:7] if each.config} == {2}
    assert len(asked) < 2 * len(candidates(ConfigRequest(rule(target_of(CPU)), {"BLOCK_V": (32, 64)})))


def test_a_table_is_what_configure_reads_and_is_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foci.core import tune

    first = Row(Config({"BLOCK_V": 32}, 8, 2), 1.0, 2.0, "a forward")
    second = Row(Config({}, 2, 1), 1.0, 2.0, "b forward")
    target = target_of(CPU)._replace(name="NVIDIA Fake")
    write(tmp_path, {("one", "128"): first, ("two", "64"): first}, target, {"triton": "3.6.0"}, "2026-01-01")
    path = write(tmp_path, {("two", "64"): second}, target, {"triton": "3.7.1"}, "2026-01-02")
    assert path == tmp_path / "nvidia_fake.json"
    monkeypatch.setattr(tune, "TABLES", tmp_path)
    tune._kernels.cache_clear()
    assert json.loads(path.read_text())["target"] == "sm_90"
    assert configure("one", (128,), rule, target) == first.config
    assert configure("two", (64,), rule, target) == second.config
    kept, anew = (row for rows in json.loads(path.read_text())["kernels"].values() for row in rows.values())
    assert (kept["date"], kept["versions"]) == ("2026-01-01", {"triton": "3.6.0"})  # of when it was measured
    assert (anew["date"], anew["versions"]) == ("2026-01-02", {"triton": "3.7.1"})
    assert tune.measurement_dates(json.loads(path.read_text())) == "2026-01-01 to 2026-01-02"
    tune._kernels.cache_clear()
