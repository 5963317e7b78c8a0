# Everything a developer does. `make demo` and `make test` set up what they need; see README.md.
UV ?= uv
RUN = $(UV) run --frozen --quiet

# Without compiled files every engine takes half a minute to start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test e2e lint bench

setup:
	@bash scripts/setup.sh

demo: setup
	@$(RUN) python examples/demo.py

test: setup lint
	@$(RUN) pytest

e2e: setup
	@$(RUN) pytest -m e2e

lint: setup
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) lint-imports

bench: setup
	@$(RUN) python benchmarks/loopback.py
