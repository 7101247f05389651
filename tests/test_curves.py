"""Curves: what is drawn, what is said of it in words, and SVG that stands in a page."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from graticule.evaluate.spectra import Spectra
from graticule.report.curves import (
    activity_curves,
    loss_curves,
    memory_curve,
    score_curves,
    spectra_curves,
    stage_bars,
)
from graticule.report.picture import Picture, figures, lead_words, safe_name
from graticule.variables import Channel, Channels

SVG = "{http://www.w3.org/2000/svg}"


def words_in(picture: Picture) -> list[str]:
    root = ElementTree.fromstring(picture.svg)
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def line(figure: Figure, label: str) -> tuple[np.ndarray, np.ndarray]:
    found = [li for axis in figure.axes for li in axis.lines if li.get_label() == label]
    assert len(found) == 1, label
    return np.asarray(found[0].get_xdata()), np.asarray(found[0].get_ydata())


def scores_of(
    rmse: dict[str, list[float]], *, channel: str = "normalised", units: str = "1",
    step_hours: float = 6, activity: dict[str, list[float]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    rows = []
    for source, values in rmse.items():
        for k, value in enumerate(values, start=1):
            rows.append({"source": source, "channel": channel, "units": units, "lead": k,
                         "lead_hours": k * step_hours, "rmse": value, "activity_ratio": None,
                         "samples": 3})  # fmt: skip
    for name, values in (activity or {}).items():
        for k, value in enumerate(values, start=1):
            rows.append({"source": "model", "channel": name, "units": "K", "lead": k,
                         "lead_hours": k * step_hours, "rmse": 1.0, "activity_ratio": value,
                         "samples": 3})  # fmt: skip
    return {
        "rows": rows, "pairs": 30, "region": None, "climatology": "month",
        "provenance": {"forecast": {"run_fingerprint": "0123456789abcdef/step 400"}},
    }  # fmt: skip


THREE = {
    "model": [0.03, 0.06, 0.12],
    "persistence": [0.1, 0.2, 0.3],
    "climatology": [0.5, 0.05, 0.5],
}


# Pictures


def test_svg_stands_in_a_page_beside_others() -> None:
    scores = scores_of(THREE)
    ids: list[str] = []
    for picture in (score_curves(scores), stage_bars({"a": 1.0}), loss_curves([("r", RUN)])):
        root = ElementTree.fromstring(picture.svg)
        assert root.tag == f"{SVG}svg"
        assert "viewBox" in root.attrib
        own = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
        assert all(name.startswith(f"{picture.name}-") for name in own)
        ids += own
        used = re.findall(r'(?:url\(#|href="#)([^)"]+)', picture.svg)
        assert set(used) == set(own), "each reference has its target"
        # Names of vocabularies are no addresses that anything is fetched from.
        rest = re.sub(r'xmlns(:\w+)?="[^"]*"', "", picture.svg)
        assert "http" not in rest
        assert "<style" not in rest
        assert "<script" not in rest
    assert len(ids) == len(set(ids))


def test_the_same_data_give_the_same_bytes_and_text_stays_text() -> None:
    first, second = (score_curves(scores_of(THREE)) for _ in range(2))
    assert first.svg == second.svg
    words = words_in(first)
    assert {"persistence", "climatology", "model", "lead (hours)", "normalised RMSE"} <= set(words)


def test_a_name_that_looks_like_a_formula_or_markup_is_text() -> None:
    picture = stage_bars({"$x_1$": 1.0, "<b>&": 2.0})
    assert {"$x_1$", "<b>&"} <= set(words_in(picture))


def test_a_picture_is_saved_with_its_data_beside_it(tmp_path: Path) -> None:
    picture = stage_bars({"planet": 60.0, "training, long": 3.5})
    path = picture.save(tmp_path / "new")
    assert path == tmp_path / "new" / "stages.svg"
    assert path.read_text() == picture.svg
    assert (tmp_path / "new" / "stages.csv").read_text() == (
        'stage,seconds\nplanet,60.0\n"training, long",3.5\n'
    )


def test_names_are_safe_and_numbers_and_leads_are_words() -> None:
    assert safe_name("maps", "u@850") == "maps-u-850"
    assert safe_name("maps", "../a b") == "maps-a-b"
    assert figures(0.03) == "0.03"
    assert figures(12345.6) == "12346"
    assert lead_words([6, 60]) == ["6 h", "60 h"]
    assert lead_words([24, 240]) == ["1 d", "10 d"]
    assert lead_words([6, 240]) == ["0.25 d", "10 d"]
    assert lead_words([730.485, 1460.97]) == ["1 month", "2 months"]


# Scores


def test_references_are_drawn_first_and_grey_from_zero(drawn: list[Figure]) -> None:
    other = scores_of({"model": [0.04, 0.05, 0.2, 0.3]})
    picture = score_curves(scores_of(THREE), others={"pretrained": other})
    axis = drawn[0].axes[0]
    labels = [str(li.get_label()) for li in axis.lines]
    assert labels == ["persistence", "climatology", "pretrained", "model"]
    for label, values in THREE.items():
        x, y = line(drawn[0], label)
        assert x.tolist() == [6, 12, 18]
        assert y.tolist() == values
    assert line(drawn[0], "pretrained")[0].tolist() == [6, 12, 18, 24]
    colours = {str(li.get_label()): li.get_color() for li in axis.lines}
    assert colours["persistence"] == colours["climatology"] == "0.55"
    # In print without colours: dashes of three kinds, and a whole line.
    assert len(set(re.findall(r"stroke-dasharray: ([\d., ]+)", picture.svg))) == 3
    assert axis.get_ylim()[0] == 0
    assert picture.table[3] == {
        "lead": 4, "lead_hours": 24.0, "persistence": None, "climatology": None,
        "pretrained": 0.3, "model": None,
    }  # fmt: skip
    assert "weights 01234567, step 400; 30 forecast fields, everywhere" in words_in(picture)


def test_the_words_tell_the_scores_and_who_is_better() -> None:
    other = scores_of({"model": [0.04, 0.05, 0.2, 0.3]})
    picture = score_curves(scores_of(THREE), others={"pretrained": other})
    assert picture.alt == (
        "The normalised RMSE of the model rises from 0.03 at 6 h to 0.12 at 18 h; that of"
        " persistence rises from 0.1 at 6 h to 0.3 at 18 h; that of climatology goes from 0.5"
        " at 6 h to 0.5 at 18 h; the model is below persistence at every lead; the model is"
        " below climatology at 2 of 3 leads. That of pretrained rises from 0.04 at 6 h to 0.3 at"
        " 24 h; the model is 40% below it at 18 h."
    )


def test_one_lead_and_close_scores_are_seen(drawn: list[Figure]) -> None:
    one = {name: values[:1] for name, values in THREE.items()}
    picture = score_curves(scores_of(one, channel="t", units="K", step_hours=24), channel="t")
    assert picture.name == "scores-t"
    assert "The RMSE of t (K) of the model is 0.03 at 24 h" in picture.alt
    assert "the model is below persistence at the one lead" in picture.alt
    assert all(li.get_marker() == "o" for li in drawn[0].axes[0].lines)
    close = {name: [9.0, 10.0] for name in THREE}
    score_curves(scores_of(close))
    assert drawn[1].axes[0].get_ylim()[0] > 8


def test_months_and_days_are_told_as_such(drawn: list[Figure]) -> None:
    for hours, label in ((730.485, "lead (months)"), (24, "lead (days)"), (6, "lead (hours)")):
        score_curves(scores_of(THREE, step_hours=hours))
        assert drawn[-1].axes[0].get_xlabel() == label


def test_scores_that_are_not_there_are_named() -> None:
    with pytest.raises(ValueError, match=r"no rmse of u \(model\); there are normalised"):
        score_curves(scores_of(THREE), channel="u")
    with pytest.raises(ValueError, match="before: these scores hold no rmse of normalised"):
        score_curves(scores_of(THREE), others={"before": scores_of({}, activity={"u": [1.0]})})
    with pytest.raises(ValueError, match="another run cannot be labelled model"):
        score_curves(scores_of(THREE), others={"model": scores_of(THREE)})
    with pytest.raises(ValueError, match="no activity; `graticule evaluate --force` adds it"):
        activity_curves(scores_of(THREE))


# Activity


def test_activity_is_drawn_by_channel_with_its_words(drawn: list[Figure]) -> None:
    activity = {"u": [1.0, 0.9], "v": [1.01, 1.2], "t": [1.0, 0.98]}
    picture = activity_curves(scores_of(THREE, activity=activity))
    for name, values in activity.items():
        assert line(drawn[0], name)[1].tolist() == values
    assert "u 1 at 6 h and 0.9 at 12 h; v 1.01 at 6 h and 1.2 at 12 h" in picture.alt
    assert "1 of 3 channels are smoother than the truth by more than 5 %, 1 more" in picture.alt
    assert picture.table[1] == {"lead": 2, "lead_hours": 12.0, "u": 0.9, "v": 1.2, "t": 0.98}


def test_of_many_channels_those_farthest_from_the_truth_are_named() -> None:
    activity = {f"c{i}": [1.0, 1 - 0.01 * i] for i in range(30)}
    words = words_in(activity_curves(scores_of(THREE, activity=activity)))
    assert {f"c{i}" for i in range(24, 30)} <= set(words)
    assert "c23" not in words
    assert "24 other channels" in words


# Losses


RUN: list[dict[str, Any]] = [
    {"step": step, "loss": 1.0 / step, "memory_gib": 0.5 + 0.001 * (step > 20)}
    for step in range(1, 41)
]


def test_runs_stand_one_after_the_other_on_one_scale(drawn: list[Figure]) -> None:
    tuned = [{"step": s, "loss": 4 * 0.02, "lead_losses": [0.02] * 4} for s in range(1, 11)]
    tuned[-1]["validation_loss"] = 4 * 0.05
    picture = loss_curves([("pretrain", RUN), ("finetune", tuned)])
    first, second = drawn[0].axes
    assert [a.get_title(loc="left") for a in (first, second)] == ["pretrain", "finetune"]
    assert first.get_ylim() == second.get_ylim()
    assert first.get_yscale() == "log"
    assert second.get_xlim()[1] == pytest.approx(10, abs=1)
    points = first.lines[0]
    assert np.asarray(points.get_xdata()).tolist() == list(range(1, 41))
    np.testing.assert_allclose(np.asarray(points.get_ydata()), 1 / np.arange(1, 41))
    # Four leads: the mean over them compares with one.
    np.testing.assert_allclose(np.asarray(second.lines[0].get_ydata()), 0.02)
    # So few steps have no running median: the validation is the second line.
    np.testing.assert_allclose(np.asarray(second.lines[1].get_ydata()), [0.05])
    assert first.get_ylabel() == "loss, mean over leads"
    assert "finetune: 4 leads" in picture.caption
    assert picture.alt == (
        "The loss (mean over leads) of pretrain (running median over 5 steps) falls from 0.5 to"
        " 0.0256 over 40 steps. The loss (mean over leads) of finetune goes from 0.02 to 0.02 over"
        " 10 steps; the validation loss is 0.05 at step 10."
    )
    assert len(picture.table) == 50
    assert picture.table[-1]["validation"] == pytest.approx(0.05)


def test_a_loss_that_rose_in_between_is_not_said_to_fall() -> None:
    losses = [0.06] * 10 + [0.1] * 20 + [0.058] * 10
    picture = loss_curves([("r", [{"step": i, "loss": x} for i, x in enumerate(losses, 1)])])
    assert picture.alt == (
        "The loss of r (running median over 5 steps) goes from 0.06 to 0.058 over 40 steps and is"
        " 0.1 at its largest in between."
    )
    few = loss_curves([("r", [{"step": i, "loss": x} for i, x in enumerate(losses[:5], 1)])])
    assert "running median" not in " ".join([few.caption, few.alt, *words_in(few)])


def test_lost_and_skipped_steps_are_gaps_and_marks(drawn: list[Figure]) -> None:
    lines: list[dict[str, Any]] = [{"step": s, "loss": 0.5} for s in range(1, 21)]
    lines[3] |= {"loss": None, "skipped": True}
    lines[6]["loss"] = float("nan")
    picture = loss_curves([("half", lines)])
    axis = drawn[0].axes[0]
    points, median, _, lost, skipped = axis.lines
    assert np.asarray(points.get_xdata()).tolist() == [1, 2, 3, 5, 6, *range(8, 21)]
    gaps = np.isnan(np.asarray(median.get_ydata(), dtype=float))
    assert np.flatnonzero(gaps).tolist() == [3, 6]
    assert list(lost.get_xdata()) == [4, 7]
    assert list(skipped.get_xdata()) == [4]
    assert "2 steps have no finite loss; float16 skipped 1 steps" in picture.alt
    assert {"loss not finite", "skipped (float16)"} <= set(words_in(picture))


@pytest.mark.parametrize(
    ("lines", "said", "alt"),
    [
        ([], "no step yet", "r has no finite loss in 0 steps."),
        ([{"step": 1, "loss": None}], "no finite loss", "r has no finite loss in 1 steps."),
        ([{"step": 1, "loss": 0.25}], "step", "The loss of r is 0.25 at its one step."),
        ([{"step": 1, "loss": -1.0}, {"step": 2, "loss": -2.0}], "step",
         "The loss of r falls from -1 to -2 over 2 steps."),
        ([{"step": s, "loss": 0.0} for s in (1, 2)], "step",
         "The loss of r goes from 0 to 0 over 2 steps."),
    ],
)  # fmt: skip
def test_short_and_odd_runs_are_drawn(lines: list[dict[str, Any]], said: str, alt: str) -> None:
    picture = loss_curves([("r", lines)])
    assert said in words_in(picture)
    assert picture.alt == alt


def test_a_hundred_thousand_steps_stay_a_small_picture_that_keeps_its_spikes(
    drawn: list[Figure],
) -> None:
    random = np.random.default_rng(0)
    losses = 1 / np.sqrt(np.arange(1, 100_001)) * random.uniform(0.8, 1.25, 100_000)
    losses[70_000] = 50.0
    lines: list[dict[str, Any]] = [
        {"step": i + 1, "loss": loss, "skipped": i % 50 == 0, "memory_gib": 1 + i * 1e-5}
        for i, loss in enumerate(losses.tolist())
    ]
    for i in range(999, 100_000, 1000):
        lines[i]["validation_loss"] = 0.01
    picture = loss_curves([("long", lines)])
    assert len(picture.svg) < 150_000
    assert len(picture.table) <= 240
    points, median = drawn[0].axes[0].lines[:2]
    assert max(points.get_ydata()) == 50
    assert max(median.get_ydata()) < 1.1
    assert "100k" in words_in(picture)
    assert "2000 steps skipped" in picture.caption
    assert len(memory_curve([("long", lines)]).svg) < 50_000


# Memory and time


def test_memory_is_drawn_where_it_changed_and_by_owner(drawn: list[Figure]) -> None:
    gib = 2**30
    timeline = [
        [0.01 * i, {"parameters": gib, "activations": gib * max(0, 2 - abs(i - 201) / 100),
                    "optimizer": gib / 2}]
        for i in range(400)
    ]  # fmt: skip
    picture = memory_curve([("r", RUN)], profile={"memory": {"timeline": timeline}})
    steps, peaks = drawn[0].axes[0].lines[0].get_data()
    assert list(steps) == [1, 21, 40]
    np.testing.assert_allclose(np.asarray(peaks), [0.5, 0.501, 0.501])
    assert drawn[0].axes[0].get_ylim()[0] == 0
    # The top of the stack keeps the one time with the most.
    top = drawn[0].axes[1].dataLim.y1
    assert top == pytest.approx(3.5)
    assert drawn[0].axes[1].get_position().width > 0.8
    assert picture.alt == (
        "Peak memory of r is 0.501 GiB after 40 steps, 0.5 GiB after the first. Within a step at"
        " most 3.5 GiB are held: activations 2, parameters 1, optimizer 0.5."
    )
    assert "time in the step (s)" in words_in(picture)
    assert "time in the step (s)" not in words_in(memory_curve([("r", RUN)]))
    with pytest.raises(ValueError, match="no step of these runs tells its memory"):
        memory_curve([("r", [{"step": 1}])])


def test_stages_are_bars_with_their_time() -> None:
    picture = stage_bars({"planet": 60, "pretrain": 300.0, "scores": 0})
    assert {"planet", "pretrain", "60 s", "5 min", "0 s", "wall time (min)"} <= set(
        words_in(picture)
    )
    assert picture.alt == (
        "The stages took 6 min together, the longest pretrain with 5 min (83%): planet 60 s,"
        " pretrain 5 min, scores 0 s."
    )
    assert "0 s together" in stage_bars({"found": 0.0}).caption
    with pytest.raises(ValueError, match="no stage was timed"):
        stage_bars({})
    with pytest.raises(ValueError, match="no run was given"):
        loss_curves([])


# Spectra


def spectra_of(
    model: np.ndarray, truth: np.ndarray, *, rows: int = 4, kind: str = "circles"
) -> Spectra:
    """model, truth: (lead, n), of the one channel `u`."""
    leads, n = truth.shape
    return Spectra(
        channels=Channels([Channel(variable="u", units="m s-1", role="prognostic")]),
        lead_seconds=21600 * np.arange(1, leads + 1),
        wavenumber=np.arange(1, n + 1, dtype=float),
        kind=(kind,),
        share=np.ones(1),
        rows=np.full((leads, 1), rows),
        area=np.full((leads, 1), 2.0 * (rows > 0)),
        sums=2.0 * np.stack([model, truth])[:, :, None],
        attributes={"run_fingerprint": "0123456789abcdef/step 400"},
    )


def red(n: int, leads: int = 2) -> np.ndarray:
    return np.tile(np.arange(1, n + 1, dtype=float) ** -2, (leads, 1))


def test_truth_is_drawn_first_and_the_ratio_below(drawn: list[Figure]) -> None:
    model = red(16) * np.array([[1.0], [0.5]])
    model[1, 10:] *= 0.5
    picture = spectra_curves(spectra_of(model, red(16)), channel="u", leads=(1, 2))
    upper, lower = drawn[0].axes
    assert upper.get_xscale() == upper.get_yscale() == lower.get_yscale() == "log"
    labels = [str(li.get_label()) for li in upper.lines]
    assert labels[0] == "truth"
    assert labels[2:] == ["model, 6 h", "model, 12 h"]
    np.testing.assert_allclose(np.asarray(upper.lines[0].get_ydata()), red(16)[0])
    np.testing.assert_allclose(np.asarray(lower.lines[2].get_ydata()), [0.5] * 10 + [0.25] * 6)
    assert picture.alt == (
        "Zonal power of u against wavenumber. At the shortest quarter of the truth's waves,"
        " wavenumbers 13 to 16, at 6 h the model has 1 times the truth's power; at 12 h the model"
        " has 0.25 times the truth's power, below half from wavenumber 11."
    )
    assert "(m s-1)²" in picture.caption
    assert "wavenumber 10 is 4003 km" in picture.caption
    assert picture.table[16 + 12] == {
        "lead": 2, "lead_hours": 12.0, "wavenumber": 13.0, "model": pytest.approx(0.25 / 169),
        "truth": pytest.approx(1 / 169), "ratio": pytest.approx(0.25),
    }  # fmt: skip


def test_a_ratio_far_above_one_is_on_its_axis_or_said_to_be_cut(drawn: list[Figure]) -> None:
    far = red(16)
    far[:, -1] *= 242
    picture = spectra_curves(spectra_of(far, red(16)), channel="u", leads=(1,))
    assert drawn[0].axes[1].get_ylim()[1] > 242
    assert "axis is cut" not in picture.caption
    far[:, -1] *= 10
    picture = spectra_curves(spectra_of(far, red(16)), channel="u", leads=(1,))
    assert "from 1 to 2420; its axis is cut at 1/1000 and 1000" in picture.caption


def test_waves_that_the_truth_has_not_are_shaded_and_have_no_ratio(drawn: list[Figure]) -> None:
    truth = red(40)
    truth[:, 20:] = 1e-12
    truth[:, 35:] = 0
    picture = spectra_curves(spectra_of(red(40), truth), channel="u", leads=(2,))
    ratio = np.asarray(drawn[0].axes[1].lines[1].get_ydata())
    np.testing.assert_allclose(ratio[:20], 1)
    assert np.isnan(ratio[20:]).all()
    assert drawn[0].axes[0].get_ylim()[0] > 1e-10
    assert "Beyond wavenumber 20 (shaded)" in picture.caption
    assert picture.table[30]["ratio"] is None
    json.dumps(picture.table, allow_nan=False)


def test_thousands_of_wavenumbers_stay_a_small_picture() -> None:
    rng = np.random.default_rng(1)
    truth = red(2160, 3) ** 0.5 * rng.uniform(0.5, 2, (3, 2160))
    picture = spectra_curves(spectra_of(0.9 * truth, truth), channel="u", leads=(1, 2, 3))
    assert len(picture.svg) < 150_000
    assert len(picture.table) <= 3 * 160
    assert "2160 wavenumbers, averaged to" in picture.caption
    for row in picture.table:
        assert row["ratio"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"channel": "t"}, "no channel t; there are u"),
        ({"leads": (3,)}, "have leads 1 to 2"),
        ({"leads": ()}, "have leads 1 to 2"),
    ],
)
def test_spectra_that_are_not_there_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spectra_curves(spectra_of(red(8), red(8)), **{"channel": "u", "leads": (1,), **given})


def test_a_channel_without_a_spectrum_says_why() -> None:
    none = spectra_of(red(8), red(8), rows=0, kind="none: too many islands")
    with pytest.raises(ValueError, match=r"no spectrum of u at lead 1 \(none: too many islands"):
        spectra_curves(none, channel="u", leads=(1,))
    constant = spectra_of(0 * red(8), 0 * red(8))
    with pytest.raises(ValueError, match="u has no power at any wavenumber"):
        spectra_curves(constant, channel="u", leads=(1,))
