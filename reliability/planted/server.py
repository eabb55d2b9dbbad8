"""Runs `penstock` with `planted.runner` as its runner's process, in which marked requests fail.

The product has no switch for faults: this program replaces one name before it runs the product's own command line.
"""

from __future__ import annotations

import sys

import penstock.computing
from penstock.cli import main
from planted import clock

if __name__ == "__main__":
    clock.jump_on_signals()
    penstock.computing._RUNNER_PROGRAM = (sys.executable, "-m", "planted.runner")
    sys.argv[0] = "penstock"
    sys.exit(main())
