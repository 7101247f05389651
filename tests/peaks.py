"""What a step was seen to hold, on ranks that exchange."""

from graticule.memory.apply import Memory
from graticule.memory.plan import Plan
from graticule.memory.trace import trace_memory
from graticule.train.rehearsal import Rehearsal

TIMES = 4


def measured_peaks(job: Rehearsal, plans: list[Plan]) -> list[int]:
    """On a rank: bytes at the peak of a step of each plan, of ranks that exchange the least of
    several: gloo's thread lets go of what it has sent when the exchange is over, which is now and
    then a moment after this rank went on from it."""
    leads = job.config.train.leads
    times = 1 if job.running.mesh.size == 1 else TIMES

    def peak(plan: Plan) -> int:
        return trace_memory(job.step(leads, Memory(plan)), job.owned)[1].peak_bytes

    return [min(peak(plan) for _ in range(times)) for plan in plans]
