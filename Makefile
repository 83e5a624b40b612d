# make demo   a five-role team learns on this machine's CPU, and shows that it did
# make test   everything that needs neither network nor GPU
#
# Both make .venv first. Another torch: make demo TORCH=torch

PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
EXTRAS := train,dense,serve,mcp,gguf,plot,games,dev

.PHONY: demo test check docs site wheel clean

demo: .venv/ready
	$(BIN)/python -m unitymas.benchmarks.demo

test: .venv/ready check
	$(BIN)/python -m pytest

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/python -m unitymas.benchmarks.pages.environment_pages docs

site: .venv/ready
	$(BIN)/mkdocs build -q --strict

wheel: .venv/ready
	rm -rf build dist
	$(BIN)/pip wheel -q --no-deps -w dist .
	$(BIN)/python tests/wheel.py dist

# torch goes first: what depends on it must not choose another build
.venv/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q -e ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
