"""How much of each thing a broker keeps of one run. The same in every broker; in Redis these are its keys:

record, state         one string, one hash with a fixed set of fields
tasks, groups, open   what is outstanding, which admission bounds, and what the operator replayed of `dead`; in
                      `groups` also the settled ones of `settled`. Foreign entries leave at their first delivery
again                 outstanding tasks that were replayed: at most MAX_DEAD at once, and a part of `open`
settled               KEEP_SETTLED
published             KEEP_PUBLISHED
sheet                 MAX_REASONS, and one field per kind and verdict
steps                 about MAX_STEPS (a stream is cut at the end of a node, which holds 100 entries)
dead                  MAX_DEAD entries of at most MAX_DEAD_BYTES each
orders, heads         about MAX_ORDERS and MAX_HEADS
reigns                MAX_REIGNS
manifests             MAX_MANIFESTS; usually those that the trainer's publisher keeps alive
pins                  MAX_PINS
leases                one per reader and version that it reads; those that have run out leave with the next
places                one per service that shares a device; those that have run out leave with the next
moves                 about MAX_MOVES
peers, beat:<name>    MAX_PEERS, unless more are alive; a heartbeat's key lives for one lease
deleted               one string, for KEEP_DELETED_MS; all else lives for KEEP_ENDED_MS after the run's end
"""

from __future__ import annotations

KEEP_PUBLISHED = 4096
"""Published attempts that are remembered, so that repeating one is answered with success."""
KEEP_SETTLED = 64
"""Settled groups that stay readable for `headrace rollouts`."""
KEEP_ENDED_MS = 7 * 24 * 3600 * 1000
"""An ended run leaves the broker after this long."""
KEEP_DELETED_MS = 3600 * 1000
"""That a run was deleted is remembered this long."""
MAX_DEAD = 256
"""Entries of stream `dead`."""
MAX_DEAD_BYTES = 1 << 20
"""What `dead` keeps of a body."""
MAX_STEPS = 8192
"""Step records: many times what lies between two checkpoints."""
MAX_ORDERS = 1024
MAX_PEERS = 1024
"""Services that are remembered, unless more are alive at once."""
MAX_HEADS = 256
MAX_MOVES = 256
"""Notifications that a line for a device has moved."""
MAX_MANIFESTS = 2048
"""Of weight versions; twice what may be alive at once, so that only what a dead trainer left behind is dropped."""
MAX_REASONS = 512
"""Fields of a balance sheet; further reasons are counted together."""
SILENT_MS = 600_000
"""A service that fell silent is still shown this long."""
MAX_REIGNS = 256
"""Incarnations whose steps are remembered."""
MAX_PINS = 16
"""Weight versions that people keep."""
SECRET_BYTES = 32
