"""Loaded by every engine process of this rig: makes several engines live on
two cores.

vLLM's worker and engine core talk over shared memory and wait by calling
sched_yield in a loop. Since Linux 6.18 a yield gives up the whole time slice,
so on a busy machine a yielding worker falls behind by seconds, up to the
lease of the KV blocks (30 s stalls of decode were seen). A short sleep costs
latency only. The NIXL worker also pins itself to the last core of its NUMA
node, which would put all engines of one machine on the same core.
"""

import os
import time

os.sched_yield = lambda: time.sleep(0.0002)
os.sched_setaffinity = lambda pid, mask: None
