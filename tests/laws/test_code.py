"""How a file is written: lengths, first lines, signatures, no global switch, nothing swallowed, nothing left to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.laws._tree import Function, House, Laws, Module, dotted

LAWS = Laws()
TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml", ".json", ".j2", ".html", ".css", ".js", ""}
# Where a signature is not ours to choose, with the reason.
KEYWORDS_BY_CONTRACT = {
    "src/foci/__init__.py:explain": "the keywords of the operator asked about, which refuses unknown ones",
    "src/foci/core/tune.py:launch": "the constants of any kernel, each by its name; the kernel refuses unknown ones",
    "src/foci/compat/xformers/attn_bias.py:from_seqlens": "it refuses whatever it is given",
    "src/foci/integrations/transformers.py:attend": "transformers passes each model's own keywords",
    "src/foci/integrations/transformers_masks.py:make_mask": "transformers passes each model's own keywords",
    "src/foci/integrations/transformers_masks.py:make_boolean_mask": "transformers passes each model's own keywords",
}


def jitted(node: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def length(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def lines(count: int) -> str:
    return "\n".join(["    pass"] * count)


@LAWS.law(
    {"src/foci/core/a.py": "\n" * 501},
    {"src/foci/core/a.py": "def f():\n" + lines(60)},
    {"src/foci/core/a.py": "class A:\n    def f(self):\n        " + "\n        ".join(["pass"] * 60)},
    {"src/foci/tiles/a.py": "def f():\n" + lines(25)},
    {"src/foci/ops/softmax/kernels_triton.py": "@triton.jit\ndef f():\n" + lines(150)},
    {"src/foci/ops/softmax/kernels_triton.py": "def f():\n" + lines(60)},
)
def lengths(house: House) -> Iterator[str]:
    """File <= 500 lines, function <= 60, kernel (a jitted function) <= 150, tile <= 25."""
    for module in house.source:
        if len(module.text.splitlines()) > 500:
            yield f"{module.path}: {len(module.text.splitlines())} lines, at most 500"
        for node in module.functions:
            most = 25 if "/tiles/" in module.path else 150 if jitted(node) else 60
            if length(node) > most:
                yield f"{module.path}:{node.lineno}: {node.name} has {length(node)} lines, at most {most}"


@LAWS.law({"src/foci/ops/softmax/triton.py": ""}, {"examples/triton.py": ""})
def no_file_shadows_triton(house: House) -> Iterator[str]:
    yield from (f"{module.path}: shadows the package" for module in house.python if module.file.name == "triton.py")


@LAWS.law(
    {"src/foci/core/a.py": "from __future__ import annotations\n"},
    {"tests/core/test_a.py": '"""\nLate."""\nfrom __future__ import annotations'},
    {"examples/a.py": f'"""{"x" * 120}"""\nfrom __future__ import annotations'},
    {"src/foci/core/a.py": '"""What for."""\nimport torch'},
)
def first_lines(house: House) -> Iterator[str]:
    """A file opens with one line that says what it is for, and then with the annotations' future."""
    for module in house.python:
        first = module.text.partition("\n")[0]
        if not re.match(r'r?"""\S', first) or not ast.get_docstring(module.tree) or len(first) > 120:
            yield f"{module.path}:1: must open with a docstring whose first line says what the file is for"
        code = [node for node in module.tree.body if not isinstance(node, ast.Expr)]
        if code and not (isinstance(code[0], ast.ImportFrom) and code[0].module == "__future__"):
            yield f"{module.path}: `from __future__ import annotations` must come first"


def public(module: Module) -> Iterator[Function]:
    """Functions and methods a caller may name; not those nested in functions, nor what runs on a GPU."""
    classes = [node for node in module.tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for body in (module.tree.body, *(node.body for node in classes)):
        found = (node for node in body if isinstance(node, Function) and not node.name.startswith("_"))
        yield from (node for node in found if not jitted(node))


@LAWS.law(
    {"src/foci/core/a.py": "def f(a, b, c, d, e, f, g, h, i, j, k): ..."},
    {"src/foci/ops/softmax/kernels_triton.py": "def f(a, b, c, d, e, f, g, h, i, j, k): ..."},
    {"src/foci/core/a.py": "def f(a, *, b, c, d, e, f, g, h, i, j, k): ..."},
    {"src/foci/nn/a.py": "class A:\n    def forward(self, x, **kwargs): ..."},
    {"src/foci/compat/a.py": "def f(q, **kwargs): ..."},
)
def public_parameters(house: House) -> Iterator[str]:
    """At most ten, none of them **kwargs. compat has its peers' parameters, however many, but each by its name.

    `backend` does not count: it says who computes, not what.
    """
    for module in house.source:
        theirs = module.path.startswith("src/foci/compat/")
        for node in public(module):
            arguments = node.args
            names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            names = [name for name in names if name not in {"self", "cls", "backend"}]
            if len(names) > 10 and not theirs:
                yield f"{module.path}:{node.lineno}: {node.name} has {len(names)} parameters, at most 10"
            if arguments.kwarg and f"{module.path}:{node.name}" not in KEYWORDS_BY_CONTRACT:
                yield f"{module.path}:{node.lineno}: {node.name} takes **{arguments.kwarg.arg}"


@LAWS.law(
    {"src/foci/ops/softmax/api.py": "def attention(q: Tensor, scale: float | None = None) -> Tensor: ..."},
    {"src/foci/ops/softmax/api.py": "def attention(q: Tensor, scale: float) -> Tensor: ..."},
    {"src/foci/ops/softmax/api.py": "def attention(q: Tensor, *, lse: bool = False) -> Tensor | tuple: ..."},
    {"src/foci/ops/softmax/api.py": "def attention(q: Tensor, *, lse: bool = False): ..."},
)
def operators_take_keywords_after_their_tensors(house: House) -> Iterator[str]:
    """In an operator's api.py: options are keyword-only, and no boolean changes what comes back."""
    scalars = re.compile(r"\b(bool|int|float|str)\b")
    for module in house.source:
        if not re.fullmatch(r"src/foci/ops/\w+/api\.py", module.path):
            continue
        for node in public(module):
            for argument in node.args.args[len(node.args.args) - len(node.args.defaults) :]:
                yield f"{module.path}:{node.lineno}: {node.name}: {argument.arg} has a default: keyword-only"
            for argument in node.args.args:
                if argument.annotation and scalars.search(ast.unparse(argument.annotation)):
                    yield f"{module.path}:{node.lineno}: {node.name}: {argument.arg} is no tensor: keyword-only"
            flags = [a.arg for a in node.args.kwonlyargs if a.annotation and ast.unparse(a.annotation) == "bool"]
            if flags and (node.returns is None or isinstance(node.returns, ast.BinOp)):
                yield f"{module.path}:{node.lineno}: {node.name}: {flags[0]} must not change what the function returns"


SWITCHES = re.compile(
    r"os\.(environ|getenv|putenv)\b|torch\.(set_|use_deterministic|manual_seed|seed$|backends\..*=)|(random|np|numpy)\.(random\.)?seed$"
)


# Files that may, with the reason; each puts back exactly what it found, or owns the process.
PUT_BACK = {
    "src/foci/check/memory.py": "torch's own poison for unwritten memory is such a switch; put back afterwards",
    "src/foci/check/isolate.py": "sets the threads of the child process it started",
    "src/foci/core/assembler.py": "Triton's choice of an assembler has one place, and a user's is in the environment",
    "src/foci/cli_tune_ahead.py": "sets the threads of the child processes it started",
    "src/foci/core/world.py": "sets threads and seed of the ranks, processes that it started",
    "src/foci/ops/native.py": "what builds it counts GPUs: this leaves them to forks; put back. Torch's folder is read",
}


@LAWS.law(
    {"src/foci/core/a.py": "import os\nFAST = os.environ.get('FOCI_FAST')"},
    {"src/foci/core/a.py": "def f():\n    torch.set_num_threads(1)"},
    {"src/foci/core/a.py": "def f():\n    torch.backends.cuda.matmul.allow_tf32 = True"},
    {"src/foci/core/a.py": "def f():\n    global STATE\n    STATE = 1"},
    {"src/foci/core/a.py": "from os import getenv"},
)
def no_global_switch(house: House) -> Iterator[str]:
    """Neither read nor set: no environment variable, no `global`, no setting of torch or of a shared generator."""
    for module in house.source:
        if module.path in PUT_BACK:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Global):
                yield f"{module.path}:{node.lineno}: global {', '.join(node.names)}"
            names = [dotted(node)] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            if isinstance(node, ast.Assign):
                names += [f"{dotted(target)}=" for target in node.targets]
            for name in filter(SWITCHES.search, names):
                yield f"{module.path}:{node.lineno}: {name.rstrip('=')} is a switch of the whole process"


@LAWS.law({"src/foci/ops/a.py": "x = torch.empty(3, device=v.device)"}, {"src/foci/core/a.py": "torch.zeros(2, 3)"})
def memory_names_its_dtype(house: House) -> Iterator[str]:
    """Kernels and C++ write what they were told to: a program's default dtype may be another."""
    for module in house.source:
        for node in ast.walk(module.tree) if re.match("src/foci/(core|ops)/", module.path) else ():
            made = isinstance(node, ast.Call) and dotted(node.func) in {"torch.empty", "torch.zeros", "torch.ones"}
            if made and not {"dtype", None} & {keyword.arg for keyword in node.keywords}:
                yield f"{module.path}:{node.lineno}: {dotted(node.func)} in the program's default dtype"


@LAWS.law({"src/foci/ops/a.py": "torch.tensor([1])"}, {"src/foci/parallel/a.py": "torch.arange(3, dtype=torch.int64)"})
def memory_names_its_device(house: House) -> Iterator[str]:
    """A program's default device may be another than the tensors'; parameters follow it, and whole models do."""
    made = {"empty", "zeros", "ones", "full", "eye", "tensor", "as_tensor", "arange", "linspace"}
    made |= {"rand", "randn", "randint", "randperm"}
    for module in house.source:
        for node in ast.walk(module.tree) if not re.match("src/foci/(nn|accelerate)/", module.path) else ():
            found = isinstance(node, ast.Call) and dotted(node.func) in {f"torch.{name}" for name in made}
            if found and not {"device", None} & {keyword.arg for keyword in node.keywords}:
                yield f"{module.path}:{node.lineno}: {dotted(node.func)} on the program's default device"


@LAWS.law(
    {"src/foci/core/a.py": "try:\n    f()\nexcept ValueError:\n    pass"},
    {"src/foci/core/a.py": "try:\n    f()\nexcept ValueError: ..."},
    {"src/foci/core/a.py": "try:\n    f()\nexcept:\n    g()"},
    {"src/foci/core/a.py": "with contextlib.suppress(Exception):\n    f()"},
)
def nothing_is_swallowed(house: House) -> Iterator[str]:
    for module in house.source:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                empty = all(isinstance(part, ast.Pass) or ast.unparse(part) == "..." for part in node.body)
                if empty or node.type is None:
                    yield f"{module.path}:{node.lineno}: swallows an exception"
            if isinstance(node, ast.Call) and dotted(node.func).endswith("suppress"):
                yield f"{module.path}:{node.lineno}: swallows an exception"


@LAWS.law(
    {"docs/a.md": "TO" + "DO: write"},
    {"src/foci/core/a.py": "# FIX" + "ME"},
    {"README.md": "see /ho" + "me/someone/notes"},
    {"src/foci/core/a.py": "PATH = '/ro" + "ot/cache'"},
)
def nothing_left_to_do_nor_of_one_machine(house: House) -> Iterator[str]:
    """No note to self, and no path that exists on one machine only."""
    wanted = re.compile(r"\b(TO[D]O|FIX[M]E|X{3})\b|(?<![\w.~/-])/(home|root|work|Users|mnt)/\w+")
    for path in house.files:
        if path.suffix in TEXT and path.stat().st_size < 400_000:
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if found := wanted.search(line):
                    yield f"{path.relative_to(house.root)}:{number}: {found[0]}"


@LAWS.law({"tests/core/test_a.py": "TOLERANCE = 1 if os.environ.get('CI') else 0"})
def no_test_knows_where_it_runs(house: House) -> Iterator[str]:
    """No tolerance is loosened under CI."""
    for module in house.python:
        if re.match("tests/(?!laws/)", module.path):
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Constant) and node.value in ("CI", "GITHUB_ACTIONS"):
                    yield f"{module.path}:{node.lineno}: a test must not ask for {node.value}"


test_house_obeys, test_law_can_fail = LAWS.tests()
