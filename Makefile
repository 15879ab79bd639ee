# Two commands do it all on a fresh machine: `make demo` and `make test`.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := .oldest
CLUSTER := .cluster

# The first Python that is new enough; `make PYTHON=/path/to/python3.12 demo` chooses another.
PYTHON ?= $(shell for python in python3.12 python3.11 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

GPU_WORKERS ?= 4  # of test-gpu, each with less than 5 GB of the device
REPORT := -rs --durations=25  # what was skipped, and why; which tests took longest

.PHONY: help demo test lint harness system test-gpu test-clients test-cluster test-wheel test-oldest soak chaos attack bench tables browser valkey cross venv lock wheel clean

help:
	@echo "make demo      set up, then see it work on the default model"
	@echo "make test      set up, then lint, types, layers and tests"
	@echo "make lint      set up, then lint, types and layers only"
	@echo "make test-gpu  the tests that need a CUDA device; the outcome goes to benchmarks/results/test-gpu.json"
	@echo "make test-clients  openai, lm_eval, guidellm, vllm bench and aiperf against the server (installs 6 GB)"
	@echo "make test-cluster  two replicas on Ray: loaded, killed, scaled to three and back; Ray Serve (installs 0.4 GB)"
	@echo "make test-wheel  build the wheel, install it into an empty environment without a compiler, and run it"
	@echo "make test-oldest  the tests with the oldest torch and other libraries that pyproject.toml allows (installs 5 GB)"
	@echo "make soak      10,000 random requests at once against the server"
	@echo "make chaos     half an hour of faults under load, against known answers"
	@echo "make attack    what would stall or take over the server, tried, with /health watched meanwhile"
	@echo "make bench     the tables of docs/benchmarks.md, measured here and written"
	@echo "make tables    the numbers in README and docs, written anew from benchmarks/results"
	@echo "make venv      set up only"
	@echo "make lock      renew requirements.lock: the newest libraries that pyproject.toml allows"
	@echo "make wheel     dist/*.whl, with the native kernels compiled"
	@echo "make clean     remove the virtual environments and caches"

demo: venv
	$(BIN)/spill demo

# What takes a core and what waits for a network are done side by side.
test:
	@$(MAKE) --no-print-directory -j 2 venv system
	@$(MAKE) --no-print-directory -j 2 lint harness
	$(BIN)/pytest $(REPORT) -n auto --dist loadfile -m "not gpu and not clients and not cluster and not wheel and not alone"
	$(BIN)/pytest $(REPORT) -m "alone and not gpu and not clients"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# For the tests of the evaluation harness; without it they are skipped, saying so.
harness: venv
	-$(BIN)/python tests/clients/install.py lm_eval

test-gpu: venv
	$(BIN)/pytest $(REPORT) -n $(GPU_WORKERS) -m gpu --results-to benchmarks/results/test-gpu.json

test-clients: venv
	$(BIN)/python tests/clients/install.py
	SPILLOVER_LLAMACPP_PYTHON=$(CURDIR)/.clients/xllamacpp/bin/python \
	SPILLOVER_VLLM_PYTHON=$(CURDIR)/.clients/vllm/bin/python \
		$(BIN)/pytest -v -rs tests/clients tests/server/test_openai_client.py tests/lab/engines/test_engines_real.py

# Ray in an environment of its own that lies over the usual one: what `make test` runs with stays as it is.
test-cluster: venv
	test -x $(CLUSTER)/bin/python || $(BIN)/python -m venv $(CLUSTER)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$($(CLUSTER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(CLUSTER)/bin/python -m pip install --quiet -c requirements.lock \
		"$$(sed -nE 's/^ray = \["(.*)"\]$$/\1/p' pyproject.toml)"
	$(CLUSTER)/bin/python -m pytest -v -rs -m cluster tests/cluster

test-wheel: wheel
	$(BIN)/pytest -v -m wheel tests/test_wheel.py

# Kernels and engine are what depends on torch; lab, server and models on the rest.
test-oldest:
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	sed -n '/^dependencies/,/^]/p; /^lab/,/^]/p; /^cuda/p' pyproject.toml \
		| sed -nE 's/^[^"]*"([a-z0-9-]+)[^">]*>=([0-9.]+).*/\1==\2/p' > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet -c $(OLDEST)/constraints.txt -e '.[dev]'
	$(OLDEST)/bin/pytest -n auto --dist loadfile -m "not gpu and not alone" tests/kernels tests/engine tests/models tests/server tests/lab

soak: venv
	$(BIN)/python benchmarks/soak.py --requests 10000 --load-format null
	$(BIN)/python benchmarks/soak.py --requests 1000

chaos: venv valkey
	$(BIN)/python benchmarks/chaos.py --minutes 30 --clients 24 --pause 6 --requests-at-least 5000 --output-json benchmarks/results/chaos.json

attack: venv
	$(BIN)/python benchmarks/attack.py --output-json benchmarks/results/attack.json

bench: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" bash benchmarks/cpu.sh
	$(BIN)/python benchmarks/doc_numbers.py --write

tables: venv
	$(BIN)/python benchmarks/doc_numbers.py --write

# Packages of the system that some tests need, one after another: apt-get runs once at a time.
system:
	@$(MAKE) --no-print-directory browser
	@$(MAKE) --no-print-directory valkey
	@$(MAKE) --no-print-directory cross

# For the tests of the server's page; without it they are skipped, saying so.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { test "$$(id -u)" = 0 \
		&& command -v apt-get >/dev/null && apt-get update -qq \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
		|| echo "no Chromium: the tests of the server's page will be skipped"

# For the tests of the remote KV tier; without it they are skipped, saying so.
valkey:
	@command -v valkey-server >/dev/null || command -v redis-server >/dev/null || { test "$$(id -u)" = 0 \
		&& command -v apt-get >/dev/null && apt-get update -qq \
		&& { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends valkey-server >/dev/null 2>&1 \
		|| DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server >/dev/null; }; } \
		|| echo "no Valkey or Redis server: the tests of the remote KV tier will be skipped"

# For the tests of the ARM kernels on x86_64; without it they are skipped, saying so. ARM machines run them as they are.
cross:
	@test "$$(uname -m)" != x86_64 || { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64-static; } >/dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
		&& DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu \
		qemu-user-static >/dev/null 2>&1; } || echo "no cross compiler and emulator: the tests of the ARM kernels will be skipped"

venv: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and none was found; install one or" \
		"run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -c requirements.lock -e '.[dev]'
	@touch $(STAMP)

# Versions without hashes, so that one file serves every platform and Python. A CPU build of torch is the same version.
lock:
	rm -rf .lock && $(PYTHON) -m venv .lock
	.lock/bin/pip install --quiet -e '.[dev]'
	.lock/bin/pip freeze --exclude-editable | sed 's/+cpu$$//' > requirements.lock
	rm -rf .lock

wheel: venv
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(OLDEST) $(CLUSTER) .lock .clients build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
