.PHONY: parity test fuzz fuzz-0 fuzz-1 mutants soak bench experiments setup

# Run every scenario in JAX and in Megatron, and compare the two.
parity: setup
	@mkdir -p build
	.venv/bin/python -m parity run --json build/parity.json

# Two workers share the machine, so each keeps to one thread.
test: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile

# 2,000 random scenarios, in two processes with seeds of their own.
fuzz: setup
	+$(MAKE) --jobs 2 --output-sync fuzz-0 fuzz-1

fuzz-0 fuzz-1: fuzz-%:
	OMP_NUM_THREADS=1 .venv/bin/python -m parity fuzz --examples 1000 --seed $* \
	  --failing build/fuzz-$*.toml

# Put every named fault into the JAX side: each must make a scenario fail.
mutants: setup
	.venv/bin/python -m parity mutants

# Live 2,000 random operations, kill 50 writers of checkpoints, damage 200.
soak: setup
	.venv/bin/python -m experiments.soak

# Time a step against its rivals and the memory floor.
bench: setup
	@mkdir -p build
	.venv/bin/python -m experiments.benchmark --json build/benchmark.json --plot build/benchmark.png

# All studies at their small setting: tables and figures in build/studies.
experiments: setup
	.venv/bin/python -m experiments.studies --setting small

# Make .venv, or bring it up to date. PYTHON names the interpreter to make it from.
setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt | .venv/bin/pip
	.venv/bin/python -m pip install -c constraints.txt -e ".[torch,experiments,dev]"
	@touch $@

# pip is the last thing that venv installs, so where it exists the environment is whole.
.venv/bin/pip:
	@python="$$(tools/find_python.sh)" && set -x && "$$python" -m venv .venv
