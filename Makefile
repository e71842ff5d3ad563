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

test: environment
	@.ci/tests

slow: environment
	@.ci/tests slow

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
