# From a clean clone: `make demo` evaluates an example kernel, `make test` is what CI runs.
# Needs Linux on x86-64 with python3 (3.11 or later) and its pip, g++ and make.  Another Python: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
# Without an NVIDIA driver one version of torch is named, so that everybody's CPU results come from the same one; with a driver the
# newest torch that fits is taken.
DRIVER := $(wildcard /proc/driver/nvidia/version)$(shell nvidia-smi -L 2>/dev/null)
TORCH := $(if $(DRIVER),,torch==2.13.0)
# The venv is made without a pip of its own, because a bare Debian has no ensurepip; the pip of $(PYTHON) installs into it.
INSTALL := $(PYTHON) -m pip --python $(BIN)/python install --quiet $(TORCH)

# An activated .venv must not stand in for $(PYTHON): it has no pip.
export PATH := $(subst $(CURDIR)/.venv/bin:,,$(PATH))
# Spinning OpenMP threads would steal the cores from the ranks that are being timed.
export OMP_NUM_THREADS = 1

.PHONY: demo test
.DELETE_ON_ERROR:

demo: .venv/.demo
	$(BIN)/pkb eval allreduce examples/cpp_allreduce.py --backend cpp

test: .venv/.test
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest

.venv/.demo: pyproject.toml | .venv
	$(INSTALL) --editable .
	@touch $@

.venv/.test: pyproject.toml | .venv
	$(INSTALL) --editable '.[test]'
	@touch $@ .venv/.demo

.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pkb-env needs Python 3.11 or later, $(PYTHON) is not; name another one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -m pip --version >/dev/null || { echo "$(PYTHON) has no pip; install it (Debian: apt install python3-pip)" >&2; exit 1; }
	$(PYTHON) -m venv --without-pip $@
