"""Weight synchronisation, each figure against its physical limit or a peer in the same run.

    name          figure                  bar      what is divided by what
    tcp           tcp_vs_socket           0.70     bytes/s of a verified version over loopback, over a bare socket's
                  tcp_vs_gloo             -        the same, over those of a broadcast of torch.distributed
                  socket_vs_memcpy        -        bytes/s of the bare socket, over those of memcpy
    shm           shm_vs_memcpy           0.35     bytes/s from seal to commit on one host, over those of memcpy
    publish       publish_stall           ≤ 1.3    seconds of a publish call, over those of casting the parameters once
    egress        egress_4, egress_8      ≤ 2.0    bytes that the origin sends to so many hosts, over those of the model
                  last_vs_first_N         -        seconds until the last host has it, over those until the first has
    swap          swap_ms                 ≤ 1      milliseconds of a swap, beside those of binding its parameters anew
    gap           gap_steps               ≤ 1      what a token waits longer at a commit, over one decode step or 5 ms
                  gap_ms                  -        the same, beside what tokens wait longer without a commit
                  gap_vs_stop_all         -        the same, over the pause where decoding stops and the model is copied
    staging       staging_slowdown        ≤ 0.15   share of decode steps/s lost while versions are staged
    delta_sizes   delta_vs_entropy        ≤ 1.25   bytes of deltas, over their entropy
                  delta_vs_xor            ≤ 0.6    bytes of deltas, over those of compressed xor
    links         delta_speedup_1g        5        seconds of a full version over a 1 Gb/s link, over those of a delta
                  delta_speedup_100m      20       the same over 100 Mb/s
                  link_used_N             -        bits/s of the full version, over those of a bare socket on that link
                  delta_share_N           -        bytes of the delta, over those of the model
    stopped_peer  stopped_peer_commits    1        commits of two receivers while a third is stopped, over those without
                  stopped_peer_skipped    ≤ 0      publishes that are skipped more than without
    exact         exact                   1        versions and deltas that came with all their bits, over all
    memory        producer_memory         ≤ 64     MiB that a producer takes, beyond two models (packing: three)
                  trainer_memory          ≤ 64     MiB that a trainer takes, beyond its parameters and live segments

A random Llama of 272 tensors and 600 MB in bfloat16; of 64 MB for egress and stopped_peer. Repeats are interleaved
with their baselines, figures are medians, those of swap and gap 99th percentiles. Hosts are folders of shared memory,
with processes and an arena of their own. What copies, copies between touched buffers of torch. The decode step of gap
is that of 30 narrow layers, so that the step does not hide the gap; staging beside SmolLM2-135M, which decodes on a
core of its own. Links are shaped by a token bucket between two processes. Versions of links change as many elements
by as many steps as the last step of `benchmarks/weight_steps.py`, at random places. Every delta is encoded anew.
The stopped receiver stands still from the second version to the last: with a lease on it, where it is seen to have one
before it has committed. Versions of tcp, shm, staging and memory are the same bytes again. The exact
chain is a training whose versions come to another host as deltas; the others are deltas of random bits.
"""

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
            found = pool.submit(measure, name, sizes).result()
            for figure, one in found.items():
                print(f"{figure}: {one.value:.4g} {one.unit}, ratio {one.ratio}", file=sys.stderr)
            figures |= found
    return report("weight synchronisation", figures, json_file=options.json, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
