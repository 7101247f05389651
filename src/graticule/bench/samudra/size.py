"""How large the samudra bench is, and what was published of each act."""

from dataclasses import dataclass, field

from graticule.data.basin import Ocean


@dataclass(frozen=True, kw_only=True)
class Size:
    """steps, batch: leads of a sample, samples of a training step. repeats: of what is timed, after
    one that is not. samples, slow_samples: read in one repeat, by the slow way fewer.
    training_steps: timed, of each loader, after one that is not. workers: processes that read for
    `before` and `after` in training; 0: the training process itself. threads: of `after`.
    leads: of a forecast, a year. log_every: of its leads. times_a_chunk: of the file with long
    chunks."""

    basin: Ocean = field(default_factory=lambda: Ocean(num_years=3, spin_up_years=1))
    steps: int = 4
    batch: int = 4
    repeats: int = 5
    samples: int = 8
    slow_samples: int = 2
    training_steps: int = 5
    workers: int = 1
    threads: int = 4
    leads: int = 36
    log_every: int = 10
    times_a_chunk: int = 10


PUBLISHED = {
    "loader": "published: 5x; elsewhere here 4 to 6x in CPU-seconds",
    "wait": "published: 75 % of a step before",
    "chunks": "published: no help for random access",
    "normalise": "published: moved to the device, no figure of its own",
    "logging": "published: 4x, 1,152 to 4,800 simulated years a day, with images besides",
    "apart": "published: no figure of its own",
}
