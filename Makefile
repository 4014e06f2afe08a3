# Everything a developer or CI runs. `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
SAM := .venv-sam/bin/sam
export SAM_CLI_TELEMETRY := 0

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "%-12s %s\n", $$1, $$2}'

.venv/.installed: requirements/dev.lock pyproject.toml
	@$(PYTHON) tools/check_machine.py python
	@echo "installing Python packages into .venv (about a minute) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

.venv-sam/.installed: requirements/sam.lock
	$(PYTHON) -m venv .venv-sam
	.venv-sam/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/sam.lock
	@touch $@

.PHONY: prometheus
prometheus:
	@$(PYTHON) tools/check_machine.py prometheus

.PHONY: setup
setup: ## install what the demo and the tests need
	@$(MAKE) --no-print-directory -j2 prometheus .venv/.installed

.PHONY: demo
demo: setup ## watch a GPU fault in a real Prometheus become a replaced node
	@$(BIN)/python -m local run local/scenarios/xid79.yaml

.PHONY: lint
lint: .venv/.installed ## format, lint, types, import direction, template, state machine, schemas
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy layers functions local ops tools benchmarks
	$(BIN)/lint-imports
	$(BIN)/cfn-lint template.yaml cluster-access.yaml rules.template.yaml
	$(BIN)/python tools/lint_asl.py
	$(BIN)/python tools/schemas.py --check
	$(BIN)/python tools/rules_doc.py --check
	$(BIN)/python tools/rule_groups.py --check

.PHONY: format
format: .venv/.installed ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: schemas
schemas: .venv/.installed ## write events/schemas, docs/RULES.md and rules.template.yaml anew
	$(BIN)/python tools/schemas.py
	$(BIN)/python tools/rules_doc.py
	$(BIN)/python tools/rule_groups.py

.PHONY: unit
unit: .venv/.installed ## unit tests, sockets blocked
	$(BIN)/python -m pytest tests/unit --disable-socket --allow-unix-socket -q -n 2

.PHONY: crash
crash: .venv/.installed ## every call of every port goes wrong in every way, sockets blocked
	$(BIN)/python -m pytest tests/crash --disable-socket --allow-unix-socket -q -n 2

.PHONY: test
test: setup lint ## lint, unit, integration and crash tests, the first scenarios, coverage
	@rm -f .coverage .coverage.*
	time $(BIN)/python -m pytest tests/unit --disable-socket --allow-unix-socket -q -n 2 --cov --cov-report= --cov-fail-under=0
	time $(BIN)/python -m pytest tests/integration -q -n 2 --cov --cov-append --cov-report= --cov-fail-under=0
	$(BIN)/coverage report
	time $(MAKE) --no-print-directory crash
	time $(BIN)/python -m pytest tests/e2e -q -m first

.PHONY: bench-storm
bench-storm: .venv/.installed ## 2,000 sick nodes at once: what the rails let through, how fast, at what cost
	$(BIN)/python -m benchmarks.storm

.PHONY: bench-quiet
bench-quiet: .venv/.installed ## a day of 2,000 healthy nodes with all its noise: nothing may be done
	$(BIN)/python -m benchmarks.quiet

MINUTES ?= 10
.PHONY: fuzz
fuzz: .venv/.installed ## everything in random order for MINUTES=10: crashes, people, late messages
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

.PHONY: bench-scan
bench-scan: setup ## what the scans cost at 250, 1,000 and 2,000 nodes: samples, time, memory, AMP's bill
	$(BIN)/python -u -m benchmarks.scan

.PHONY: build
build: .venv-sam/.installed ## sam validate, sam build, sizes
	$(SAM) validate --lint --template template.yaml --region us-east-1
	$(SAM) build --template template.yaml
	$(PYTHON) tools/check_sizes.py

.PHONY: scenarios
scenarios: setup ## every scenario, and what must be refused
	time $(BIN)/python -m pytest tests/e2e -q -n 2

.PHONY: lock
lock: .venv/.installed ## resolve the lock files anew
	$(BIN)/python tools/lock.py

.PHONY: clean
clean: ## remove everything that can be made again
	rm -rf .venv .venv-sam .aws-sam .local .mypy_cache .ruff_cache .pytest_cache .coverage .coverage.*
