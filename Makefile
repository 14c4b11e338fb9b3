# Every target sets itself up first: `.venv` is made when it is absent and installed again when the
# dependencies change. Choose another interpreter with `make PYTHON=python3.12 …`; pip's own settings
# (index, wheels, cache) apply as they are, so a CPU-only or a CUDA build of torch is a matter of them.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := test
.PHONY: venv demo demo-full vllm-smoke test check bench lock clean

venv: $(STAMP)

$(STAMP): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c .ci/constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)          ## the whole job on the built-in corpus: data, SFT, GRPO, evaluation, report
	$(BIN)/python -m scripts.demo

demo-full: $(STAMP)     ## the same from random weights, without the shipped warm start
	$(BIN)/python -m scripts.demo --full

vllm-smoke:             ## GRPO with rollouts from vLLM's CPU engine, in an environment of its own
	PYTHON="$(PYTHON)" scripts/vllm_smoke

test: $(STAMP)          ## the tests, without the slow ones
	$(BIN)/python -m pytest

check: $(STAMP)         ## lint, format, types
	scripts/check

bench: $(STAMP)         ## speed measurements, printed
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

lock: $(STAMP)          ## write .ci/constraints.txt from what is installed
	scripts/lock

clean:                  ## remove the environment; runs/ stays
	rm -rf .venv .venv-engines
