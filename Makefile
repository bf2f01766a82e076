# What a newcomer needs is `make demo` and `make test`. Both create .venv with the
# pinned requirements and this package. `make help` lists the rest.

# The Python 3.11 that creates .venv. Empty: look for one.
PYTHON ?=
# uv, which `make requirements` needs and nothing else does.
UV ?= uv
# Further arguments of the program or of pytest: `make demo ARGS=--epsilon=1`.
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
READY := $(VENV)/.package

# TensorFlow 2.14 reports as errors that it found no GPU libraries. What goes wrong
# in a computation is raised as an exception all the same.
export TF_CPP_MIN_LOG_LEVEL ?= 3

.DELETE_ON_ERROR:
.PHONY: help demo test test-all fuzz bench smoke peers lint format requirements clean distclean

help:
	@echo 'make demo          train privately on real digits: two minutes, output in runs/'
	@echo 'make test          lint, then the fast tests and the doctests'
	@echo 'make test-all      lint, then every test'
	@echo 'make fuzz          random models against one backward pass per example'
	@echo 'make smoke         a minute of timing; fails if a step became very slow'
	@echo 'make bench         time private steps against plain steps and other libraries'
	@echo 'make peers         install the other libraries that make bench compares with'
	@echo 'make lint          ruff check, ruff format --check and mypy'
	@echo 'make format        let ruff rewrite what make lint complains about'
	@echo 'make requirements  resolve requirements.in to requirements.txt (needs uv)'
	@echo 'make clean         delete caches and build products'
	@echo 'make distclean     delete .venv as well'

demo: $(READY)
	@$(PY) -m keras_examples.digits $(ARGS)

# TensorFlow never frees what XLA compiled, and this suite compiles hundreds of steps.
# So the tests run in three parts, each in processes of its own; the last part is
# whatever the others leave. (What is traced only, `tests/conftest.py` frees.)
TEST_PARTS := 'tests/keras tests/clipping tests/testing' 'tests/gradients' \
    'tests tfdpclip driver_kit --ignore=tests/keras --ignore=tests/clipping \
    --ignore=tests/testing --ignore=tests/gradients'

define run_tests
failed=; \
for part in $(if $(ARGS),'',$(TEST_PARTS)); do \
  $(PY) -m pytest -n 2 $(1) $$part $(ARGS) || failed=yes; \
done; \
[ -z "$$failed" ]
endef

test: lint
	@$(call run_tests,-m 'not slow')

test-all: lint
	@$(call run_tests,)

# `make fuzz ARGS="--models=1000 --seed=7"`; the seed is today's date unless given.
fuzz: $(READY)
	@$(PY) -m tests.fuzz $(ARGS)

bench: $(READY)
	@$(PY) -m benchmarks.step_time $(ARGS)

smoke: $(READY)
	@$(PY) -m benchmarks.smoke $(ARGS)

# Each has an environment of its own, in runs/peers.
peers: $(READY)
	@$(PY) -m benchmarks.peers.environments opacus jax

lint: $(READY)
	@$(VENV)/bin/ruff check --output-format concise .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

format: $(READY)
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

# Finds Python 3.11 or says what to do; creates .venv unless there is a good one.
# A .venv left half done, by an interrupt or by a missing ensurepip, has no pip.
define create_venv
if ! $(PY) -c 'import pip, sys; sys.exit(sys.version_info[:2] != (3, 11))' \
    >/dev/null 2>&1; then \
  found=; tried=; \
  for python in $(if $(PYTHON),'$(PYTHON)',python3.11 python3 python); do \
    if "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
        >/dev/null 2>&1; then \
      found=$$python; break; \
    fi; \
    version=$$("$$python" --version 2>&1) || version='not found'; \
    tried="$$tried    $$python: $$version\n"; \
  done; \
  if [ -z "$$found" ]; then \
    echo 'This project needs Python 3.11, and there is none here. Looked for:'; \
    printf "$$tried"; \
    echo 'Install Python 3.11 (Debian 12: apt-get install python3.11-venv), or say'; \
    echo 'where it is:'; \
    echo '    make PYTHON=/path/to/python3.11 $(or $(MAKECMDGOALS),test)'; \
    exit 1; \
  fi; \
  if ! "$$found" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
    echo "$$found is Python 3.11 without the modules venv and ensurepip, which are"; \
    echo 'needed to create .venv. Install them (Debian, Ubuntu: apt-get install'; \
    echo 'python3.11-venv), or use another Python 3.11:'; \
    echo '    make PYTHON=/path/to/python3.11 $(or $(MAKECMDGOALS),test)'; \
    exit 1; \
  fi; \
  echo "Creating $(VENV) with $$found."; \
  "$$found" -m venv --clear $(VENV) || exit 1; \
fi
endef

# Some requirements have no wheel and are built here. Without build isolation, and
# with the pinned setuptools and wheel installed before them, nothing is fetched that
# is not pinned. Twice quiet: errors only.
$(VENV)/.requirements: requirements.txt
	@{ $(create_venv); } >&2
	@echo 'Installing requirements.txt into $(VENV): some 800 MB,'
	@echo '3 GB once unpacked; a few minutes.'
	@awk '/^(setuptools|wheel)==/ {wanted = 1} wanted; !/\\$$/ {wanted = 0}' \
	  requirements.txt >$(VENV)/build-requirements.txt
	@$(PIP) install -qq --no-deps --require-hashes \
	  -r $(VENV)/build-requirements.txt
	@$(PIP) install -qq --no-deps --require-hashes --no-build-isolation \
	  -r requirements.txt
	@touch $@

$(READY): $(VENV)/.requirements setup.py pyproject.toml
	@$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@

# Without the old file, so that every package moves to its newest version that fits.
requirements:
	@command -v $(UV) >/dev/null || { \
	  echo 'Needs uv, because pip cannot override a requirement of a dependency.'; \
	  echo 'Install it (pip install uv), or: make UV=/path/to/uv requirements'; \
	  exit 1; } >&2
	@$(UV) pip compile --quiet --upgrade --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_31 --override requirements.overrides \
	  --generate-hashes --no-emit-index-url --no-header --no-annotate \
	  --output-file requirements.txt requirements.in

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache bazel-*
	find . -name $(VENV) -prune -o -name __pycache__ -type d -prune \
	  -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
