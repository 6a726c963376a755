# kvrelay: `make serve` and `make test` are all a newcomer needs; both set up what is missing first.
# More arguments: make serve ARGS="--port 9000 --decode 2", make test ARGS="tests/wire -x", make verify ARGS="--help".
# JOBS=1 runs the tests in one process instead of two.

.DEFAULT_GOAL := help
.PHONY: help setup clients constraints demo serve test test-all chaos overload fuzz soak check docs licences images verify kind-up kind-test kind-down clean

# A script's own folder must not come before the installed packages: ours have folders named like other packages.
export PYTHONSAFEPATH := 1

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf '%-12s %s\n' "$$target" "$$text"; done

setup: ## make the environment in .venv (make setup PYTHON=… TORCH=cpu|cuda)
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' sh tools/setup.sh

serve: setup ## serve the demo model at http://127.0.0.1:8000
	@exec .venv/bin/kvrelay local $(ARGS)

clients: setup ## make environments for other projects' clients in .clients, for the tests
	@sh tools/clients.sh

constraints: setup ## write the versions that are installed into constraints.txt
	@{ sed -n '/^#/p' constraints.txt; .venv/bin/python -m pip freeze --exclude-editable | grep -v '^torch='; } >constraints.new
	@mv constraints.new constraints.txt

JOBS ?= 2
# A process takes a file of tests at a time, long files first (tests/conftest.py): pytest-xdist's own order would end with one of them.
PYTEST = .venv/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 20

test: setup ## run the tests that take minutes: after every change
	$(PYTEST) -m 'not full' $(ARGS)

test-all: setup clients ## run all tests: before a commit reaches main
	$(PYTEST) --hypothesis-profile all --ignore tests/e2e --ignore tests/reliability --ignore tests/cluster
	$(PYTEST) --hypothesis-profile all -n 0 tests/e2e tests/reliability

chaos: demo ## kill, stop, drain and cut real processes under load; every answer must stay the same (ARGS="--seed 2")
	PYTHONPATH=.:benchmarks .venv/bin/python -m tests.reliability.chaos $(ARGS)

overload: demo ## up to ten times more requests than there is room for: how many are answered in time (minutes)
	PYTHONPATH=. .venv/bin/python -m tests.reliability.overload $(ARGS)

fuzz: setup ## fuzz wire and HTTP, send strangers to all ports, tell hundreds of stories of faults (minutes)
	PYTHONPATH=. .venv/bin/python -m tests.reliability.fuzz_wire $(ARGS)
	PYTHONPATH=. .venv/bin/python -m tests.reliability.fuzz_http $(ARGS)
	PYTHONPATH=. .venv/bin/python -m tests.reliability.strangers $(ARGS)
	.venv/bin/python -m pytest --hypothesis-profile fuzz tests/simulation tests/reliability/test_lying_frames.py --timeout 1800

soak: demo ## ten minutes of mixed load with cancellations: memory must stay flat (ARGS="--seconds 3600")
	PYTHONPATH=. .venv/bin/python -m tests.reliability.soak $(ARGS)

demo: setup ## convert the demo model, if that was not done yet
	@.venv/bin/python -c "from kvrelay.launcher.models import resolve_model; resolve_model('demo')"

check: setup ## lint, format, types, import rules, what is generated
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy benchmarks examples tools/chart.py tools/pages.py tools/site.py
	.venv/bin/lint-imports
	.venv/bin/python tools/chart.py --check
	.venv/bin/python tools/pages.py --check

docs: setup ## build the site into build/site; a link or an anchor that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

licences: setup ## list the licences of all that is installed; one that pyproject.toml does not allow is an error
	@.venv/bin/pip-licenses

images: ## build all images and push them (make images REGISTRY=ghcr.io/you VERSION=0.1.0; needs docker)
	@REGISTRY='$(REGISTRY)' VERSION='$(VERSION)' sh tools/images.sh

verify: setup ## compare greedy tokens with transformers, prompt by prompt (minutes)
	@exec .venv/bin/kvrelay verify --model demo --dtype float32 $(ARGS)

kind-up: setup ## serve the demo model on a Kubernetes cluster on this machine (needs docker, kind, kubectl, helm)
	@sh tools/kind.sh up

kind-test: setup ## run the cluster tests on that cluster
	@sh tools/kind.sh test $(ARGS)

kind-down: ## remove it
	@sh tools/kind.sh down

clean: ## remove the environment and everything that tools left here
	rm -rf .venv .clients build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
