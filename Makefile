# The two commands a newcomer needs are `make run PROMPT="..."` and `make test`; `make help` lists the rest.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
CARGO ?= cargo
PROMPT ?= Why is the sky blue?
# More flags for `make run` and `make bench`, for example ARGS="--mode chain".
ARGS ?=

TREESPEC := $(CARGO) run --quiet --release --locked --package treespec-cli --bin treespec --

# A check whose tool is missing is skipped with its reason; under CI=true it fails instead.
define skip
{ if [ "$${CI:-}" = true ]; then echo "error: $(1), and CI allows no skips" >&2; exit 1; fi; echo "skipped: $(1)" >&2; }
endef

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: run
# The prompt travels in the environment, so that quotes and dollar signs reach the program as they were typed.
run: export TREESPEC_MAKE_PROMPT = $(value PROMPT)
run: models build ## answer PROMPT="..." with the default models: fetch, build, three processes, statistics
	@$(TREESPEC) generate --prompt "$$TREESPEC_MAKE_PROMPT" $(ARGS)

.PHONY: build
build: ## build the release binary target/release/treespec
	@$(CARGO) build --release --locked --package treespec-cli

.PHONY: models
models: ## fetch the default target and check its hash (does nothing when it is there)
	@$(PYTHON) deploy/fetch_models

.PHONY: bench
bench: models build ## time ar, chain and trees on the built-in prompts (minutes); flags in ARGS
	@$(TREESPEC) bench sweep $(ARGS)

.PHONY: test
test: check-format check-protos test-models check-lints test-docs test-units ## all checks and tests, no root needed
	@echo "all checks passed"

.PHONY: check-format
check-format: ## cargo fmt --check
	@if $(CARGO) fmt --version >/dev/null 2>&1; then $(CARGO) fmt --all --check; \
	else $(call skip,formatting: rustfmt is missing (rustup component add rustfmt)); fi

.PHONY: check-lints
check-lints: ## clippy with and without the GPU, warnings are errors
	@if $(CARGO) clippy --version >/dev/null 2>&1; then \
		$(CARGO) clippy --workspace --all-targets --locked -- -D warnings \
		&& $(CARGO) clippy --package treespec-cli --all-targets --features cuda --locked -- -D warnings; \
	else $(call skip,lints: clippy is missing (rustup component add clippy)); fi

.PHONY: check-protos
check-protos: ## buf lint over proto/
	@if buf --version >/dev/null 2>&1; then buf lint proto; \
	else $(call skip,proto lint: buf is missing (pip install buf-bin)); fi

.PHONY: test-models
test-models:
	@$(PYTHON) deploy/fetch_models \
	|| $(call skip,tests with the default models: they could not be fetched (reason above))

.PHONY: check-kernels
check-kernels: ## compile every CUDA kernel for sm_90, sm_100 and sm_120 (needs the NVRTC library, no GPU)
	@$(CARGO) test --quiet --package treespec-cuda --test kernels --locked -- --nocapture

.PHONY: test-gpu
test-gpu: ## kernels, targets and drafters on the first GPU; says why where there is none
	@$(CARGO) test --release --package treespec-cuda --test gpu --locked -- --nocapture --test-threads 1
	@$(CARGO) test --release --package treespec-cuda --test gpu --locked -- --nocapture --ignored lost_device

.PHONY: test-docs
test-docs: ## the examples in doc comments
	@$(CARGO) test --workspace --doc --locked --quiet

.PHONY: test-units
test-units: ## unit, property and cross-service tests
	@if $(CARGO) nextest --version >/dev/null 2>&1; then $(CARGO) nextest run --workspace --locked; \
	else echo "cargo-nextest is missing: using cargo test"; \
		$(CARGO) test --workspace --lib --bins --tests --locked; fi
