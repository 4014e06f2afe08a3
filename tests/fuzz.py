"""Explores random orders of everything for as long as it is told: `make fuzz`.

The same machine and the same rails as `tests/unit/application/test_random_order.py`, which runs a
few fixed orders; here each run takes others. What fails is shrunk, printed as the steps that lead
there, and kept in `.hypothesis/`, so that the next run begins with it.
"""

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Sequence

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.unit.application.random_order import RandomOrder

BATCH = 100
"""Orders of one round; the time is looked at between rounds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore; return 1 and print the steps if a rail did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long (default: 10)")
    parser.add_argument("--examples", type=int, default=0, help="how many orders, at the most")
    parser.add_argument("--steps", type=int, default=60, help="rules of one order (default: 60)")
    parser.add_argument("--no-shrink", action="store_true", help="print the first order that fails")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    phases = [Phase.explicit, Phase.reuse, Phase.generate, Phase.target]
    began, done = time.monotonic(), 0
    while time.monotonic() - began < 60 * options.minutes:
        batch = min(BATCH, options.examples - done) if options.examples else BATCH
        if batch <= 0:
            break
        try:
            run_state_machine_as_test(
                RandomOrder,
                settings=settings(
                    max_examples=batch,
                    stateful_step_count=options.steps,
                    deadline=None,
                    verbosity=Verbosity.normal,
                    phases=phases if options.no_shrink else [*phases, Phase.shrink],
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except Exception:
            # Whatever it is, the steps are in its notes.
            traceback.print_exc()
            print(f"a rail did not hold, after {done} to {done + batch} orders that passed")
            return 1
        done += batch
        print(f"{done} orders in {time.monotonic() - began:.0f} s: every rail held", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
