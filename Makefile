PY := .venv/bin/python
.PHONY: check test proto env
env: .venv/ready
.venv/ready: pyproject.toml constraints.txt
	python3 -m venv .venv
	.venv/bin/pip install -c constraints.txt torch==2.13.0 numpy
	.venv/bin/pip install -c constraints.txt -e '.[dev]'
	touch $@
check: env
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
test: env
	.venv/bin/pytest
