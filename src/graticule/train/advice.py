"""What to try first: rules over the numbers of a profile. Each names the number that made it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graticule.train.split import Operation

WAIT, COPY, IDLE, OPTIMIZER = 0.10, 0.10, 0.10, 0.15
"""Shares of a step from which a part is worth a word."""
STARVED = 0.8
"""CPU seconds a busy second of wall time below which others have the processor."""
CROWDED = 1.5
"""Load a core above which threads wait for each other."""
FULL, ROOM = 0.85, 0.5
"""Shares of the memory from which it is nearly full, up to which there is room."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the rules read.

    seconds: `split.split`'s. cpu_seconds: of the whole process, a step. operations: of a step.
    fixed_bytes: at the peak, of what does not grow with the batch. peak_bytes: the peak;
    memory_bytes: what the device has. kernels_bf16: whether its matrix units know bfloat16.
    """

    device: str
    seconds: Mapping[str, float]
    cpu_seconds: float
    operations: list[Operation]
    threads: int
    cores: int
    load: float
    peak_bytes: int
    fixed_bytes: int
    memory_bytes: int
    kernels_bf16: bool
    precision: str
    batch: int
    accumulation: int

    def share(self, *parts: str) -> float:
        return sum(self.seconds[part] for part in parts) / self.seconds["step"]


def advice(measured: Measured) -> list[str]:
    """Sentences, the largest share of the step first. Where no rule holds, that is said."""
    rules = (_processor, _waits, _copies, _idle, _precision, _optimizer, _threads, _memory)
    found = [each for rule in rules for each in rule(measured)]
    if not found:
        found.append((0.0, _nothing(measured)))
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


Advice = Iterator[tuple[float, str]]
"""(share of the step it is about, sentence)"""


def _processor(m: Measured) -> Advice:
    busy = m.seconds["step"] - m.seconds["data_wait"]
    if m.device == "cpu" and m.cpu_seconds < STARVED * busy:
        # First: it spoils all other figures.
        told = (
            f"the process had a processor for {_ms(m.cpu_seconds)} of the {_ms(busy)} a step in"
            f" which it wanted one (load {m.load:.1f} on {m.cores} cores): others run on this"
            " machine; measure again when it is free, and until then compare CPU seconds"
        )
        yield 2.0, told


def _waits(m: Measured) -> Advice:
    share = m.share("data_wait")
    if share > WAIT:
        told = (
            f"data wait is {share:.0%} of the step ({_ms(m.seconds['data_wait'])}): the reader"
            " does not keep up. Ingest with --packing int16 (half the bytes), with --chunk so"
            " that a sample is few whole chunks, or put the store on a faster disk"
        )
        yield share, told


def _copies(m: Measured) -> Advice:
    share = m.share("copy")
    if share > COPY:
        told = (
            f"copies to the device that no computation hides are {share:.0%} of the step"
            f" ({_ms(m.seconds['copy'])}): ingest with --packing int16 (half the bytes)"
        )
        yield share, told


def _idle(m: Measured) -> Advice:
    share, calls = m.share("idle"), sum(operation.calls for operation in m.operations)
    if share > IDLE and calls:
        each = sum(operation.seconds for operation in m.operations) / calls
        told = (
            f"no operation runs in {share:.0%} of the step: its {calls:,.0f} operations take"
            f" {each * 1e6:,.0f} us on average, and Python does not call them faster. Larger"
            f" ones would hide that: {_larger(m)}"
        )
        yield share, told


def _precision(m: Measured) -> Advice:
    share = m.share("forward", "backward")
    if m.precision == "fp32" and m.kernels_bf16:
        told = (
            f"forward and backward are {share:.0%} of the step in float32, and this device"
            " multiplies bfloat16 faster: try train.precision=bf16, and compare the scores"
        )
        yield 0.5 * share, told
    if m.precision != "fp32" and m.device == "cpu" and not m.kernels_bf16:
        told = (
            f"forward and backward are {share:.0%} of the step in {m.precision}, for which this"
            " processor has no matrix kernels: operands are widened to float32 first; try"
            " train.precision=fp32"
        )
        yield 0.25 * share, told


def _optimizer(m: Measured) -> Advice:
    share = m.share("optimizer")
    if share > OPTIMIZER:
        told = (
            f"the optimizer is {share:.0%} of the step ({_ms(m.seconds['optimizer'])}) whatever"
            f" the number of samples: with train.accumulation={2 * m.accumulation} it is paid"
            " half as often a sample (another learning rate may then be right)"
        )
        yield share, told


def _threads(m: Measured) -> Advice:
    if m.device != "cpu":
        return
    compute = m.share("forward", "backward", "optimizer", "other")
    if m.threads > m.cores:
        told = (
            f"{m.threads} threads share {m.cores} cores and wait for each other: try"
            f" OMP_NUM_THREADS={m.cores}"
        )
        yield compute, told
    elif m.threads > 1 and m.load > CROWDED * m.cores:
        # Second to none but the busy machine itself: see docs/performance.md for what it costs.
        told = (
            f"{m.threads} threads wait for each other while others use these {m.cores} cores (the"
            f" load is {m.load:.1f}), and burn the processor while they wait: try"
            " OMP_NUM_THREADS=1 until the machine is free"
        )
        yield 1.5, told
    elif m.threads < m.cores and m.load < m.cores:
        told = (
            f"{m.threads} of {m.cores} cores compute, {compute:.0%} of the step, and the load is"
            f" {m.load:.1f}: try OMP_NUM_THREADS={m.cores}"
        )
        yield 0.4 * compute, told


def _memory(m: Measured) -> Advice:
    used = m.peak_bytes / m.memory_bytes
    if used > FULL:
        smaller = max(m.batch // 2, 1)
        told = (
            f"memory is {used:.0%} full at the peak ({_gib(m.peak_bytes)} of"
            f" {_gib(m.memory_bytes)}): train.batch={smaller} with"
            f" train.accumulation={m.accumulation * (m.batch // smaller)} trains on the same"
            " samples with less"
        )
        yield 1.0, told
    elif used < ROOM and m.accumulation > 1:
        told = (
            f"the peak is {used:.1%} of the memory ({_gib(m.peak_bytes)} of"
            f" {_gib(m.memory_bytes)}) while a step is cut into {m.accumulation} micro-batches:"
            f" {_larger(m)}, and less train.accumulation for the same step"
        )
        yield 0.05, told
    elif used < ROOM and m.device != "cpu":
        told = (
            f"the peak is {used:.1%} of the memory ({_gib(m.peak_bytes)} of"
            f" {_gib(m.memory_bytes)}): {_larger(m)}"
        )
        yield 0.05, told


def _larger(m: Measured) -> str:
    """The batch to try: twice, or what memory allows."""
    per_sample = (m.peak_bytes - m.fixed_bytes) / m.batch
    most = int((FULL * m.memory_bytes - m.fixed_bytes) / per_sample) if per_sample > 0 else m.batch
    if most <= m.batch:
        return f"memory does not allow more than train.batch={m.batch}"
    return f"try train.batch={min(2 * m.batch, most)} (memory would allow about {most})"


def _nothing(m: Measured) -> str:
    compute = m.share("forward", "backward")
    first = m.operations[0]
    return (
        f"nothing stands out: forward and backward are {compute:.0%} of the step, and the most"
        f" costly operation is {first.name} ({first.share:.0%}). What is left is the model:"
        " `graticule info` counts its operations, `graticule bench step` compares its speed with"
        " this machine's matrix product"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
