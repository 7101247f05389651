"""Where a run and its numbers come from: rows for the tables, and the commands that repeat it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graticule.config import Config
from graticule.data.samples import SampleSource
from graticule.report.folder import RunFolder, lineage
from graticule.report.page import Html, number, table
from graticule.report.picture import lead_words
from graticule.report.subject import Opened, Subject

MOST_STARTS = 6
"""Initial times that a command names one by one."""


def model_rows(subject: Subject) -> list[list[Any]]:
    run, config = subject.run, subject.run.config
    model, settings = config.model, config.train
    rows: list[list[Any]] = [
        ["name", config.name or "unnamed"],
        ["parameters", number(run.description.get("parameters"))],
        ["model", f"{model.family}, {model.words}"],
        ["steps", f"{run.steps:,} of {settings.steps:,}"],
        ["samples of a step", f"{settings.batch * settings.accumulation:,}"],
        ["leads in the loss", f"{settings.leads} (gradient through"
                              f" {settings.detach_every or settings.leads} at a time)"],
        ["loss", f"{_loss(run.config)},"
                 f" {'area-weighted' if settings.area_weighted else 'unweighted'}"],
        ["learning rate", f"{settings.learning_rate:g}, {settings.schedule}, after"
                          f" {settings.warmup_steps} steps of warm-up"],
        ["precision", settings.precision],
        ["seed", f"{settings.seed}"],
    ]  # fmt: skip
    if subject.lineage or run.start_from:
        names = [f"{r.config.name} (step {r.steps:,})" for r in subject.lineage]
        rows.append(["weights come from", ", then ".join(names) or str(run.start_from)])
    if subject.forecast:
        opened = subject.forecast
        first, last = opened.init_times[0], opened.init_times[-1]
        rows += [
            ["forecast", f"{len(opened.init_times):,} initial times, {first:%Y-%m-%d %H:%M} to"
                         f" {last:%Y-%m-%d %H:%M}, {len(opened.hours)} leads to"
                         f" {lead_words(opened.hours)[-1]}"],
            ["weights of the forecast", f"{opened.attributes.get('weights', 'unknown')},"
                                        f" {opened.attributes.get('run_fingerprint', 'unknown')}"],
        ]  # fmt: skip
    return rows


def _loss(config: Config) -> str:
    bayes = config.bayes
    if bayes.likelihood == "none":
        scored = str(config.train.loss)
    else:
        number = f"{bayes.members} member{'s' if bayes.members > 1 else ''}"
        detail = {"crps": f"alpha {bayes.alpha:g}", "moments": f"floor {bayes.floor:g}",
                  "gaussian": f"deviation {bayes.floor:g}"}[bayes.likelihood]  # fmt: skip
        scored = f"{bayes.likelihood} of {number} ({detail})"
    if bayes.weights:
        scored += f" + {bayes.cold:g} x KL of the weights and the prior {bayes.prior}"
    return scored


def data_rows(subject: Subject) -> list[Html]:
    """Tables of the data, the splits and the channels."""
    run, store = subject.run, subject.training_store
    config = run.config.data
    fields, statistics = run.state.get("fields", {}), run.state.get("statistics", {})
    rows: list[list[Any]] = [["store", config.store or "none named"]]
    if store and str(store.path) != config.store:
        rows.append(["store of this report", str(store.path)])
    grid = store.grid if store else None
    lat = grid.lat.tolist() if grid else fields.get("lat")
    lon = grid.lon.tolist() if grid else fields.get("lon")
    if lat and lon:
        around = "" if grid is None else (", round the globe" if grid.periodic else ", a region")
        extent = f"{lat[0]:g} to {lat[-1]:g} north, {lon[0]:g} to {lon[-1]:g} east"
        rows.append(["grid", f"{len(lat)} × {len(lon)} points (lat × lon), {extent}{around}"])
    if store:
        rows.append(["times", f"{len(store.times):,}, {store.times.date(0)} to"
                              f" {store.times.date(len(store.times) - 1)},"
                              f" {store.times.calendar} calendar"])  # fmt: skip
        dry = 1 - float(store.wet.mean())
        rows.append(["land", f"{dry:.0%} of the cells" if dry else "none"])
    if statistics:
        rows.append(["statistics", f"of {statistics['num_times']:,} times, {statistics['first']} to"
                                   f" {statistics['last']}"])  # fmt: skip
    tables = [table("The data", ["what", "value"], rows), _splits(subject)]
    channels = _channels(subject)
    if channels:
        head = ["channel", "role", "units", "long name", "training mean",
                "training standard deviation"]  # fmt: skip
        tables.append(table("Channels", head, channels))
    return tables


def _splits(subject: Subject) -> Html:
    config, store = subject.run.config.data, subject.training_store
    if store is None:
        rows = [[split, _dates(getattr(config, split)) or "as the store declares"]
                for split in ("train", "validation", "test")]  # fmt: skip
        return table("Dates of the splits", ["split", "first to last date"], rows)
    ranges = SampleSource(store, config).ranges
    told = [[split, _dates(ranges[split]) or "none",
             int(store.times.within(ranges[split]).sum()) if ranges[split] else 0]
            for split in ("train", "validation", "test")]  # fmt: skip
    return table("Dates of the splits", ["split", "first to last date", "times"], told)


def _dates(ranges: Sequence[str]) -> str:
    return ", ".join(text.replace("/", " to ") for text in ranges)


def _channels(subject: Subject) -> list[list[Any]]:
    run, store = subject.run, subject.training_store
    known = {}
    if subject.forecast:
        known = {channel.name: channel for channel in subject.forecast.channels}
    if store:
        known |= {channel.name: channel for channel in (*store.channels, *store.statics)}
    units = run.state.get("fields", {}).get("units", {})
    statistics = run.state.get("statistics", {})
    place = {name: i for i, name in enumerate(statistics.get("names", ()))}
    rows = []
    for role, names in run.description.get("channels", {}).items():
        for name in names:
            channel = known.get(name)
            at = place.get(name)
            rows.append([
                name, role, channel.units if channel else units.get(name, "unknown"),
                (channel.long_name or channel.standard_name or "–") if channel else "–",
                None if at is None else statistics["mean"][at],
                None if at is None else statistics["std"][at],
            ])  # fmt: skip
    return rows


def origin_rows(subject: Subject) -> list[list[Any]]:
    """Fingerprints: equal ones mean equal configurations, fields, statistics or weights."""
    run = subject.run
    saved = run.description.get("fingerprints", {})
    rows: list[list[Any]] = [["configuration", run.fingerprint]]
    rows += [[name, saved[name]] for name in ("store", "statistics") if name in saved]
    for group, digest in run.weights().items():
        kind = "moving average" if group == "average" else "last"
        rows.append([f"weights ({kind}) at step {run.state.get('step', '?')}", digest])
    if subject.forecast:
        attributes = subject.forecast.attributes
        rows.append(["configuration of the forecast", attributes.get("config_fingerprint", "–")])
        rows.append(["written by", attributes.get("source", "–")])
    if subject.scores:
        rows.append(["scores", subject.scores["fingerprint"]])
    return rows


def commands(subject: Subject) -> list[str]:
    """What to type to make a generated store, train, forecast, score and report again.

    Every run comes after the one that its weights come from, the runs compared with last. Folders
    are written with `-again` behind the run's own name.
    """
    made = store_command(subject)
    lines = [made] if made else []
    trained: set[Path] = set()
    compare: list[str] = []
    kept = [("", subject.run, list(subject.lineage), subject.forecast)]
    for label, run in subject.others.items():
        file = run.path / "forecast.zarr"
        kept.append((label, run, lineage(run)[0], Opened.read(file) if file.exists() else None))
    for label, run, earlier, opened in kept:
        start = ""
        for each in (*reversed(earlier), run):
            settings = [f"train.start_from={start}"] if start else []
            out = _again(each)
            if each.path.resolve() not in trained:
                lines.append(_line("graticule train", each.path / "config.json", settings, out))
                trained.add(each.path.resolve())
            start = str(out)
        out = Path(start)
        if not label or opened is not None:
            lines.append(_line("graticule forecast", out, _forecast_settings(run, opened), None,
                               _starts(subject, opened)))  # fmt: skip
            lines.append(_line("graticule evaluate", out / "forecast.zarr", [], None))
        if label:
            compare += ["--compare", f"{label}={out}"]
    lines.append(f"{_line('graticule report', _again(subject.run), [], None)} {shlex.join(compare)}"
                 .rstrip())  # fmt: skip
    return lines


def store_command(subject: Subject) -> str | None:
    """What makes the store of the training, if that is the demo planet or ocean; else None."""
    path = subject.run.config.data.store
    provenance = subject.training_store.attributes.get("provenance", {}) if (
        subject.training_store
    ) else {}  # fmt: skip
    for kind, options in _GENERATED.items():
        made = provenance.get(kind[0])
        if not made or not path or not all(name in made for name in options):
            continue
        words = ["graticule", "data", kind[1], "--out", path]
        for name, option in options.items():
            words += [option, f"{made[name]:g}" if isinstance(made[name], float) else
                      str(made[name])]  # fmt: skip
        if provenance.get("coast"):
            words.append("--coast")
        return shlex.join(words)
    return None


_SHARED = {"num_lat": "--lat", "num_lon": "--lon", "dt_seconds": "--dt-seconds", "seed": "--seed"}
_GENERATED = {
    ("planet", "demo"): {"num_runs": "--runs", "samples_per_run": "--samples", **_SHARED},
    ("ocean", "ocean"): {"num_years": "--years", "calendar": "--calendar",
                         "max_speed": "--max-speed", **_SHARED},
}  # fmt: skip
"""(key of a store's provenance, kind of `graticule data`): options by what was recorded."""


def _again(run: RunFolder) -> Path:
    return run.path.with_name(run.path.resolve().name + "-again")


def _line(
    command: str, what: Path, settings: list[str], out: Path | None, starts: tuple[str, ...] = ()
) -> str:
    words = [*command.split(), str(what)]
    for start in starts:
        words += ["--start", start]
    for setting in settings:
        words += ["--set", setting]
    if out is not None:
        words += ["--out", str(out)]
    return shlex.join(words)


def _forecast_settings(run: RunFolder, opened: Opened | None) -> list[str]:
    """What `graticule forecast` was told with --set."""
    made = opened.config if opened else None
    if made is None:
        return []
    ours, theirs = run.config.to_dict(), made.to_dict()
    found = []
    for section in ("forecast", "data"):
        for key, value in theirs[section].items():
            # The forecast needs no grid: it takes the store's.
            if value != ours[section][key] and key != "grid":
                text = ",".join(value) if isinstance(value, list) else str(value)
                found.append(f"{section}.{key}={text}")
    return found


def _starts(subject: Subject, opened: Opened | None) -> tuple[str, ...]:
    """Initial times that were named, where they are not those of the split."""
    made = opened.config if opened else None
    if made is None or subject.store is None or opened is None:
        return ()
    dates = opened.init_times
    try:
        usual = SampleSource(subject.store, made.data).starts(
            made.forecast.split, made.forecast.leads
        )[:: made.forecast.every]
        if [str(subject.store.times.date(int(i))) for i in usual] == [str(d) for d in dates]:
            return ()
    except ValueError:
        pass  # no such split: they were named
    named = tuple(date.isoformat() for date in dates[:MOST_STARTS])
    return (*named, "...") if len(dates) > MOST_STARTS else named
