# Each command makes its own environment first; only Python 3.11 or newer is needed. Another one: make run PYTHON=python3.12
PYTHON ?= python3
OUT ?= out

help:
	@echo "make run     accelerate the embedded digits model, prove it equal, write $(OUT)/report.html"
	@echo "make test    the tests (make slow: those that take longest)"
	@echo "make kernels compile every GPU kernel for every target, and compare with docs/kernels.md"
	@echo "make tritons the same by the oldest and the newest Triton, where a kernel has changed"
	@echo "make check   lint, format, types and the laws of the house"
	@echo "make format  put the source into the house's format"

environment:
	@.ci/environment $(PYTHON)

run: environment
	@.venv/bin/foci accelerate digits-dit --out $(OUT)

# Kernels run in Triton's interpreter, which is on or off for a whole process: one beside the others, told at the end.
KERNELS = tests/tiles $(wildcard tests/ops/test_kernels_*.py tests/ops/*/test_kernels_*.py)
OTHERS = --ignore=tests/tiles --ignore-glob='*/test_kernels_*'

test: environment
	@said=$$(mktemp); \
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 .venv/bin/python -m pytest -q $(KERNELS) >$$said 2>&1 & beside=$$!; \
	trap 'kill $$beside 2>/dev/null; rm -f $$said' EXIT; trap 'exit 130' INT TERM; \
	.venv/bin/python -m pytest -q -m "not slow" $(OTHERS); code=$$?; \
	wait $$beside || code=1; cat $$said; exit $$code

slow: environment
	@.venv/bin/python -m pytest -q -m slow --timeout 900 $(OTHERS)

kernels: environment
	@.venv/bin/python benchmarks/kernels.py --check

tritons: environment
	@.venv/bin/python benchmarks/kernels.py --triton 3.6.0 newest --check

check: environment
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet .
	@.venv/bin/mypy
	@.venv/bin/python -m pytest -q tests/laws

format: environment
	@.venv/bin/ruff check --fix-only --quiet .
	@.venv/bin/ruff format --quiet .

.PHONY: help environment run test slow kernels tritons check format
