# Two commands do everything on a machine that has only Python: make demo, make test.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint test-levels test-kernel slow gpu clean

demo: $(VENV)/.demo
	$(BIN)/python examples/train_gpt.py --seconds 60 --out demo
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt_distributed.py --compare 8 --out demo

# Two processes of tests on two cores; what each prints comes when it ends.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(MAKE) --no-print-directory -j2 --output-sync=target lint test-kernel test-levels

lint:
	$(BIN)/ruff check .
	$(BIN)/mypy

LEVELS := tests/graph tests/model tests/models tests/command

test-levels:
	$(BIN)/python -m pytest $(LEVELS)

test-kernel:
	$(BIN)/python -m pytest tests $(LEVELS:%=--ignore=%)

# What takes minutes: Inductor, models of full depth, the short version of the graph level's benchmark.
slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

# On a machine with a GPU, with the Python that has its torch: make gpu PYTHON=python3
gpu:
	$(PYTHON) -m pytest -m cuda
	$(PYTHON) benchmarks/run.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[plot]'
	touch $@

clean:
	rm -rf $(VENV) demo build *.egg-info
