# make train    train a small language model on two ranks          make test      lint, types and the protective tests: what CI runs
# make lint     ruff and mypy alone                                make test-all  these and the exhaustive tests
# make docs     the documents as a site, build/site                 make bench     a short version of most benchmarks, and figures
# make fuzz     100,000 hostile checkpoints, at random              make wheel    dist/fsdp2-*.whl, as a release has it
# make fuzz-runtime   random programs on torch's FSDP2, fsdp2 and one process; ARGS="--seconds 600 --seed 0 --ranks 2"
# make test-device    sharded training on a lagging accelerator; needs a C++ compiler (compiles it, once)
# make mutants  random faults in files of the library, and which of them the tests given find
# make test-clients   torchtitan, Accelerate, transformers, trl, Lightning, ... on fsdp2 (makes .venv-clients)
# make test-engines   vLLM on the CPU, with weights that fsdp2 publishes (makes .venv-engines, 3 GB)
#
# Each makes .venv first, once, from any Python >= 3.11 with pip and venv. Another interpreter: make PYTHON=python3.12 ...
# A run's own options: make train NPROC=4 ARGS="--steps 50"; make test ARGS="tests/pure/test_layout.py -x"
# make test WORKERS=4 (or test-all) runs four modules of tests at a time instead of two, WORKERS=0 one after the other in one process.

PYTHON  ?= python3
NPROC   ?= 2
WORKERS ?= 2
ARGS    ?=

VENV      := .venv
BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CLIENTS   := .venv-clients
ENGINES   := .venv-engines

# A module's tests stay together, as they share what they have started; the modules are taken in alphabetical order.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# One thread a rank, as torchrun chooses anyway, but without its warning.
export OMP_NUM_THREADS ?= 1

# Tests start many processes. Each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all test-device test-clients test-engines mutants lint bench docs fuzz fuzz-runtime wheel clean

train: $(INSTALLED)
	$(BIN)/python examples/launch.py --standalone --nproc_per_node=$(NPROC) examples/train_lm/train_lm.py $(ARGS)

test: lint
	$(BIN)/python -m pytest --durations=15 -m "not exhaustive" $(PARALLEL) $(ARGS)

test-all: lint
	$(BIN)/python -m pytest --durations=15 $(PARALLEL) $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.all --short $(ARGS)

# setuptools comes first and the package is built with it, so that the constraints also bind the build, with any pip.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "fsdp2 needs Python >= 3.11, and '$(PYTHON)' is not: try  make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "'$(PYTHON) -m venv' failed: install Python's venv and pip (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "Installing into $(VENV), once; torch is large, so this takes some minutes."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    --no-build-isolation --editable '.[dev,examples]'
	@touch $@

test-device: $(INSTALLED)
	$(BIN)/python -m pytest tests/instruments/device --durations=15 $(ARGS)

# The clients have an environment of their own: their versions must not bind ours.
test-clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest tests/clients --durations=15 $(ARGS)
	$(CLIENTS)/bin/python -m pytest tests/replicas -k torchft

$(CLIENTS)/.installed: pyproject.toml constraints-clients.txt
	@$(PYTHON) -m venv $(CLIENTS)
	@echo "Installing into $(CLIENTS), once; this takes some minutes."
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-clients.txt torch setuptools wheel
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-clients.txt \
	    --no-build-isolation --editable '.[clients]'
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-clients.txt --no-deps \
	    ai2-olmo-core axolotl llamafactory nemo-automodel sglang verl \
	    addict bettermap codetiming dataclass-extensions importlib_resources
	@touch $@

# vLLM does not need torch's packages for images and sound, whose builds may be for another torch.
test-engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m pytest tests/engines $(ARGS)

$(ENGINES)/.installed: pyproject.toml tests/engines/requirements.txt
	@$(PYTHON) -m venv $(ENGINES)
	@echo "Installing into $(ENGINES), once; this takes some minutes."
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/engines/requirements.txt
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

mutants: $(INSTALLED)
	$(BIN)/python -m tests.instruments.mutants $(ARGS)

fuzz: $(INSTALLED)
	FUZZ_CASES=100000 $(BIN)/python -m pytest tests/checkpoint/test_hostile.py -k "fuzz and not 2000" --timeout 0 $(ARGS)

fuzz-runtime: $(INSTALLED)
	$(BIN)/python -m tests.instruments.differential --shrink 60 --keep found $(ARGS)

docs: $(INSTALLED)
	$(BIN)/python docs/make_api.py > docs/api.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# As for .venv: setuptools at the pinned version builds it.
wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(CLIENTS) $(ENGINES) build dist *.egg-info runs
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
