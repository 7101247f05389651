# make demo    environment, install, and the whole path on the demo planet
# make test    environment, install, a browser, and the tests (minutes)
# make test-all, browser, lint, bench, clean
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all browser lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/graticule demo

# One thread: tests fork, and threads of a threaded parent hang in its children. A file's tests share
# what is costly to make, so that a file stays with one of the WORKERS.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

test: $(VENV)/.dev browser
	$(PYTEST) -m "not slow and not gpu"

test-all: $(VENV)/.dev browser
	$(PYTEST) -m "not gpu"

# The tests open a report in a browser: Debian's Chromium, where there is none yet.
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get; then \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; \
	else \
	  echo "no browser here, so the test of the report page will fail: install chromium"; \
	fi

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

bench: $(VENV)/.demo
	$(BIN)/graticule bench step

# torch first: some packages would otherwise bring a build of their own.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch numpy
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
