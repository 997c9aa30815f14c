"""How much of each thing a broker keeps of one run, besides what is outstanding. The same in every broker."""

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
MAX_REASONS = 512
"""Fields of a balance sheet; further reasons are counted together."""
SILENT_MS = 600_000
"""A service that fell silent is still shown this long."""
MAX_REIGNS = 256
"""Incarnations whose steps are remembered."""
