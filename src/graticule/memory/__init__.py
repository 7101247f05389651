"""What a step holds in memory: traced now, planned later."""

from graticule.memory.trace import MemoryTrace, trace_memory

__all__ = ["MemoryTrace", "trace_memory"]
