# make setup        create .venv, install what training needs, and compile kernels for the CPU
# make quickstart   prepare text, train, stop, resume, generate: under five minutes on two cores
# make quickstart-t5   prepare text, train an encoder-decoder, fill in: under two minutes on two cores
# make test         run the test suite
# make test-kernels compile the Triton kernels, and run them in Triton's interpreter; needs no GPU
# make test-gpu     run what needs a CUDA device (docs/gpu.md)
# make lint         ruff and mypy
# make benchmark    time training, data preparation and index building against their yardsticks
#
# VENV_ARGS=--system-site-packages uses the torch that is already installed (containers); pip's own
# variables (PIP_INDEX_URL, PIP_FIND_LINKS ...) choose where wheels come from.

PYTHON ?= python3
VENV_ARGS ?=
BIN := .venv/bin

.PHONY: always setup setup-dev quickstart quickstart-t5 lint benchmark extension clean
.PHONY: test test-one-process test-several test-slow test-kernels test-gpu

COMPILED := build/compiled

setup: .venv/installed $(COMPILED)
setup-dev: .venv/installed-dev $(COMPILED)

# Other VENV_ARGS than the environment was made with bring it up to date.
ifneq ($(VENV_ARGS),)
.venv/arguments: always
	@mkdir -p .venv && echo '$(VENV_ARGS)' | cmp -s - $@ || echo '$(VENV_ARGS)' > $@
.venv/installed: .venv/arguments
endif

.venv/installed: requirements.txt tools/install_requirements.py
	$(PYTHON) -m venv $(VENV_ARGS) .venv
	$(BIN)/python tools/install_requirements.py requirements.txt
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/python tools/install_requirements.py requirements-dev.txt
	@touch $@

# Kernels for the CPU and the index helper, in place. Without a compiler it says what is missing, and
# torch and numpy do the same more slowly.
$(COMPILED): .venv/installed setup.py $(wildcard csrc/*)
	$(BIN)/python setup.py -q build_ext --inplace --force
	@ls megatron/core/kernels/compiled/cpu_kernels*.so megatron/core/datasets/index_helpers*.so \
	    || echo "setup tries again, once there is a C++ compiler"
	@mkdir -p $(dir $@) && touch $@

ifeq ($(wildcard megatron/core/kernels/compiled/cpu_kernels*.so),)
$(COMPILED): always
endif

# Triton beside a torch for the CPU misleads packages that look for it: it gets an environment of
# its own, which sees the packages of .venv.
.venv-triton/installed: .venv/installed-dev requirements-triton.txt
	$(PYTHON) -m venv $(VENV_ARGS) .venv-triton
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > "$$(.venv-triton/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"
	.venv-triton/bin/python tools/install_requirements.py requirements-triton.txt
	@touch $@

quickstart: setup
	PYTHON=$(BIN)/python bash examples/quickstart.sh

quickstart-t5: setup
	PYTHON=$(BIN)/python bash examples/quickstart_t5.sh

# Tests are many small processes: more threads than cores only wait for each other.
test test-one-process test-several test-slow test-kernels test-gpu: export OMP_NUM_THREADS ?= 1

# Two halves side by side: ranks of a test wait for each other much of the time. Two parts with many
# processes each would be slower together than one after the other.
test: setup-dev
	@$(MAKE) --no-print-directory -j2 test-one-process test-several

test-one-process: setup-dev
	$(BIN)/python -m pytest -m "not slow" --ignore tests/distributed --ignore tests/end_to_end

test-several: setup-dev
	$(BIN)/python -m pytest -m "not slow" tests/distributed tests/end_to_end

test-slow: setup-dev
	$(BIN)/python -m pytest -m slow

# There are wheels of Triton for Linux alone.
ifeq ($(shell uname -s),Linux)
test-kernels: .venv-triton/installed
	TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest tests/kernels
else
test-kernels:
	@echo "make test-kernels: there is no wheel of Triton for $$(uname -s); nothing was tested"
endif

test-gpu: setup-dev
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: setup-dev
	$(BIN)/python benchmarks/run.py

# Compile once more, after a compiler was installed.
extension: .venv/installed
	@rm -f $(COMPILED)
	@$(MAKE) --no-print-directory $(COMPILED)

clean:
	rm -rf .venv .venv-triton build runs
	find megatron -name '*.so' -delete
