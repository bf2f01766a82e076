# What a newcomer needs is `make demo` and `make test`. Both create an environment with
# pinned requirements and this package. `make help` lists the rest.

# What to run on: pinned (TensorFlow 2.14.1 and TensorFlow Federated), keras3 (the newest
# TensorFlow) or tf_keras (the same, with Keras 2); docs/stacks.md has more. Empty:
# pinned, or keras3 where the Python that is there is for that alone.
STACK ?=
# The Python that creates the environment. Empty: look for one.
PYTHON ?=
# uv, which `make requirements` needs and nothing else does.
UV ?= uv
# Further arguments of the program or of pytest: `make demo ARGS=--epsilon=1`.
ARGS ?=

IS_3_11 := 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'
IS_3_10_TO_3_13 := 'import sys; \
    sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'
PYTHONS_3_11 := python3.11 python3 python
PYTHONS_3_10_TO_3_13 := python3.13 python3.12 python3.11 python3.10 python3 python

# No Python at all leaves it at pinned, which says what is missing.
define choose_stack
for python in $(if $(PYTHON),'$(PYTHON)',.venv/bin/python $(PYTHONS_3_11)); do \
  if "$$python" -c $(IS_3_11); then echo pinned; exit; fi; \
done 2>/dev/null; \
for python in $(if $(PYTHON),'$(PYTHON)',$(PYTHONS_3_10_TO_3_13)); do \
  if "$$python" -c $(IS_3_10_TO_3_13); then echo keras3; exit; fi; \
done 2>/dev/null; \
echo pinned
endef

ON := $(or $(STACK),$(shell $(choose_stack)))
ifeq ($(ON),pinned)
VENV := .venv
REQUIREMENTS := requirements.txt
NEEDED := Python 3.11
IS_NEEDED := $(IS_3_11)
PYTHONS := $(PYTHONS_3_11)
else ifneq ($(filter keras3 tf_keras,$(ON)),)
VENV := .venv-keras3
REQUIREMENTS := requirements-keras3.txt
NEEDED := Python 3.10, 3.11, 3.12 or 3.13
IS_NEEDED := $(IS_3_10_TO_3_13)
PYTHONS := $(PYTHONS_3_10_TO_3_13)
else
$(error STACK is pinned, keras3 or tf_keras, not $(ON))
endif
# What tensorflow.keras is, from TensorFlow 2.16 on.
export TF_USE_LEGACY_KERAS := $(if $(filter tf_keras,$(ON)),1,0)

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
READY := $(VENV)/.package

# TensorFlow 2.14 reports as errors that it found no GPU libraries. What goes wrong
# in a computation is raised as an exception all the same.
export TF_CPP_MIN_LOG_LEVEL ?= 3

.DELETE_ON_ERROR:
.PHONY: help demo docs dist test test-all test-part fuzz bench real smoke peers lint format requirements clean distclean

help:
	@echo 'make demo          train privately on real digits: two minutes, output in runs/'
	@echo 'make test          lint, then the fast tests and the doctests'
	@echo 'make test-all      lint, then every test'
	@echo 'make test-part     a part of the slow tests, as CI runs them'
	@echo 'make fuzz          random models against one backward pass per example'
	@echo 'make smoke         a minute of timing; fails if a step became very slow'
	@echo 'make docs          build the documentation site in build/site'
	@echo 'make dist          build sdist and wheel in dist, and check what they say of themselves'
	@echo 'make bench         time private steps against plain steps and other libraries'
	@echo 'make real          the experiments on real data, short form: make real DATA=DIR'
	@echo 'make peers         install the other libraries that make bench compares with'
	@echo 'make lint          ruff check, ruff format --check and mypy'
	@echo 'make format        let ruff rewrite what make lint complains about'
	@echo 'make requirements  resolve requirements*.in to requirements*.txt (needs uv)'
	@echo 'make clean         delete caches and build products'
	@echo 'make distclean     delete the environments as well'
	@echo
	@echo 'This would run on $(ON), in $(VENV). Another: STACK=pinned, keras3, tf_keras.'

demo: $(READY)
	@$(PY) -m keras_examples.digits $(ARGS)

# The reference has the federated half, so that the site is built on the pinned stack.
# Whatever Sphinx warns of (a broken link, a name that is nowhere) is an error.
ifeq ($(ON),pinned)
docs: $(VENV)/.docs
	@$(PY) -m sphinx -b html --fresh-env --nitpicky --fail-on-warning --keep-going \
	  --quiet -d build/doctrees docs build/site
	@echo 'The site is in build/site: open index.html.'
else
docs:
	@echo 'The site needs the stack pinned, and so Python 3.11:'; \
	echo '    make docs STACK=pinned'; exit 1
endif

# What is published: the source distribution, and the wheel that is made of it alone.
dist: $(VENV)/.docs
	@rm -rf dist && mkdir dist
	@$(PY) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' \
	  >/dev/null
	@$(PIP) wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir dist \
	  dist/*.tar.gz
	@$(PY) -m twine check --strict dist/*

# A file's tests are one process's, so that what they share is made once. TensorFlow never
# frees what XLA compiled, and all tests compile thousands of steps: so they run in parts,
# each in processes of its own; the last part is whatever the others leave. (What is traced
# only, `tests/conftest.py` frees.)
ALL_TEST_PARTS = 'tests/keras/[a-d]*_test.py' \
    'tests/keras/e*_test.py -k adam' 'tests/keras/e*_test.py -k not(adam)' \
    'tests/keras/[f-r]*_test.py' 'tests/keras/[s-z]*_test.py' \
    'tests/clipping tests/testing' 'tests/gradients/[a-o]*_test.py' \
    'tests/gradients/[p-z]*_test.py' $(OTHER_TESTS)
OTHER_TESTS = 'tests tfdpclip driver_kit --ignore=tests/keras --ignore=tests/clipping \
    --ignore=tests/testing --ignore=tests/gradients'

define run_tests
failed=; \
for part in $(if $(ARGS),'',$(2)); do \
  $(PY) -m pytest -n 2 --dist loadfile $(1) $$part $(ARGS) || failed=yes; \
done; \
[ -z "$$failed" ]
endef

test: lint
	@$(call run_tests,-m 'not slow','')

test-all: lint
	@$(call run_tests,,$(ALL_TEST_PARTS))

# `make test-part ARGS=--seconds=900`; tests/slow_part.py says which part.
test-part: $(READY)
	@$(PY) -m tests.slow_part $(ARGS)

# `make fuzz ARGS="--models=1000 --seed=7"`; the seed is today's date unless given.
fuzz: $(READY)
	@$(PY) -m tests.fuzz $(ARGS)

bench: $(READY)
	@$(PY) -m benchmarks.step_time $(ARGS)

# `make real DATA=data`; ARGS=--form=long takes hours. docs/results/real/README.md says
# what has to be in DATA.
real: $(READY)
	@$(PY) -m tools.real $(if $(DATA),--data_dir='$(DATA)') $(ARGS)

smoke: $(READY)
	@$(PY) -m benchmarks.smoke $(ARGS)

# Each has an environment of its own, in runs/peers.
peers: $(READY)
	@$(PY) -m benchmarks.peers.environments opacus jax

# mypy and the types of NumPy say different things in different releases: those of one
# stack are held to.
lint: $(READY)
	@$(VENV)/bin/ruff check --output-format concise .
	@$(VENV)/bin/ruff format --check .
ifeq ($(ON),pinned)
	@$(VENV)/bin/mypy
endif

format: $(READY)
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

# Another Python than the environment has, if one is asked for, makes it again: a run on
# 3.12 must not pass for one on 3.13.
VERSION := 'import sys; print(sys.version_info[:2])'
ifneq ($(PYTHON),)
AGAIN := $(shell has=$$($(PY) -c $(VERSION) 2>/dev/null) && \
    asked=$$('$(PYTHON)' -c $(VERSION) 2>/dev/null) && \
    [ "$$has" != "$$asked" ] && echo again)
endif
.PHONY: again
again:

# Finds a Python or says what to do; creates the environment unless there is a good one.
# One left half done, by an interrupt or by a missing ensurepip, has no pip.
define create_venv
if [ -n '$(AGAIN)' ] || ! $(PY) -c 'import pip' >/dev/null 2>&1 || \
    ! $(PY) -c $(IS_NEEDED) >/dev/null 2>&1; then \
  found=; tried=; \
  for python in $(if $(PYTHON),'$(PYTHON)',$(PYTHONS)); do \
    if "$$python" -c $(IS_NEEDED) >/dev/null 2>&1; then \
      found=$$python; break; \
    fi; \
    version=$$("$$python" --version 2>&1) || version='not found'; \
    tried="$$tried    $$python: $$version\n"; \
  done; \
  again='make PYTHON=/path/to/python$(if $(STACK), STACK=$(STACK)) $(or \
      $(MAKECMDGOALS),test)'; \
  if [ -z "$$found" ]; then \
    echo 'The stack $(ON) needs $(NEEDED), and there is none here. Looked for:'; \
    printf "$$tried"; \
    echo 'Install Python 3.11 (Debian 12: apt-get install python3.11-venv), or, for'; \
    echo 'everything but what is federated, Python 3.10, 3.12 or 3.13; or say where'; \
    echo 'one is:'; \
    echo "    $$again"; \
    exit 1; \
  fi; \
  if ! "$$found" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
    echo "$$found lacks the modules venv and ensurepip, which are needed to create"; \
    echo '$(VENV). Install them (Debian, Ubuntu: apt-get install python3-venv, or'; \
    echo 'python3.11-venv for Python 3.11), or use another Python:'; \
    echo "    $$again"; \
    exit 1; \
  fi; \
  echo "Creating $(VENV) with $$found, for the stack $(ON)."; \
  "$$found" -m venv --clear $(VENV) || exit 1; \
fi
endef

# Some requirements have no wheel and are built here. Without build isolation, and
# with the pinned setuptools and wheel installed before them, nothing is fetched that
# is not pinned. Twice quiet: errors only.
$(VENV)/.requirements: $(REQUIREMENTS) $(AGAIN)
	@{ $(create_venv); } >&2
	@echo 'Installing $(REQUIREMENTS) into $(VENV): some 800 MB,'
	@echo '3 GB once unpacked; a few minutes.'
	@awk '/^(setuptools|wheel)==/ {wanted = 1} wanted; !/\\$$/ {wanted = 0}' \
	  $(REQUIREMENTS) >$(VENV)/build-requirements.txt
	@$(PIP) install -qq --no-deps --require-hashes \
	  -r $(VENV)/build-requirements.txt
	@$(PIP) install -qq --no-deps --require-hashes --no-build-isolation \
	  -r $(REQUIREMENTS)
	@touch $@

$(READY): $(VENV)/.requirements setup.py pyproject.toml
	@$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@

# Beside the stack: what both have is of the same version.
$(VENV)/.docs: requirements-docs.txt $(READY)
	@$(PIP) install -qq --no-deps --require-hashes -r requirements-docs.txt
	@touch $@

# Every package moves to its newest version that fits.
RESOLVE = $(UV) pip compile --quiet --upgrade --generate-hashes --no-emit-index-url \
    --no-header --no-annotate

requirements:
	@command -v $(UV) >/dev/null || { \
	  echo 'Needs uv, because pip cannot override a requirement of a dependency.'; \
	  echo 'Install it (pip install uv), or: make UV=/path/to/uv requirements'; \
	  exit 1; } >&2
	@$(RESOLVE) --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
	  --override requirements.overrides --output-file requirements.txt \
	  requirements.in
	@$(RESOLVE) --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
	  --constraint requirements.txt --output-file requirements-docs.txt \
	  requirements-docs.in
	@$(RESOLVE) --python-version 3.10 --universal \
	  --output-file requirements-keras3.txt requirements-keras3.in

clean:
	rm -rf build dist docs/project docs/reference *.egg-info .mypy_cache .pytest_cache .ruff_cache bazel-*
	find . -name '.venv*' -prune -o -name __pycache__ -type d -prune \
	  -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-keras3
