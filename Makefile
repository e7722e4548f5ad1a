# Everything works from a fresh clone: each target sets up what it needs, says so, and is quick the second time.
#
#   PYTHON      the interpreter to start from                      make test PYTHON=python3.12
#   TORCH_SPEC  the torch to install in place of the tested one    make serve TORCH_SPEC=torch==2.12.0
#   PIP_ARGS    more options for pip, such as another index        make serve PIP_ARGS="--index-url …"
#   ARGS        options of what is run                             make serve ARGS="--max-num-seqs 16"

PYTHON ?= python3
TORCH_SPEC ?= $(shell grep '^torch==' constraints.txt)
PIP_ARGS ?=
ARGS ?=

BIN := .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt $(PIP_ARGS)
PROTOS := $(shell find protos -name '*.proto')
SAY := @printf '==> %s\n'

.DEFAULT_GOAL := help
.PHONY: help serve test check format proto pin model compose clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: .venv/.installed model ## Run the service on this machine, until Ctrl-C
	@exec $(BIN)/everystop serve $(ARGS)

test: .venv/.installed-dev model ## Run all tests
	$(SAY) "Running the tests"
	@$(BIN)/python -m pytest -q --durations=10 $(ARGS)

check: .venv/.installed-dev .venv-proto/.installed ## Style, types, import contracts, protocols
	$(SAY) "Style"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(SAY) "Types"
	@$(BIN)/mypy
	$(SAY) "Import contracts"
	@$(BIN)/lint-imports --no-logo
	$(SAY) "Protocols"
	@BIN=$(BIN) scripts/check_protos.sh

format: .venv/.installed-dev ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

proto: .venv-proto/.installed ## Generate the gRPC code from protos/
	$(SAY) "Generating from $(PROTOS)"
	@scripts/generate_stubs.sh .

pin: .venv/.installed-dev ## Write the versions that .venv has into constraints.txt
	@{ grep '^#' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable --exclude triton | sed 's/+.*//'; } > .venv/pinned
	@mv .venv/pinned constraints.txt

model: .venv/.installed ## Fetch the default model
	$(SAY) "Looking for the default model (the first time fetches 93 MB and converts them)"
	@$(BIN)/python -m executor_svc.model.source

compose: ## Run the service in containers, until Ctrl-C
	@docker-compose up --build

clean: ## Remove what the other targets made; the model stays in its cache
	rm -rf .venv .venv-proto build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/constraints.txt: constraints.txt
	$(SAY) "Creating the virtual environment .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@{ grep -v '^torch==' constraints.txt; echo '$(TORCH_SPEC)'; } > $@

.venv/.installed: pyproject.toml .venv/constraints.txt
	$(SAY) "Installing the services (the first time fetches $(TORCH_SPEC), which takes minutes)"
	@$(PIP_INSTALL) -e '.[all]'
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(SAY) "Installing the tools for development"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

# The generator is the oldest of the range that the project depends on: its code refuses older runtimes, not newer ones.
.venv-proto/.installed: Makefile
	$(SAY) "Installing the protobuf generator into .venv-proto"
	@test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	@.venv-proto/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
		grpcio-tools==1.76.0 mypy-protobuf==3.7.0 'setuptools<81'
	@touch $@
