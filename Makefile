# `make demo` and `make test` need nothing but make and Python >= 3.10: they install the rest into .venv.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
LOWEST_PYTHON ?= 3.10
OTHER_PYTHON ?= 3.13

.PHONY: help demo test lint format unit slow docs pages bench alarms reliability soak zoo screenshots test-lowest test-python constraints clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a collapsing and a healthy model side by side (about 3 minutes, and at first the installation)"
	@echo "make test    everything CI runs: lint, types, unit tests, slow tests"
	@echo "make lint    ruff format --check, ruff check, mypy --strict"
	@echo "make format  let ruff rewrite the code"
	@echo "make bench   measure what the monitor costs, rewrite docs/benchmarks.md (about 15 minutes)"
	@echo "make alarms  train 200 small models and judge the alarms, rewrite docs/alarms.md (about 30 minutes)"
	@echo "make reliability  inject faults into real trainings, rewrite docs/reliability.md"
	@echo "make soak    observe 20,000 steps, rewrite the curves of docs/reliability.md (about 20 minutes)"
	@echo "make pages   train what the documentation shows, rewrite its generated parts (about 7 minutes)"
	@echo "make test-lowest  run the unit tests with the lowest versions that pyproject.toml allows (downloads gigabytes)"
	@echo "make test-python  run the unit tests with another Python, OTHER_PYTHON=3.13 (downloads gigabytes)"
	@echo "make zoo     try capture on every architecture in tests/zoo, rewrite docs/coverage.md"
	@echo "make screenshots  take the pictures of docs/images from what make demo left (needs Chromium)"
	@echo "make docs    build the documentation into site/"
	@echo "make clean   remove everything that make made"

# One stamp per environment: it is installed anew only when what it is made from has changed.
.venv/.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install \
		--quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

.venv/.stamp-docs: .venv/.stamp
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install \
		--quiet --disable-pip-version-check --editable '.[dev,docs]'
	touch $@

demo: .venv/.stamp
	$(BIN)/python examples/char_gpt.py

test: lint docs unit slow

lint: .venv/.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Tests of one file share what is costly to make, such as a browser or the ranks of a training.
unit: .venv/.stamp
	$(BIN)/pytest -m 'not slow' -n $(WORKERS) --dist loadfile

slow: .venv/.stamp
	$(BIN)/pytest -m slow -n $(WORKERS) --dist loadfile

format: .venv/.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/.stamp-docs
	$(BIN)/mkdocs build --strict

bench: .venv/.stamp
	$(BIN)/python -m tests.benchmarks

alarms: .venv/.stamp
	$(BIN)/python -m tests.alarms

reliability: .venv/.stamp
	$(BIN)/python -m tests.reliability

soak: .venv/.stamp
	$(BIN)/python -m tests.soak

pages: .venv/.stamp
	$(BIN)/python -m tests.docs_pages --train

# Old packages warn of what newer ones changed; other warnings stay errors. LOWEST_PYTHON: a version, or a path to one.
test-lowest: .venv/.stamp
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(LOWEST_PYTHON) .venv-lowest
	$(BIN)/uv pip install --quiet --python .venv-lowest --resolution lowest-direct --editable '.[dev]'
	.venv-lowest/bin/python -m pytest -m 'not slow' -n $(WORKERS) --dist loadfile -W ignore::DeprecationWarning \
		-W ignore::FutureWarning -W ignore::PendingDeprecationWarning

# The pinned versions on another Python: a version, or a path to one.
test-python: .venv/.stamp
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(OTHER_PYTHON) .venv-other
	$(BIN)/uv pip install --quiet --python .venv-other --constraints constraints.txt --editable '.[dev]'
	.venv-other/bin/python -m pytest -m 'not slow' -n $(WORKERS) --dist loadfile

# LitGPT and vit-pytorch come without what they require, such as torchvision: their models need none of it.
zoo: .venv/.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		litgpt==0.5.13 psutil==7.2.2 vit-pytorch==1.26.14
	$(BIN)/python -m tests.zoo

# Needs the runs of `make demo` and a Chromium.
screenshots: .venv/.stamp
	$(BIN)/python -m tests.screenshots

# Keeps the pins that still fit: to let one move, delete its line first. CUDA parts are left out: torch pins its own, and
# a CPU-only build has none.
constraints: .venv/.stamp
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --all-extras --no-annotate \
		--custom-compile-command "make constraints" --output-file constraints.txt pyproject.toml
	sed -i '/^\(nvidia\|cuda\|triton\)/d' constraints.txt

clean:
	rm -rf .venv .venv-lowest .venv-other site dist build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
