"""What `graticule data KIND` does: arguments to a call of the library, its result to `output`."""

import argparse
from pathlib import Path
from typing import Any, Literal

from graticule.cli.output import Bar, names_of, print_result, print_store


def run_data_demo(options: argparse.Namespace) -> int:
    from graticule.data.demo import write_demo_store
    from graticule.data.planet import Planet

    planet = Planet(
        num_runs=options.runs, samples_per_run=options.samples, seed=options.seed,
        num_lat=options.lat, num_lon=options.lon, dt_seconds=options.dt_seconds,
    )  # fmt: skip
    out = options.out or ("data/planet-coast.zarr" if options.coast else "data/planet.zarr")
    with Bar("simulating", "samples") as bar:
        store = write_demo_store(
            out, planet, coast=options.coast, workers=options.workers, progress=bar
        )
    print_store(options, store)
    return 0


def run_data_ocean(options: argparse.Namespace) -> int:
    from graticule.data.basin import Ocean
    from graticule.data.demo import write_ocean_store

    ocean = Ocean(
        num_lat=options.lat, num_lon=options.lon, num_years=options.years, seed=options.seed,
        calendar=options.calendar, max_speed=options.max_speed, dt_seconds=options.dt_seconds,
        test_years=options.test_years,
    )  # fmt: skip
    with Bar("simulating", "dates") as bar:
        store = write_ocean_store(options.out, ocean, workers=options.workers, progress=bar)
    print_store(options, store)
    return 0


def run_data_ingest(options: argparse.Namespace) -> int:
    from graticule.data.ingest import ingest

    roles: dict[str, Any] = {}
    for role in ("forcing", "static", "diagnostic"):
        roles |= {name: role for name in names_of(getattr(options, role))}
    splits = {
        split: names_of(getattr(options, split))
        for split in ("train", "validation", "test")
        if getattr(options, split)
    }
    with Bar("ingesting", "steps") as bar:
        store = ingest(
            [Path(source) for source in options.sources],
            Path(options.out),
            source=options.source,
            variables=names_of(options.variables) or None,
            levels=_levels(options.levels),
            roles=roles,
            units=dict(_pair(unit) for unit in options.units),
            packing=options.packing,
            inner_chunk=_chunk(options.chunk),
            splits=splits,
            time=options.time,
            drop_south_pole=options.drop_south_pole,
            allow_missing_chunks=options.allow_missing_chunks,
            workers=options.workers,
            part=_part(options.part),
            progress=bar,
        )
    if store is None:
        print_result(
            options, {"store": options.out, "part": options.part, "complete": False},
            lambda: f"{options.out}: part {options.part} is written, others are not yet",
        )  # fmt: skip
        return 0
    print_store(options, store)
    return 0


def run_data_check(options: argparse.Namespace) -> int:
    from graticule.data.check import check
    from graticule.data.store import Store

    policies: Any = dict(_pair(pair, "--policy") for pair in names_of(options.policy))
    with Bar("checking", "times") as bar:
        report = check(Store(options.store), policies=policies, progress=bar)
    print_result(options, report.to_json(), lambda: "\n".join(report.lines()))
    return 0 if report.ok else 1


def run_data_stats(options: argparse.Namespace) -> int:
    from graticule.data.statistics import compute
    from graticule.data.store import Store

    store = Store(options.store)
    ranges = names_of(options.train) or store.splits.get("train")
    if not ranges:
        raise ValueError(f"{store.path} declares no train split: give --train first/last")
    with Bar("statistics", "times") as bar:
        found = compute(store, store.times.within(ranges).nonzero()[0], bar)
    found.save(store)
    rows = {
        name: {"mean": mean, "std": std, "tendency_std": tendency, "count": int(count)}
        for name, mean, std, tendency, count in zip(
            found.names, found.mean.tolist(), found.std.tolist(), found.tendency_std.tolist(),
            found.count, strict=True,
        )
    }  # fmt: skip
    head = f"{found.num_times} times, {found.first} to {found.last}"
    lines = [f"{name:24} mean {row['mean']:12.5g}   std {row['std']:12.5g}"
             f"   step std {row['tendency_std']:12.5g}" for name, row in rows.items()]  # fmt: skip
    values = {
        "first": found.first, "last": found.last, "num_times": found.num_times, "channels": rows,
    }  # fmt: skip
    print_result(options, values, lambda: "\n".join([head, *lines]))
    return 0


def _pair(text: str, option: str = "--units") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        what = "VARIABLE=UNITS" if option == "--units" else "FAULT=POLICY"
        raise ValueError(f"{option} {text}: write {what}")
    return name, value


def _levels(text: str | None) -> list[float] | Literal["all"] | None:
    """Numbers, `all`, or the levels of a recipe's channels."""
    from graticule.recipes import RECIPES, recipe

    if text is None or text == "all":
        return text  # type: ignore[return-value]
    if text in RECIPES or text.endswith(".json"):
        data = recipe(text).data
        channels = (*data.prognostic, *data.diagnostic, *data.forcing)
        levels = [float(name.split("@")[1]) for name in channels if "@" in name]
        if not levels:
            raise ValueError(f"--levels {text}: no channel of this recipe has a level")
        return list(dict.fromkeys(levels))
    try:
        return [float(part) for part in names_of(text)]
    except ValueError:
        raise ValueError(
            f"--levels {text}: write numbers a,b,c, `all`, or a recipe ({', '.join(RECIPES)})"
        ) from None


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit()):
        raise ValueError(f"--part {text}: write I/N, for instance 1/32")
    return int(part), int(parts)


def _chunk(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) not in (2, 3):
        raise ValueError(
            f"--chunk {text}: write CHANNELS,ROWS or CHANNELS,ROWS,COLUMNS, for instance 93,32"
        )
    if min(sizes) < 1:
        raise ValueError(f"--chunk {text}: each must be at least 1")
    return sizes
