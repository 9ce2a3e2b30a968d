# Two commands do everything on a machine that has only Python: make demo, make test.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# A recipe fails where any part of a pipe does.
SHELL       := bash
.SHELLFLAGS := -o pipefail -c
named        = sed -u 's/^/$(1) | /'

.PHONY: demo test docs docs-test dist lint test-plans test-runs slow mutations faults soak peers compat compat-of-nothing compat-table pure gpu gpu-there gpu-tests gpu-bench rehearse clean

# torch warns where NumPy is missing, which nothing here needs.
demo: export PYTHONWARNINGS := ignore:Failed to initialize NumPy
demo: PIPELINE := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node
demo: $(VENV)/.demo
	$(BIN)/python examples/train_gpt.py --seconds 60
	$(PIPELINE) 2 examples/train_gpt_distributed.py --compare 8 --out demo
	$(PIPELINE) 4 examples/train_gpt_distributed.py --sleep 10 --budget 50% --compare 5 --out demo
	@echo
	@echo "The same GPT was trained with and without recomputation, and no bit of a loss, gradient or parameter differs."
	@echo "Steps were measured that recompute when gradients arrive and ahead of them, and one was planned into half of its bytes."
	@echo "The pictures are demo/timeline.svg and demo/pipeline-plan.svg."

# Two processes of tests on two cores; each line says whose it is. Others that they start find the package compiled. LINT=
# leaves lint out: mypy reads the installed torch.
LINT ?= lint
test: $(VENV)/.test
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(MAKE) --no-print-directory -j2 $(LINT) test-runs test-plans

# zizmor checks the workflows; actionlint does where it is installed, since its package downloads it from elsewhere.
lint:
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet --strict-collection .github
	if command -v actionlint; then actionlint; fi

# Of the same length, and each with what is like it.
PLANS := $(addprefix tests/,graph planning models command jobs benchmarks pages)

test-plans:
	$(BIN)/python -m pytest $(PLANS) 2>&1 | $(call named,plans)

test-runs:
	$(BIN)/python -m pytest tests $(PLANS:%=--ignore=%) 2>&1 | $(call named,runs)

# The tests marked slow: Inductor, models of full depth, more random programs and cases.
slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

# An exception at every operation of a step of each tool, and ranks that are killed or stopped: an hour.
faults: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "faults" tests/faults

# 10,000 steps of each tool: does memory stay flat? Some 20 minutes.
soak: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.soak

# Take each wait, event, stream and edge out of the library, in turn: does a test on the simulated device notice?
mutations: $(VENV)/.test
	$(BIN)/python -m tests.device.mutations

# The suite on another torch: make compat TORCH=2.15.0. Each has an environment in COMPAT, of 5 GB.
COMPAT ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/torchckpt
THERE  := $(COMPAT)/torch-$(TORCH)

compat: $(if $(TORCH),$(THERE)/.test,compat-of-nothing)
	status=0; OMP_NUM_THREADS=1 $(THERE)/bin/python -m pytest tests --junitxml=$(THERE)/results.xml || status=$$?; \
	$(THERE)/bin/python -m tests.results $(COMPAT)/torch-*/results.xml; exit $$status

compat-of-nothing:
	@echo "make compat needs a release of torch: make compat TORCH=2.15.0" >&2; exit 2

compat-table:
	$(PYTHON) -m tests.results $(COMPAT)/torch-*/results.xml

# setuptools is not pinned there: some releases of torch want an older one, and tests want 77 at least.
$(THERE)/.test: pyproject.toml constraints.txt
	test -x $(THERE)/bin/python || $(PYTHON) -m venv $(THERE)
	grep -v -e '^torch==' -e '^setuptools==' constraints.txt > $(THERE)/constraints.txt
	$(THERE)/bin/python -m pip install -q -c $(THERE)/constraints.txt torch==$(TORCH) -e '.[test]'
	touch $@

# Models of other libraries, plainly and in regions, to the bit; and the recipes that need these libraries. Its environment
# is in COMPAT, and so are the results, a line for each family: a family that has one is not run again.
PEERS := $(COMPAT)/peers
RUN   := OMP_NUM_THREADS=1 $(PEERS)/bin/python benchmarks/peers

peers: $(PEERS)/.ready
	$(RUN)/run.py --out $(PEERS)/peers.jsonl
	$(RUN)/run.py --budget --every 3 --out $(PEERS)/peers-budget.jsonl
	$(PEERS)/bin/python benchmarks/peers/table.py --file $(PEERS)/peers.jsonl --budget $(PEERS)/peers-budget.jsonl
	status=0; $(PEERS)/bin/python -m pytest tests/pages/test_docs.py -k recipes --junitxml=$(PEERS)/results.xml || status=$$?; \
	$(PEERS)/bin/python -m tests.results $(PEERS)/results.xml; exit $$status

# The last five without what they ask for: torchvision, for pictures on disk, and other releases of what stands here.
$(PEERS)/.ready: pyproject.toml constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q -c constraints.txt -e '.[test,peers]'
	$(PEERS)/bin/python -m pip install -q -c constraints.txt --no-deps --no-build-isolation timm diffusers litgpt peft deepspeed
	touch $@

# What needs no torch, on a Python that has pytest and typing_extensions: make pure PYTHON=python3.10
PURE := tests/planning tests/command/test_command.py tests/test_results.py

pure:
	$(PYTHON) -m pytest --noconftest -k "not balance and not bad_module" $(PURE)

# On a machine with a GPU, with the Python that has its torch: make gpu PYTHON=python3 OUT=folder. Without one make test
# runs these tests on the simulated device. The two halves: make gpu-tests, make gpu-bench ONLY="pipe overhead".
OUT ?= benchmarks/results

gpu: gpu-tests gpu-bench

gpu-there:
	@$(PYTHON) -c "import torch; torch.cuda.is_available() or exit('make gpu needs a CUDA device, and a torch that sees it')"

gpu-tests: gpu-there
	$(PYTHON) -m pytest -m "accelerator and not slow"

gpu-bench: gpu-there
	$(PYTHON) benchmarks/run.py --out $(OUT) $(if $(ONLY),--only $(ONLY)) $(OPTIONS)

# Does all that make gpu-bench runs work? In minutes, on the simulated device where there is no GPU.
rehearse:
	$(PYTHON) benchmarks/run.py --rehearse $(if $(ONLY),--only $(ONLY))

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# What the packages are pinned to; another file has another torch.
CONSTRAINTS ?= constraints.txt

$(VENV)/.test: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[test]'
	touch $@

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e .
	touch $@

# The wheel and the archive of the source, in build/dist.
dist: $(VENV)/.dist
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist
	$(BIN)/python -m twine check --strict build/dist/*

$(VENV)/.dist: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) build twine
	touch $@

# The site, in build/site; a broken link fails.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The planner's page in a browser; skips, and says so, where there is no chromium.
docs-test: docs $(VENV)/.test
	$(BIN)/python -m pytest tests/pages/test_planner.py -rs

$(VENV)/.docs: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) demo build *.egg-info
