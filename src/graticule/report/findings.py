"""What a report says first: how good the forecasts are, and what a reader should be warned of."""

from typing import Any

from graticule.evaluate.scores import ALIKE
from graticule.report.page import duration
from graticule.report.picture import figures, lead_words
from graticule.report.subject import Subject, lead_names, ratios, series

REFERENCES = ("persistence", "climatology")
BEYOND = 0.1
"""Of the range of training values, from which a reader is warned that a forecast leaves it."""
NOISE = 2
"""Power at short waves, over the truth's, from which a reader is warned."""
LEVEL = 1.005
"""Of two RMSEs: up to this ratio the runs are level, as the curves say it."""


def summary(subject: Subject) -> list[str]:
    """Sentences: what model, what data, how good, as active as the truth or not, what it cost."""
    told = [_model(subject), _training(subject)]
    if subject.scores:
        told += [_skill(subject.scores), _ensemble(subject.scores), *_against(subject)]
        told += [*_activity(subject.scores), *_ocean(subject.scores)]
    elif subject.forecast:
        told.append("The forecast has not been scored.")
    else:
        told.append("There is no forecast of this run yet.")
    return [sentence for sentence in (*told, _cost(subject)) if sentence]


def warnings(subject: Subject) -> list[str]:
    """In words and numbers, the gravest kinds first."""
    return [
        *subject.troubles,
        *subject.run.troubles,
        *_unfinished(subject),
        *_of_losses(subject),
        *_of_forecast(subject),
        *(_of_scores(subject.scores) if subject.scores else ()),
        *_of_range(subject),
        *_of_comparison(subject),
    ]


def _model(subject: Subject) -> str:
    run = subject.run
    said = f"{run.config.name} is a {run.config.model.family} model"
    if "parameters" in run.description:
        said += f" of {run.description['parameters']:,} parameters"
    channels = run.description.get("channels", {})
    predicted = [*channels.get("prognostic", []), *channels.get("diagnostic", [])]
    if predicted:
        listed = ", ".join(predicted) if len(predicted) <= 8 else f"{len(predicted)} channels"
        said += f" that predicts {listed}"
    if subject.forecast:
        height, width = subject.forecast.grid
        step = lead_words(subject.forecast.hours[:1])[0]
        said += f" on a grid of {height} × {width} points in steps of {step}"
    return said + "."


def _training(subject: Subject) -> str:
    run, settings = subject.run, subject.run.config.train
    samples = settings.batch * settings.accumulation
    leads = "one lead" if settings.leads == 1 else f"{settings.leads} leads"
    said = f"It was trained for {run.steps:,} steps of {samples} samples over {leads}"
    if run.start_from:
        names = " from ".join(r.config.name for r in subject.lineage)
        said += f", from the weights of {names or run.start_from.name}"
    losses = [line for line in run.metrics if line.get("validation_loss") is not None]
    if losses:
        said += f"; its validation loss at step {losses[-1]['step']:,} was"
        said += f" {losses[-1]['validation_loss'] / settings.leads:.4g}"
        if settings.leads > 1:
            said += f" (mean over {leads})"
    return said + "."


def _skill(scores: dict[str, Any]) -> str:
    model, names = series(scores, "normalised"), lead_names(scores)
    if not model:
        return ""
    first, last = min(model), max(model)
    said = (
        f"Its RMSE in units of the training standard deviation (mean over channels) is"
        f" {model[first]:.3g} at {names[first]}"
    )
    if last != first:
        said += f" and {model[last]:.3g} at {names[last]}"
    parts = []
    for reference in REFERENCES:
        found = ratios(scores, reference)
        if found:
            low, high = min(found.values()), max(found.values())
            span = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
            parts.append(f"{span} times that of {reference}")
    return f"{said}: {' and '.join(parts)}." if parts else f"{said}."


def _ensemble(scores: dict[str, Any]) -> str:
    """Of a forecast with members: whether they spread as far as their mean errs."""
    found = scores.get("ensemble")
    if not found:
        return ""
    if found["members"] == 1:
        return "The forecast is an ensemble of one member, which has no spread."
    said = (
        f"The forecast is an ensemble of {found['members']} members, and its errors here are those"
        " of their mean"
    )
    known = [row["spread_skill"] for row in found["rows"] if row["spread_skill"] is not None]
    if not known:
        return f"{said}, which has none."
    return f"{said}; they spread {min(known):.2f} to {max(known):.2f} times as far, and 1 is right."


def _against(subject: Subject) -> list[str]:
    assert subject.scores
    ours, names = series(subject.scores, "normalised"), lead_names(subject.scores)
    parts, last = [], 0
    for label, theirs in subject.others_scores.items():
        other = series(theirs, "normalised")
        shared = sorted(set(ours) & set(other))
        if shared and other[shared[-1]] > 0:
            ratio = ours[shared[-1]] / other[shared[-1]]
            last = shared[-1]
            how = f"{1 - ratio:.0%} below" if ratio <= 1 else f"{ratio - 1:.0%} above"
            parts.append(f"{how} that of {label}")
    return [f"At {names[last]} this is {' and '.join(parts)}."] if parts else []


def activity(scores: dict[str, Any]) -> dict[str, dict[int, float]]:
    """By channel and lead, the forecast's activity over the truth's."""
    names = dict.fromkeys(row["channel"] for row in scores["rows"])
    found = {name: series(scores, name, "activity_ratio") for name in names}
    return {name: values for name, values in found.items() if values}


def short_power(scores: dict[str, Any]) -> dict[str, dict[int, float]]:
    """By channel and lead, the forecast's power at short waves over the truth's."""
    told = scores.get("spectra") or {"channels": {}, "leads": []}
    found = {
        name: {lead: ratio for lead, ratio in zip(told["leads"], channel["short_power_ratio"],
                                                  strict=True) if ratio is not None}
        for name, channel in told["channels"].items()
    }  # fmt: skip
    return {name: values for name, values in found.items() if values}


def _activity(scores: dict[str, Any]) -> list[str]:
    """Whether the forecast is as active and as fine as the truth at the last lead."""
    told: list[str] = []
    praised = False
    for found, what, less, alike, more in (
        (activity(scores), "activity", "damped", "as active as the truth", "too active"),
        (short_power(scores), "power at short waves", "too smooth", "as fine as the truth",
         "too rough"),
    ):  # fmt: skip
        if not found:
            continue
        last = max(lead for values in found.values() for lead in values)
        at = {name: values[last] for name, values in found.items() if last in values}
        low, high = min(at, key=at.__getitem__), max(at, key=at.__getitem__)
        hows = [less] * (at[low] < ALIKE) + [more] * (at[high] > 1 / ALIKE)
        span = f"{figures(at[low])} ({low})"
        span = span if low == high else f"{span} to {figures(at[high])} ({high})"
        told.append(
            f"{'But at' if praised and hows else 'At'} {lead_names(scores)[last]} its forecasts are"
            f" {' in part, and in part '.join(hows) or alike}: their {what} is {span} times the"
            " truth's."
        )
        praised = not hows
    return told


def _ocean(scores: dict[str, Any]) -> list[str]:
    """How well the heat of the upper ocean is kept, and temperature at its ends."""
    heat = [row for row in ((scores.get("ocean") or {}).get("heat_content") or [])
            if row.get("error_at_last_lead") is not None]  # fmt: skip
    if not heat:
        return []
    row = heat[0]
    return [
        f"At {list(lead_names(scores).values())[-1]} its ocean holds"
        f" {figures(abs(row['error_at_last_lead']) / 1e21)} ZJ"
        f" {'more' if row['error_at_last_lead'] > 0 else 'less'} heat in {row['range']} than the"
        " truth."
    ]


def _cost(subject: Subject) -> str:
    spent = [f"{stage} {duration(seconds)}" for stage, seconds in subject.seconds.items()]
    peak = max((line.get("memory_gib") or 0.0 for line in subject.run.metrics), default=0.0)
    sessions = subject.run.description.get("sessions", [])
    device = f" on {sessions[-1]['device']}" if sessions else ""
    said = f"Time{device}: {', '.join(spent)}" if spent else ""
    if peak:
        said += f"{'; ' if said else ''}peak memory of training {peak:.3g} GiB"
    return said[:1].upper() + said[1:] + "." if said else ""


def _unfinished(subject: Subject) -> list[str]:
    run, found = subject.run, []
    wanted = run.config.train.steps
    if run.steps < wanted:
        found.append(
            f"Training stopped at step {run.steps:,} of {wanted:,}; --resume goes on from the last"
            " checkpoint."
        )
    if run.last is None and not run.troubles:
        found.append("The run has no complete checkpoint, so nothing can be forecast from it yet.")
    return found


def _of_losses(subject: Subject) -> list[str]:
    metrics, settings = subject.run.metrics, subject.run.config.train
    found: list[str] = []
    lost = [line["step"] for line in metrics if line.get("loss") is None]
    if lost:
        found.append(
            f"The loss was not a finite number in {len(lost):,} of {len(metrics):,} steps, the"
            f" first at step {lost[0]:,}."
        )
    skipped = [line["step"] for line in metrics if line.get("skipped")]
    if skipped:
        found.append(
            f"{len(skipped):,} of {len(metrics):,} steps were skipped, the last at step"
            f" {skipped[-1]:,}: float16 gradients overflowed and the loss scale was halved."
        )
    # The mean over leads, as the picture draws it.
    valid = [(line["step"], line["validation_loss"] / settings.leads) for line in metrics
             if line.get("validation_loss") is not None]  # fmt: skip
    if valid:
        step, best = min(valid, key=lambda pair: pair[1])
        last_step, last = valid[-1]
        if last > 1.02 * best:
            found.append(
                f"The validation loss rose from {best:.4g} at step {step:,} to {last:.4g} at step"
                f" {last_step:,}: the model may be learning its training times by heart."
            )
    norms = [line["gradient_norm"] for line in metrics if line.get("gradient_norm") is not None]
    if settings.clip_norm and norms:
        clipped = sum(norm > settings.clip_norm for norm in norms) / len(norms)
        if clipped > 0.9:
            found.append(
                f"{clipped:.0%} of the steps had their gradient clipped to a norm of"
                f" {settings.clip_norm:g}."
            )
    waits = [line["data_wait_share"] for line in metrics if line.get("data_wait_share") is not None]
    if waits and sum(waits) / len(waits) > 0.2:
        found.append(f"Training waited for its data {sum(waits) / len(waits):.0%} of the time.")
    return found


def _of_forecast(subject: Subject) -> list[str]:
    found = []
    if subject.forecast and subject.run.state:
        here = subject.run.state
        wanted = f"{here['fingerprints']['config']}/step {here['step']}"
        made = str(subject.forecast.attributes.get("run_fingerprint", "unknown"))
        if made != wanted:
            found.append(
                f"The forecast was made by other weights ({made}) than the run's last checkpoint"
                f" ({wanted})."
            )
    theirs = subject.run.description.get("fingerprints", {}).get("store")
    if subject.store and theirs and subject.store.fingerprint != theirs:
        found.append(
            f"The store at {subject.store.path} ({subject.store.fingerprint}) is not the one of"
            f" the training ({theirs})."
        )
    return found


def _of_scores(scores: dict[str, Any]) -> list[str]:
    found, names = [], lead_names(scores)
    if scores.get("skipped"):
        found.append(
            f"{scores['skipped']:,} of {scores['skipped'] + scores['pairs']:,} forecast fields have"
            f" no truth in the store and no score, the first at {scores['first_skipped']}."
        )
    for reference in REFERENCES:
        worse = [lead for lead, ratio in ratios(scores, reference).items() if ratio >= 1]
        if worse:
            where = ", ".join(names[lead] for lead in worse)
            found.append(f"The normalised RMSE is not below that of {reference} at {where}.")
    model = series(scores, "normalised")
    for before, after in zip(sorted(model), sorted(model)[1:], strict=False):
        if model[after] < 0.98 * model[before]:
            found.append(
                f"The normalised RMSE falls from {model[before]:.4g} at {names[before]}"
                f" to {model[after]:.4g} at {names[after]}: errors should grow with the"
                " lead, unless the leads cover different times or are outputs of one model step."
            )
            break
    noisy = {
        name: ratio[max(ratio)]
        for name, ratio in short_power(scores).items()
        if ratio[max(ratio)] > NOISE
    }
    if noisy:
        most = max(noisy, key=noisy.__getitem__)
        found.append(
            f"Noise at short waves: at the last lead the power there is more than {NOISE} times the"
            f" truth's in {len(noisy):,} of {len(short_power(scores)):,} channels, most in {most}"
            f" ({figures(noisy[most])} times)."
        )
    return found


def _of_range(subject: Subject) -> list[str]:
    """Of an ocean's rollout: what has drifted out of what the model was trained on."""
    channels = ((subject.scores or {}).get("ocean") or {}).get("channels", {})
    out = {
        name: told["beyond_trained_range"]
        for name, told in channels.items()
        if (told["beyond_trained_range"] or 0)
        > max(BEYOND, told["truth_beyond_trained_range"] or 0)
    }
    if not out:
        return []
    most = max(out, key=out.__getitem__)
    return [
        f"The forecast leaves the range of the training values by more than {BEYOND:.0%} of it in"
        f" {len(out):,} of {len(channels):,} channels, most in {most} (by {out[most]:.0%})."
    ]


def _of_comparison(subject: Subject) -> list[str]:
    found = []
    for label, theirs in subject.others_scores.items():
        ours, other = (series(s, "normalised") for s in (subject.scores or {"rows": []}, theirs))
        shared = sorted(set(ours) & set(other))
        if shared and ours[shared[-1]] > LEVEL * other[shared[-1]]:
            found.append(
                f"{label} is better at the last lead that both have: its normalised RMSE is"
                f" {figures(other[shared[-1]])}, that of this run {figures(ours[shared[-1]])}."
            )
        for what in differences(subject.scores, theirs):
            found.append(
                f"{label} was scored over another {what}: its curve is no fair comparison."
            )
    return found


def differences(ours: dict[str, Any] | None, theirs: dict[str, Any]) -> list[str]:
    """What must be equal before two RMSEs may be compared, and is not."""
    if ours is None:
        return []
    unlike = []
    for what, key in (("region", "region"), ("climatology", "climatology"), ("scale", "std")):
        if ours[key] != theirs[key]:
            unlike.append(what)
    stores = [scores["provenance"].get("store_fingerprint") for scores in (ours, theirs)]
    if stores[0] != stores[1]:
        unlike.append("store")
    counts = [
        {row["lead"]: row["samples"] for row in scores["rows"] if row["source"] == "model"}
        for scores in (ours, theirs)
    ]
    if any(counts[0][lead] != counts[1][lead] for lead in set(counts[0]) & set(counts[1])):
        unlike.append("number of initial times")
    return unlike
