"""Our signatures are FLA's, read from its wheel: names, order, defaults; what is missing has a reason."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

from foci.compat import fla as ours

# Keywords that FLA reads from **kwargs and that are no parameters of ours: Python's TypeError names them.
LEFT_OUT = {
    "head_first": "removed: FLA raises for it too",
    "transpose_state_layout": "deprecated: it is state_v_first",
}
# Functions that FLA has dropped: only **kwargs is left of their signatures, and they raise.
DROPPED = {"fused_chunk_gla": "chunk_gla", "fused_chunk_delta_rule": "chunk_delta_rule"}
ALIASES = {"chunk_gdn": "chunk_gated_delta_rule", "fused_recurrent_gdn": "fused_recurrent_gated_delta_rule"}
FAMILIES = {
    *("linear_attn", "retention", "lightning_attn", "simple_gla", "gla", "hgrn", "gsa", "rwkv6", "rwkv7", "delta_rule"),
    *("gated_delta_rule", "kda", "gdn2", "comba", "gated_delta_product", "generalized_delta_rule"),
}


def keywords_read(definition: ast.FunctionDef) -> set[str]:
    """What a function takes out of its **kwargs: kwargs.get("a"), kwargs.pop("a"), "a" in kwargs."""
    found = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("kwargs.get", "kwargs.pop"):
            found.add(ast.literal_eval(node.args[0]))
        if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "kwargs":
            found.add(ast.literal_eval(node.left))
    return found


def theirs(definition: ast.FunctionDef) -> dict[str, Any]:
    """Positional parameters in order, and their defaults; a parameter without one is inspect.Parameter.empty."""
    names = [argument.arg for argument in definition.args.args]
    defaults = [ast.literal_eval(default) for default in definition.args.defaults]
    return dict(zip(names, [inspect.Parameter.empty] * (len(names) - len(defaults)) + defaults, strict=True))


@pytest.mark.parametrize("name", [name for name in ours.__all__ if name not in ALIASES])
def test_signature(fla: Any, name: str) -> None:
    source = DROPPED.get(name, name)
    definition = fla.definition(fla.public[source], source)
    expected = theirs(definition)
    parameters = inspect.signature(getattr(ours, name)).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    positional = [n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == list(expected)
    for parameter, default in expected.items():
        mine = parameters[parameter].default
        # A tensor that FLA requires may be optional with us; any default of FLA's is ours.
        assert mine is default or mine == default, f"{parameter}={mine}, theirs {default}"
    more = {n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    if name not in DROPPED:
        assert more == keywords_read(definition) - LEFT_OUT.keys()


def test_nothing_of_a_family_is_forgotten(fla: Any) -> None:
    public = {name for name, path in fla.public.items() if path.split("/")[0] in FAMILIES}
    assert len(public) > 35
    assert public - set(ours.__all__) == set()


@pytest.mark.parametrize("word", sorted(LEFT_OUT))
def test_what_is_left_out_is_refused(word: str) -> None:
    for name in ours.__all__:
        with pytest.raises(TypeError, match=word):
            getattr(ours, name)(**{word: True})


def test_short_names_are_aliases(fla: Any) -> None:
    for short, long in ALIASES.items():
        path = fla.public[long]
        assert f"{short} = {long}" in fla.text(path)
