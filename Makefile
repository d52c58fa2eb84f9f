# Everything a developer, a user of the demo and CI run. "make" alone lists it.
#
# Environments are made from hash-locked files and remade only when those change:
# each stamp carries the hash of what it was made from, so neither a new clone nor
# a touched file costs a reinstall. A lock file per environment keeps two makes that
# run side by side from making the same one twice.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3

# The lock files alone say what is installed, not the machine's own settings.
export UV_NO_CONFIG := 1
unexport PIP_FIND_LINKS UV_FIND_LINKS VIRTUAL_ENV

TOOLS := .tools
UV := $(TOOLS)/uv/bin/uv
PY := .venv/bin/python

# Commands that the tests and the demo call, each with its Debian package.
SYSTEM_TOOLS := flock:util-linux unshare:util-linux strace:strace ps:procps

hash_of = $(firstword $(shell sha256sum $(1) | sha256sum))
SOURCES := $(shell find sidecar operator -type f -not -name '*.py[co]' | LC_ALL=C sort)
WHEEL_HASH := $(call hash_of,pyproject.toml README.md LICENSE $(SOURCES))

UV_STAMP := $(TOOLS)/uv/.made-$(call hash_of,requirements/uv.txt)
VENV_STAMP := .venv/.made-$(call hash_of,requirements/dev.txt pyproject.toml)
VLLM_STAMP := .venv-vllm/.made-$(call hash_of,requirements/vllm.txt)
VLLM31_STAMP := .venv-vllm31/.made-$(call hash_of,requirements/vllm31.txt)

# Runs a recipe's lines under the lock of the environment $(1), unless another make
# has left the stamp $(2) meanwhile; older stamps that match $(3) go.
define once
@mkdir -p $(TOOLS)
@flock $(TOOLS)/$(notdir $(1)).lock bash -euo pipefail -c '\
	[[ ! -e $(2) ]] || exit 0; \
	$(4); \
	rm -f $(1)/$(3)*; \
	touch $(2)'
endef

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

# ---- environments

$(UV_STAMP):
	$(call once,$(TOOLS)/uv,$@,.made-, \
		echo "making $(TOOLS)/uv"; \
		$(PYTHON) -m venv $(TOOLS)/uv; \
		$(TOOLS)/uv/bin/python -m pip install --quiet --disable-pip-version-check \
			--require-hashes --no-deps -r requirements/uv.txt)

# The install is editable: it needs no repeat when a source file changes.
$(VENV_STAMP): $(UV_STAMP)
	$(call once,.venv,$@,.made-, \
		echo "making .venv"; \
		$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv; \
		$(UV) pip sync --quiet --python $(PY) --require-hashes requirements/dev.txt; \
		$(UV) pip install --quiet --python $(PY) --offline --no-deps \
			--no-build-isolation --editable .)

# Compiled once here, since a machine may forbid Python to write bytecode, and an
# engine imports thousands of modules at each start.
$(VLLM_STAMP) $(VLLM31_STAMP): $(UV_STAMP)
$(VLLM_STAMP): REQUIREMENTS := requirements/vllm.txt
$(VLLM31_STAMP): REQUIREMENTS := requirements/vllm31.txt
$(VLLM_STAMP) $(VLLM31_STAMP):
	$(call once,$(@D),$@,.made-, \
		echo "making $(@D): about 2 GB to fetch the first time"; \
		$(UV) venv --quiet --allow-existing --python $(PYTHON) $(@D); \
		$(UV) pip sync --quiet --python $(@D)/bin/python --compile-bytecode \
			--require-hashes $(REQUIREMENTS))

# kvcellar goes into the engines' environments as a user adds it: as a wheel.
.venv-vllm/.kvcellar-$(WHEEL_HASH): $(VENV_STAMP) $(VLLM_STAMP)
.venv-vllm31/.kvcellar-$(WHEEL_HASH): $(VENV_STAMP) $(VLLM31_STAMP)
.venv-vllm/.kvcellar-$(WHEEL_HASH) .venv-vllm31/.kvcellar-$(WHEEL_HASH):
	$(call once,$(@D),$@,.kvcellar-, \
		folder="$$(mktemp -d)"; \
		$(UV) build --quiet --wheel --offline --no-build-isolation --python $(PY) \
			--out-dir "$$folder"; \
		$(UV) pip install --quiet --python $(@D)/bin/python --offline --no-deps \
			--reinstall --compile-bytecode "$$folder"/kvcellar-*.whl; \
		rm -r "$$folder")

.PHONY: venv venv-vllm venv-vllm31
venv: $(VENV_STAMP) ## .venv: kvcellar (editable), its checks and its tests
venv-vllm: .venv-vllm/.kvcellar-$(WHEEL_HASH) ## .venv-vllm: vLLM 0.32 and a wheel of this tree
venv-vllm31: .venv-vllm31/.kvcellar-$(WHEEL_HASH) ## .venv-vllm31: vLLM 0.31 and a wheel of this tree
