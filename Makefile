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
SYSTEM_TOOLS := flock:util-linux unshare:util-linux strace:strace ps:procps \
	openssl:openssl ip:iproute2

# Those of the test cluster and of the simulated GPU driver besides.
CLUSTER_TOOLS := $(SYSTEM_TOOLS) gcc:build-essential nsenter:util-linux runc:runc buildah:buildah \
	/usr/lib/cni/bridge:containernetworking-plugins iptables:iptables \
	go:golang-go conntrack:conntrack debootstrap:debootstrap busybox:busybox-static

hash_of = $(firstword $(shell sha256sum $(1) | sha256sum))
SOURCES := $(shell find sidecar operator -type f -not -name '*.py[co]' | LC_ALL=C sort)
WHEEL_HASH := $(call hash_of,pyproject.toml README.md LICENSE $(SOURCES))

UV_STAMP := $(TOOLS)/uv/.made-$(call hash_of,requirements/uv.txt)
VENV_STAMP := .venv/.made-$(call hash_of,requirements/dev.txt pyproject.toml)
VLLM_STAMP := .venv-vllm/.made-$(call hash_of,requirements/vllm.txt)
VLLM_POD_STAMP := .venv-vllm-pod/.made-$(call hash_of,requirements/vllm.txt)
VLLM31_STAMP := .venv-vllm31/.made-$(call hash_of,requirements/vllm31.txt)
MUTATION_STAMP := $(TOOLS)/mutation/.made-$(call hash_of,requirements/mutation.txt)

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
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

# ---- environments

$(UV_STAMP):
	$(call once,$(TOOLS)/uv,$@,.made-, \
		echo "making $(TOOLS)/uv"; \
		$(PYTHON) -m venv $(TOOLS)/uv; \
		$(TOOLS)/uv/bin/python -m pip install --quiet --disable-pip-version-check \
			--require-hashes --no-deps -r requirements/uv.txt)

# Environments are compiled here, since a machine may forbid Python to write bytecode, and
# every start of a test, a sidecar or an engine would compile its imports anew.
# This install is editable: it needs no repeat when a source file changes.
$(VENV_STAMP): | $(UV_STAMP)
	$(call once,.venv,$@,.made-, \
		echo "making .venv"; \
		$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv; \
		$(UV) pip sync --quiet --python $(PY) --compile-bytecode \
			--require-hashes requirements/dev.txt; \
		$(UV) pip install --quiet --python $(PY) --offline --no-deps \
			--no-build-isolation --editable .)

# The sync removes kvcellar, so its stamp goes too.
$(VLLM_STAMP) $(VLLM31_STAMP): | $(UV_STAMP)
$(VLLM_STAMP): REQUIREMENTS := requirements/vllm.txt
$(VLLM31_STAMP): REQUIREMENTS := requirements/vllm31.txt
$(VLLM_STAMP) $(VLLM31_STAMP):
	$(call once,$(@D),$@,.made-, \
		echo "making $(@D): about 2 GB to fetch the first time"; \
		$(UV) venv --quiet --allow-existing --python $(PYTHON) $(@D); \
		$(UV) pip sync --quiet --python $(@D)/bin/python --compile-bytecode \
			--require-hashes $(REQUIREMENTS); \
		rm -f $(@D)/.kvcellar-*)

# For the Python of the test cluster's engine image, whatever this machine's is.
$(VLLM_POD_STAMP): | $(UV_STAMP)
	$(call once,.venv-vllm-pod,$@,.made-, \
		echo "making .venv-vllm-pod"; \
		mkdir -p .venv-vllm-pod; \
		$(UV) pip install --quiet --target .venv-vllm-pod --python-version 3.11 \
			--python-platform "$$(uname -m)-manylinux_2_36" --compile-bytecode --no-deps \
			--require-hashes -r requirements/vllm.txt)

# Its packages stay out of .venv: the tests run in that, cosmic-ray in this.
$(MUTATION_STAMP): | $(UV_STAMP)
	$(call once,$(TOOLS)/mutation,$@,.made-, \
		echo "making $(TOOLS)/mutation"; \
		$(UV) venv --quiet --allow-existing --python $(PYTHON) $(TOOLS)/mutation; \
		$(UV) pip sync --quiet --python $(TOOLS)/mutation/bin/python --compile-bytecode \
			--require-hashes requirements/mutation.txt)

# kvcellar goes into the engines' environments as a user adds it: as a wheel.
.venv-vllm/.kvcellar-$(WHEEL_HASH): $(VLLM_STAMP) | $(VENV_STAMP)
.venv-vllm31/.kvcellar-$(WHEEL_HASH): $(VLLM31_STAMP) | $(VENV_STAMP)
.venv-vllm/.kvcellar-$(WHEEL_HASH) .venv-vllm31/.kvcellar-$(WHEEL_HASH):
	$(call once,$(@D),$@,.kvcellar-, \
		folder="$$(mktemp -d)"; \
		$(UV) build --quiet --wheel --offline --no-build-isolation --python $(PY) \
			--out-dir "$$folder"; \
		$(UV) pip install --quiet --python $(@D)/bin/python --offline --no-deps \
			--reinstall --compile-bytecode "$$folder"/kvcellar-*.whl; \
		rm -r "$$folder")

.PHONY: venv venv-vllm venv-vllm31 vllm-pod
venv: $(VENV_STAMP) ## .venv: kvcellar (editable), its checks and its tests
venv-vllm: .venv-vllm/.kvcellar-$(WHEEL_HASH) ## .venv-vllm: vLLM 0.32 and a wheel of this tree
venv-vllm31: .venv-vllm31/.kvcellar-$(WHEEL_HASH) ## .venv-vllm31: vLLM 0.31 and a wheel of this tree
vllm-pod: $(VLLM_POD_STAMP) ## .venv-vllm-pod: vLLM 0.32 for pods of the test cluster

# ---- checks and tests

.PHONY: system system-cluster
system: TOOLS_NEEDED := $(SYSTEM_TOOLS)
system: ## check the commands that the demo calls; as root, install what is missing
system-cluster: TOOLS_NEEDED := $(CLUSTER_TOOLS)
system-cluster: ## the same for all tests, and for the test cluster
system system-cluster:
	@missing=(); \
	for tool in $(TOOLS_NEEDED); do \
		command -v "$${tool%%:*}" >/dev/null || missing+=("$${tool##*:}"); \
	done; \
	[[ $${#missing[@]} -gt 0 ]] || exit 0; \
	echo "missing Debian packages: $${missing[*]}"; \
	as_root=(); \
	if [[ $$(id -u) -ne 0 ]]; then \
		command -v sudo >/dev/null || { echo "install them as root, then run make again" >&2; exit 1; }; \
		as_root=(sudo); \
	fi; \
	"$${as_root[@]}" apt-get update -qq; \
	"$${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$${missing[@]}"

.PHONY: lint
lint: venv ## ruff (rules and format), mypy, and which module may import which
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache --no-logo

.PHONY: test-unit
test-unit: venv ## the pure tests: seconds, no root, no network
	$(PY) tests/run.py unit

.PHONY: test
test: system-cluster venv venv-vllm venv-vllm31 vllm-pod ## every test that this machine can run: what CI runs
	$(PY) tests/run.py

.PHONY: test-gpu
test-gpu: venv ## the transfers over this machine's GPU, and over simulated drivers: needs no vLLM
	$(PY) -m pytest tests/gpu -m "not soak"

# Measuring catches SIGTERM before a program's first line, so the test of that is left out, and those of
# install-library, which run as another user and have nothing of what is measured. The databases of processes
# that were killed cannot be read, which combine says of each.
COVERED := region index worker
.PHONY: coverage
coverage: export COVERAGE_FILE := $(TOOLS)/coverage/data
coverage: COVERAGE := $(PY) -m coverage
coverage: system venv ## what the tests reach of region, index and worker, by branch: at least 95 % of each
	@rm -rf $(TOOLS)/coverage; mkdir -p $(TOOLS)/coverage
	$(COVERAGE) run --rcfile=tests/coverage.ini -m pytest -q -m "not soak and not gpu" \
		-k "not sigterm_during_the_start" \
		--ignore=tests/integration/test_install_library.py tests/unit tests/integration tests/gpu
	$(COVERAGE) combine -q --rcfile=tests/coverage.ini
	@rm -f $(TOOLS)/coverage/data.*
	@status=0; \
	for package in $(COVERED); do \
		echo "kvcellar.$$package"; \
		$(COVERAGE) report --rcfile=tests/coverage.ini --include="*/kvcellar/$$package/*" \
			--fail-under=95 || status=1; \
	done; \
	exit $$status

MUTATED ?=
.PHONY: mutation
mutation: venv $(MUTATION_STAMP) ## change geometry, plan and chunks one place at a time: do their tests notice? half an hour; MUTATED=plan
	$(PY) tests/mutants.py $(MUTATED)

.PHONY: soak
soak: system-cluster venv venv-vllm venv-vllm31 vllm-pod $(MUTATION_STAMP) ## the full counts of kills and repeats: long
	$(PY) tests/run.py --soak

.PHONY: soak-table
soak-table: venv ## docs/reference/stories.md from the figures of the last make test and make soak
	$(PY) -m tests.cluster.stories

.PHONY: demo
demo: system venv venv-vllm ## a real engine is killed and restarted, and returns the same tokens
	.venv/bin/kvcellar demo --engine-python .venv-vllm/bin/python

.PHONY: bench
bench: system venv venv-vllm ## what a region costs an engine's start: minutes, on a quiet machine
	$(PY) bench/start_gate.py --engine-python .venv-vllm/bin/python

.PHONY: bench-operator
bench-operator: system-cluster venv ## the operator with 1,000 simulated pods: minutes, on a quiet machine
	$(PY) -m bench.operator_scale

BENCH_ARGS ?=
.PHONY: bench-data-plane
bench-data-plane: system venv-vllm ## the data plane beside vLLM's own code, in one process; BENCH_ARGS=--help: minutes
	.venv-vllm/bin/python -m bench.data_plane $(BENCH_ARGS)

# Standard library only, so any Python does.
CLUSTER_ARGS ?= --node
.PHONY: cluster cluster-demo cluster-down
cluster: system-cluster ## leave a real Kubernetes running here, as root; CLUSTER_ARGS= for none with a node
	@$(PYTHON) -m tests.cluster.box up $(TOOLS)/cluster $(CLUSTER_ARGS)

cluster-demo: venv vllm-pod ## in that cluster: kvcellar, and a real vLLM that it is injected into
	@$(PY) -m tests.cluster.demo

cluster-down: ## remove every trace of it
	@$(PYTHON) -m tests.cluster.box down $(TOOLS)/cluster

# The names of namespace and release are those of the documents; what the roles need on an old cluster is
# in, so the result suits every version.
MANIFESTS ?= dist/manifests
TEMPLATE := template kvcellar charts/kvcellar --namespace kvcellar-system --kube-version 1.29

.PHONY: manifests
manifests: venv ## CRDs into the chart, and all of it as plain YAML; MANIFESTS=folder MANIFEST_ARGS=--set...
	$(PY) charts/generate.py
	@helm="$$(command -v helm || $(PY) -c \
		'from tests.cluster.box.programs import programs; print(programs() / "helm")')"; \
	mkdir -p $(MANIFESTS); \
	cp charts/namespace.yaml $(MANIFESTS)/; \
	"$$helm" $(TEMPLATE) $(MANIFEST_ARGS) --skip-tests --set crds.install=false \
		>$(MANIFESTS)/kvcellar.yaml; \
	"$$helm" $(TEMPLATE) $(MANIFEST_ARGS) --skip-tests --set crds.install=true \
		--show-only 'templates/crds/*.yaml' >$(MANIFESTS)/crds.yaml; \
	echo "$(MANIFESTS): crds.yaml, namespace.yaml and kvcellar.yaml, to be applied in this order"

IMAGE ?= kvcellar:$(VERSION)
BASE ?= python:3.13-slim
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' sidecar/kvcellar/__init__.py)
REVISION = $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
# A CA that this machine trusts besides the usual ones, and settings of pip: no layer keeps them.
IMAGE_CA ?= $(SSL_CERT_FILE)
IMAGE_PIP_CONF ?=
IMAGE_TOOL ?= docker podman buildah

ARCHIVE ?= dist/kvcellar.tar
# The first that works on this machine, as $$tool.
define with_image_tool
tool=; \
for each in $(IMAGE_TOOL); do \
	if "$$each" info >/dev/null 2>&1; then tool="$$each"; break; fi; \
done; \
[[ -n "$$tool" ]] || { echo "none of $(IMAGE_TOOL) works here: install one" >&2; exit 1; };
endef

.PHONY: image image-push image-archive
image: ## the image, by docker, podman or buildah; IMAGE=name:tag BASE=image IMAGE_PIP_CONF=file
	@$(with_image_tool) \
	secrets=(); \
	if [[ -n "$(IMAGE_CA)" ]]; then secrets+=(--secret "id=ca,src=$(IMAGE_CA)"); fi; \
	if [[ -n "$(IMAGE_PIP_CONF)" ]]; then secrets+=(--secret "id=pip,src=$(IMAGE_PIP_CONF)"); fi; \
	DOCKER_BUILDKIT=1 "$$tool" build --file Dockerfile --tag "$(IMAGE)" --build-arg "BASE=$(BASE)" \
		--build-arg "VERSION=$(VERSION)" --build-arg "REVISION=$(REVISION)" "$${secrets[@]}" .; \
	size_of() { "$$tool" images --format '{{.Size}}' "$$1"; }; \
	echo "$(IMAGE): $$(size_of "$(IMAGE)"), its base $(BASE): $$(size_of "$(BASE)"); made by $$tool"

image-push: ## push it to the registry in its name, by the same tool; IMAGE=name:tag
	@$(with_image_tool) "$$tool" push "$(IMAGE)"

image-archive: ## write it to a file that nodes can load; IMAGE=name:tag ARCHIVE=file
	@$(with_image_tool) \
	mkdir -p "$$(dirname "$(ARCHIVE)")"; \
	rm -f "$(ARCHIVE)"; \
	if [[ "$$tool" == buildah ]]; then \
		buildah push "$(IMAGE)" "docker-archive:$(ARCHIVE):$(IMAGE)"; \
	else \
		"$$tool" save --output "$(ARCHIVE)" "$(IMAGE)"; \
	fi; \
	echo "$(ARCHIVE): $(IMAGE), made by $$tool"

.PHONY: lock
lock: export UV_CUSTOM_COMPILE_COMMAND := make lock
lock: COMPILE := $(UV) pip compile --quiet --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links $(LOCK_ARGS)
lock: $(UV_STAMP) ## resolve requirements/*.txt anew; LOCK_ARGS=--upgrade takes newer versions
	$(COMPILE) --universal requirements/uv.in --output-file requirements/uv.txt
	$(COMPILE) --universal pyproject.toml --extra sidecar --extra cli --extra operator \
		requirements/dev.in \
		--output-file requirements/dev.txt
	$(COMPILE) --universal requirements/image-build.in --output-file requirements/image-build.txt
	$(COMPILE) --universal pyproject.toml --extra sidecar --extra cli --extra operator \
		--no-emit-package numpy --output-file requirements/image.txt
	$(COMPILE) --universal requirements/mutation.in --output-file requirements/mutation.txt
	$(COMPILE) requirements/vllm.in --override requirements/vllm-overrides.txt \
		--output-file requirements/vllm.txt
	$(COMPILE) requirements/vllm31.in --override requirements/vllm-overrides.txt \
		--output-file requirements/vllm31.txt

.PHONY: clean
clean: cluster-down ## remove everything that make made
	rm -rf .tools .venv .venv-vllm .venv-vllm31 .venv-vllm-pod .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache dist
	find sidecar operator tests -type d -name __pycache__ -prune -exec rm -rf {} +
