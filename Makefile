# Everything runs in .venv, made on first use. Nothing but Python 3.11+ with pip and venv, git and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# pip would compile all files of all packages, one after the other. Here the largest are compiled on all cores, and the
# others when they are first imported. So compiled files must be written, whatever the environment says.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
COMPILE := $(BIN)/python -m compileall -q -j 0 -x py312
LARGE_PACKAGES := torch transformers scipy pandas sklearn numpy sympy matplotlib networkx streamlit peft playwright
unexport PYTHONDONTWRITEBYTECODE
# For the shell: make expands a whole recipe before it runs the first line, when there is no environment yet.
SITE_PACKAGES := $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
# A test whose reference implementation `make install` installs fails without it, instead of being skipped.
export DESKSIDE_REQUIRE_ORACLES := 1

.PHONY: install demo test test-full lint docs clean

install: $(STAMP)

# constraints.txt pins what is tested. Plain pip on purpose: torch comes from wherever pip is set up to take it.
# transformer-engine's Python sources are an oracle for NVFP4. Installed as a package without its compiled library, it
# would break `import peft`, which asks for it; in deskside_oracles nothing finds it but the tests.
$(STAMP): Makefile pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit('deskside needs Python 3.11 or newer: make PYTHON=python3.12') if sys.version_info < (3, 11) else None"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch==2.13.0
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(PIP) --no-deps --upgrade --target "$(SITE_PACKAGES)/deskside_oracles" transformer-engine==2.20.2
	$(PIP) --no-deps --upgrade --target "$(SITE_PACKAGES)/deskside_oracles/megatron_core" megatron-core==0.16.1
	for package in $(LARGE_PACKAGES); do $(COMPILE) "$(SITE_PACKAGES)/$$package"; done || true
	$(COMPILE) deskside
	touch $(STAMP)

demo: install
	$(BIN)/deskside go --preset demo --hours 0.05 --yes
	@echo "to use deskside in this shell: source $(BIN)/activate"

# Three processes even on two cores: in a third of their time, tests wait for processes, a browser or a time limit.
test: install
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

test-full: install
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "" --timeout 3600

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_lint.py

docs: install
	$(BIN)/python -m mkdocs build --strict
	@echo "documentation: build/site/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
