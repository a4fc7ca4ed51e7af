# The menu. `make demo` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
BIN    := .venv/bin
PYTEST ?= $(BIN)/pytest
PROTO  := .venv-proto/bin
MODEL  ?= smollm2-135m-instruct
MINUTES   ?= 20
CONNECTOR ?= shm
SEED      ?= 1
REGISTRY  ?= embedded

unexport PYTHONDONTWRITEBYTECODE  # some images set it; tests start hundreds of processes, which would each compile all modules

.DEFAULT_GOAL := help
.PHONY: help demo test test-compose soak check coverage up bench bench-peers gpu model docs proto proto-check env clean

help:            ## show this menu
	@grep -hE '^[a-z-]+: .*##|^[a-z-]+:  +##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: env        ## set up, fetch a real model, serve it from two pools, ask it questions, show the times
	$(BIN)/diptych demo --model $(MODEL)

test: env        ## pass the tests, three files at a time: one often waits
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder

test-compose: env  ## compose.yaml on a real Docker engine: up, scaled, broken, down; COMPOSE_SANDBOX=FILE brings an engine up (docs/compose.md)
	$(BIN)/python -m tests.compose $(if $(COMPOSE_SANDBOX),--sandbox $(COMPOSE_SANDBOX))

soak: env        ## MINUTES=20 (REGISTRY=redis: two routers): a real cluster under load while workers are killed and stopped and clients leave
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED) --connector $(CONNECTOR) --registry $(REGISTRY)

check: env proto-check  ## format, lint, types, import floors, architecture, generated code, coverage of the core
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -q tests/architecture
	$(MAKE) --no-print-directory coverage

CORE := --cov=engine.kv --cov=engine.scheduling --cov=kv_transfer
coverage: env    ## every branch of the KV books, the scheduler and the hand-off is tested
	$(PYTEST) -q $(CORE) --cov-branch --cov-fail-under=100 --cov-report=term-missing:skip-covered \
	  tests/unit/engine tests/unit/kv_transfer tests/contract/test_connector.py tests/contract/test_nixl.py tests/property/test_block_pool.py \
	  tests/property/test_prefix_cache.py tests/property/test_scheduler.py tests/property/test_engine.py tests/property/test_handoff.py

up: env          ## a local cluster in the foreground, until Ctrl-C
	$(BIN)/diptych up --model $(MODEL)

bench: env       ## measure, and write bench/results/
	$(BIN)/python -m bench all

bench-peers: env .venv-peers/ready .venv-vllm/ready  ## our engine beside OpenVINO GenAI, vLLM, llama.cpp, transformers; the first time makes their environments
	$(BIN)/python -m bench peers

.venv-peers/ready: bench/peers/requirements-peers.txt
	@echo "== making .venv-peers (llama.cpp is built here: a quarter of an hour)"
	$(PYTHON) -m venv .venv-peers
	CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=ON" .venv-peers/bin/pip install --disable-pip-version-check -q -r $<
	@touch $@

.venv-vllm/ready: bench/peers/requirements-vllm.txt
	@echo "== making .venv-vllm (where that is not possible, vLLM is not measured)"
	-$(PYTHON) -m venv .venv-vllm && .venv-vllm/bin/pip install --disable-pip-version-check -q -r $< && .venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@mkdir -p .venv-vllm && touch $@

gpu: env         ## on a machine with a GPU: check its kernels and time them, eight minutes at most (ARGS=--dry-run: without one)
	PYTHON=$(BIN)/python bench/gpu.sh $(ARGS)

model: env       ## fetch the real model into the cache
	$(BIN)/diptych model fetch $(MODEL)

docs: env        ## write docs/metrics.md, docs/flags.md and the table of kernels/README.md from the code
	$(BIN)/python tools/gen_metrics.py
	$(BIN)/python tools/gen_flags.py
	$(BIN)/python tools/gen_kernels.py

proto: .venv-proto/ready  ## generate contracts/pb from proto/
	$(PROTO)/python tools/gen_proto.py

proto-check: .venv-proto/ready
	$(PROTO)/python tools/gen_proto.py --check

env: .venv/ready  ## the environment, pinned by constraints.txt

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Diptych needs Python 3.11 or newer, $(PYTHON) is {v.major}.{v.minor}; say make PYTHON=python3.12 …")'
	@echo "== making .venv (a few minutes on a slow network: torch is large)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt --no-deps trl  # only its files are read: chat templates
	-$(BIN)/python -m kernels.cpu build
	@touch $@

.venv-proto/ready: tools/requirements-proto.txt
	$(PYTHON) -m venv .venv-proto
	$(PROTO)/pip install --disable-pip-version-check -q -r tools/requirements-proto.txt
	@touch $@

clean:           ## remove environments and caches
	rm -rf .venv .venv-proto .venv-peers .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
