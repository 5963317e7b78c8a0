# Everything a developer does. `make demo` and `make test` set up what they need; see README.md.
UV ?= uv
RUN = $(UV) run --frozen --quiet

# Without compiled files every engine takes half a minute to start.
unexport PYTHONDONTWRITEBYTECODE

# Tests on a real Kubernetes run where it can be built (Linux, root, Go).
.PHONY: setup cluster demo test e2e lint bench

setup:
	@bash scripts/setup.sh

demo: setup
	@$(RUN) python examples/demo.py

cluster: setup
	@$(RUN) python -m weightsync_devkit.cluster build --optional

test: setup lint cluster
	@$(RUN) pytest

e2e: setup cluster
	@$(RUN) pytest -m e2e

lint: setup
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) lint-imports

bench: setup
	@$(RUN) python benchmarks/loopback.py
