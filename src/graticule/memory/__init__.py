"""What a step holds in memory: traced, planned for a budget, and kept to."""

from graticule.memory.trace import MemoryTrace, trace_memory

__all__ = ["MemoryTrace", "trace_memory"]
