"""Weight synchronisation, each figure against its physical limit or a peer in the same run."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ProcessPoolExecutor

from benchmarks.report import Figure, arguments, report
from benchmarks.weights_world import FORKS, SMALL, Sizes

MEASUREMENTS = {
    "tcp": "benchmarks.weights_copying:tcp",
    "shm": "benchmarks.weights_copying:shm",
    "publish": "benchmarks.weights_copying:publishing",
    "egress": "benchmarks.weights_relay:egress",
    "swap": "benchmarks.weights_engine:swap",
    "gap": "benchmarks.weights_engine:gap",
    "staging": "benchmarks.weights_engine:staging",
    "delta_sizes": "benchmarks.weights_relay:delta_sizes",
    "links": "benchmarks.weights_relay:links",
    "stopped_peer": "benchmarks.weights_trials:stopped_peer",
    "exact": "benchmarks.weights_bits:exact",
    "memory": "benchmarks.weights_trials:memory",
}


def measure(name: str, sizes: Sizes) -> dict[str, Figure]:
    module, _, function = MEASUREMENTS[name].partition(":")
    found: dict[str, Figure] = getattr(importlib.import_module(module), function)(sizes)
    return found


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=[*MEASUREMENTS], default=[*MEASUREMENTS], metavar="NAME")
    parser.add_argument("--small", action="store_true", help="small models and few repeats, to see that all runs")
    options = parser.parse_args()
    sizes = SMALL if options.small else Sizes()
    figures: dict[str, Figure] = {}
    # Each in a process of its own: what one leaves in memory is of no matter to the next.
    with ProcessPoolExecutor(1, FORKS, max_tasks_per_child=1) as pool:
        for name in options.only:
            figures |= pool.submit(measure, name, sizes).result()
    return report("weight synchronisation", figures, json_file=options.json, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
