# Two commands do all the set-up on a machine with Python 3.11 or newer:
#   make reproduce   the main job, on the embedded digits, in under two minutes after installing
#   make test        the tests
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: reproduce test check bench bench-peers clean

reproduce: $(VENV)/.installed
	$(BIN)/python -m validation run quick

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto $(ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m pytest benchmarks -o addopts= -p no:cacheprovider --write

# Beside Flower's simulation and pfl, each in an environment of its own.
PEERS := build/peers
bench-peers: $(VENV)/.installed $(PEERS)/flower/.installed $(PEERS)/pfl/.installed
	$(BIN)/python -m benchmarks.peers --fedmask $(BIN)/python \
		--flower $(PEERS)/flower/bin/python --pfl $(PEERS)/pfl/bin/python

$(PEERS)/%/.installed:
	$(PYTHON) -m venv $(PEERS)/$*
	$(PEERS)/$*/bin/pip install $(if $(filter flower,$*),'flwr[simulation]',$*) torch torchvision
	touch $@

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fedmask needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -e '.[theory,report,test,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
