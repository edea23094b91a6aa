"""How the ranks of one save talk: rounds over a key-value store, never collectives.

Rules:
- A collective blocks for ever when one peer is gone, and must not run beside the user's own; a key-value store does
  neither. Nothing here touches a process group; everything may run in a background thread.
- One `Round` is the conversation of one save. Rank 0 leads: it opens the round, collects what the others say, and
  publishes one verdict, which every rank returns or raises alike.
- Every wait ends: by an answer, by a rank's failure, by lack of progress, by silence, or by a deadline.
- Deciding is pure (`joining`, `PeerWatch`, the table of transitions); the loops around only carry bytes.
"""

from .group import Group
from .kv import KV, C10dKV, MemoryKV
from .round import Round
from .watch import Beat, Ended, Now, PeerWatch, Timeouts, blame, bytes_text, joining, typical

__all__ = [
    "KV",
    "Beat",
    "C10dKV",
    "Ended",
    "Group",
    "MemoryKV",
    "Now",
    "PeerWatch",
    "Round",
    "Timeouts",
    "blame",
    "bytes_text",
    "joining",
    "typical",
]
