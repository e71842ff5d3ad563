"""foci.integrations.reroute: copies of code that call elsewhere, and refusals where a copy would differ."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foci.integrations.reroute import CannotReroute, Rerouter

MODE = 3
scaled = F.scaled_dot_product_attention


def elsewhere(*args: Any, **kwargs: Any) -> str:
    return "elsewhere"


def through_alias(q: Any) -> Any:
    return F.scaled_dot_product_attention(q, q, q)


def through_the_whole_path(q: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)


def through_a_name(q: Any) -> Any:
    return scaled(q, q, q)


def through_a_helper(q: Any, *, twice: bool = True) -> Any:
    return [through_alias(q), through_a_name(q)] if twice else None


def through_a_lambda(q: Any) -> Any:
    return (lambda x: F.scaled_dot_product_attention(x, x, x))(q)


def mutual(q: Any, depth: int = 2) -> Any:
    return other(q, depth - 1) if depth else through_alias(q)


def other(q: Any, depth: int) -> Any:
    return mutual(q, depth)


def closed(q: Any) -> Any:
    return _closure(q)


def _make(attend: Any) -> Any:
    def inside(q: Any) -> Any:
        return attend(q, q, q)

    return inside


_closure = _make(F.scaled_dot_product_attention)


def decorated(q: Any) -> Any:
    return _decorated(q)


def _wrap(function: Any) -> Any:
    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outer


_decorated = _wrap(through_alias)


@torch.no_grad()
def without_gradient(q: Any) -> Any:
    return F.scaled_dot_product_attention(q, q, q)


def reads_a_flag(q: Any) -> Any:
    return F.scaled_dot_product_attention(q, q, q) * MODE


def sets_a_global(q: Any) -> Any:
    global MODE
    MODE = 4
    return F.scaled_dot_product_attention(q, q, q)


def unrelated(q: Any) -> Any:
    return F.softmax(q, -1) * MODE if hasattr(F, "scaled_dot_product_attention") else None


@pytest.fixture
def router() -> Rerouter:
    return Rerouter({F.scaled_dot_product_attention: elsewhere})


Q = torch.ones(1, 1, 2, 2)


@pytest.mark.parametrize(
    "function",
    [
        through_alias,
        through_the_whole_path,
        through_a_name,
        through_a_lambda,
        mutual,
        closed,
        _closure,
        decorated,
        _decorated,
        without_gradient,
    ],
)
def test_every_way_to_the_call_is_followed(router: Rerouter, function: Any) -> None:
    before = dict(function.__globals__)
    assert router.calls(router.reach(function)) == 1
    assert router.function(function)(Q) == "elsewhere"
    torch.testing.assert_close(function(Q), Q)
    assert all(function.__globals__[name] is value for name, value in before.items())
    assert F.scaled_dot_product_attention is scaled


def test_a_copy_keeps_what_the_function_was(router: Rerouter) -> None:
    copy = router.function(through_a_helper)
    assert copy(Q) == ["elsewhere", "elsewhere"] and copy(Q, twice=False) is None
    assert copy.__name__ == "through_a_helper" and copy.__module__ == through_a_helper.__module__
    assert router.calls(router.reach(through_a_helper)) == 2


def test_the_rest_of_a_module_is_seen_through(router: Rerouter) -> None:
    def mixed(q: Any) -> Any:
        return F.softmax(q, -1), F.scaled_dot_product_attention(q, q, q)

    probabilities, out = router.function(mixed)(Q)
    assert out == "elsewhere" and torch.equal(probabilities, F.softmax(Q, -1))


def test_code_without_the_call_is_left(router: Rerouter) -> None:
    assert router.reach(unrelated) == frozenset()


@pytest.mark.parametrize(
    "function, why",
    [
        (reads_a_flag, "reads the global MODE = 3; a copy would not notice it change"),
        (sets_a_global, "sets the global MODE"),
    ],
)
def test_what_a_copy_would_do_differently_is_refused(router: Rerouter, function: Any, why: str) -> None:
    with pytest.raises(CannotReroute, match=why):
        router.function(function)


def test_a_refusal_leaves_nothing_half_made(router: Rerouter) -> None:
    def caller(q: Any) -> Any:
        return through_alias(q), reads_a_flag(q)

    for _ in range(2):
        with pytest.raises(CannotReroute, match="reads the global MODE"):
            router.function(caller)


def test_a_closure_is_shared_with_the_original(router: Rerouter) -> None:
    count = 0

    def counting(q: Any) -> Any:
        nonlocal count
        count += 1
        return F.scaled_dot_product_attention(q, q, q)

    copy = router.function(counting)
    assert copy(Q) == "elsewhere" and count == 1
    counting(Q)
    assert count == 2


def test_code_with_very_many_names(router: Rerouter) -> None:
    names = [f"name_{i}" for i in range(400)]
    source = "def long(q):\n" + "".join(f"    {n} = len.{n} if q is None else 0\n" for n in names)
    scope: dict[str, Any] = {"F": F, "__name__": __name__}
    exec(source + "    return F.scaled_dot_product_attention(q, q, q)\n", scope)
    assert router.function(scope["long"])(Q) == "elsewhere"


class Base:
    def __call__(self, q: Any) -> Any:
        return ["base", self.attend(q)]

    @staticmethod
    def attend(q: Any) -> Any:
        return F.scaled_dot_product_attention(q, q, q)


class Calm(Base):
    def __call__(self, q: Any) -> Any:
        return ["calm", *super().__call__(q)]


class Again(Calm):
    @classmethod
    def make(cls, q: Any) -> Any:
        return F.scaled_dot_product_attention(q, q, q)

    def __call__(self, q: Any) -> Any:
        return ["again", F.scaled_dot_product_attention(q, q, q), *super().__call__(q)]


class Overriding(Base):
    def __call__(self, q: Any) -> Any:
        return ["mine", self.attend(q)]

    @staticmethod
    def attend(q: Any) -> Any:
        return "own arithmetic"


class Through(Base):
    def __call__(self, q: Any) -> Any:
        return ["through", F.scaled_dot_product_attention(q, q, q), *super().__call__(q)]

    @staticmethod
    def attend(q: Any) -> Any:
        return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize(
    "cls, calls, result",
    [
        (Base, 1, ["base", "elsewhere"]),
        (Calm, 1, ["calm", "base", "elsewhere"]),
        (Again, 3, ["again", "elsewhere", "calm", "base", "elsewhere"]),
        (Through, 2, ["through", "elsewhere", "base", "elsewhere"]),
    ],
)
def test_methods_their_parents_and_super(router: Rerouter, cls: type, calls: int, result: list[str]) -> None:
    before = {one: dict(vars(one)) for one in cls.__mro__[:-1]}
    made = router.subclass(cls, {"extra": 1})
    assert made is not None and made[1] == calls
    instance = made[0]()
    assert instance(Q) == result and isinstance(instance, cls) and instance.extra == 1
    assert type(instance).__name__ == cls.__name__ and type(instance).__module__ == cls.__module__
    assert all(dict(vars(one)) == attributes for one, attributes in before.items())
    assert isinstance(cls()(Q)[-1], torch.Tensor)


def test_a_method_nothing_leads_to_does_not_count(router: Rerouter) -> None:
    assert router.subclass(Overriding, {}) is None
