"""``python -m parity``: lists and runs scenarios."""

from parity.cli import app

app(prog_name="python -m parity")
