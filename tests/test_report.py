"""Reports: opened in headless Chromium and looked through, and made of whatever a run left."""

import html
import itertools
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graticule.cli import build_parser, main
from graticule.config import Config, from_dict
from graticule.data.statistics import compute
from graticule.data.store import Store
from graticule.grid import Grid
from graticule.report.findings import warnings
from graticule.report.folder import RunFolder, plan_of
from graticule.report.page import duration, figure, number, table, tag
from graticule.report.picture import Picture
from graticule.report.provenance import store_command
from graticule.report.subject import Opened, Subject
from graticule.tasks import record_stage, report_run, scores_of
from graticule.variables import Channel, Channels
from small_store import write_store

SMALL = [
    "data.grid=none", "data.prognostic=",
    "model.patch=2", "model.window=2,4", "model.width=16", "model.depth=1", "model.heads=2",
    "model.norm_groups=4", "train.batch=2", "train.warmup_steps=0", "train.roll_longitude=false",
    "evaluate.climatology=all",
]  # fmt: skip
ODD = "t<b>&amp;"
"""A channel's name that is markup where it is not escaped."""

PROFILE = {
    "steps": 2, "first_step": 1, "device": "cpu",
    "seconds": {"step": 0.5, "data_wait": 0.1, "forward": 0.3, "idle": 0.1},
    "operations": [{"name": "aten::mm<T>", "seconds": 0.2, "share": 0.4, "calls": 12.0}],
    "memory": {
        "peak_bytes": 3 << 20, "peak_at_seconds": 0.2,
        "owners": {"activations": 2 << 20, "weights": 1 << 20},
        "timeline": [[0.1 * i, {"activations": i << 20, "weights": 1 << 20}] for i in range(3)],
    },
    "advice": ["the reader is waited for 20% of the step: try <more> threads"],
}  # fmt: skip


def run(*arguments: str, settings: tuple[str, ...] = ()) -> None:
    sets = [part for setting in settings for part in ("--set", setting)]
    assert main([*arguments, *sets]) == 0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two prognostic channels, one with land and an odd name, and a forcing."""
    made = write_store(
        tmp_path_factory.mktemp("data") / "store", prognostic=(ODD, "salinity"), land=True,
        units={"salinity": "1e-3"},
    )  # fmt: skip
    compute(made, np.arange(16)).save(made)
    return made


@pytest.fixture(scope="module")
def runs(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `first`, `tuned` from it, forecasts of both, and a report.json."""
    out = tmp_path_factory.mktemp("runs") / "all"
    common = (*SMALL, f"data.store={store.path}", "forecast.leads=2", "forecast.every=1")
    run("train", "demo", "--out", str(out / "first"),
        settings=(*common, "train.steps=4", "train.validate_every=2"))  # fmt: skip
    run("train", "demo-finetune", "--out", str(out / "tuned"),
        settings=(*common, "train.steps=2", "train.leads=2", f"train.start_from={out}/first"),
    )  # fmt: skip
    for name in ("first", "tuned"):
        run("forecast", str(out / name))
    (out / "tuned" / "profile").mkdir()
    (out / "tuned" / "profile" / "profile.json").write_text(json.dumps(PROFILE))
    (out / "report.json").write_text(
        json.dumps({"run": "tuned", "compare": {"pretrained <1>": "first"},
                    "seconds": {"pretrain": 4.0, "finetune": 61.0}})
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def report(runs: Path) -> Path:
    """The report on `runs`, with everything that a report can have."""
    assert main(["report", str(runs)]) == 0
    return runs / "report.html"


def commands_of(path: Path) -> list[str]:
    """The lines under "How to make it again"."""
    found = re.search(r"<code>(graticule (?:data|train).*?)</code>", path.read_text(), re.DOTALL)
    assert found
    return html.unescape(found[1]).splitlines()


def words_of(path: Path) -> str:
    """The text of a page, without its pictures."""
    text = path.read_text()
    text = re.sub(r"<svg.*?</svg>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'src="data:[^"]*"', "", text)
    return html.unescape(re.sub(r"<[^>]*>", " ", text))


# In a browser

INSPECT = """
function inspect(d) {
  d.querySelectorAll('details').forEach(e => { e.open = true; });
  const w = d.defaultView, root = d.documentElement, wide = root.clientWidth;
  const all = s => [...d.querySelectorAll(s)], boxed = e => e.closest('.scroll');
  const named = e => (e.getAttribute('aria-labelledby') || '').split(' ').filter(x => x);
  const rgb = c => c.match(/[0-9.]+/g).map(Number);
  const light = c => { const [r, g, b] = rgb(c).map(v => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4); });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = w.getComputedStyle(e)
    .backgroundColor; const v = rgb(c); if (v.length < 4 || v[3] > 0) return c; }
    return 'rgb(255, 255, 255)'; };
  const contrast = e => { const a = light(w.getComputedStyle(e).color), b = light(ground(e));
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
  const texts = all('body *').filter(e => !e.closest('svg') && e.checkVisibility() &&
    [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim()));
  const ids = all('[id]').map(e => e.id);
  return {
    wide, scrolls: root.scrollWidth - wide,
    outside: all('body *').filter(e => !boxed(e.parentElement || e) && !e.closest('.skip') &&
      e.getBoundingClientRect().right > wide + 1).map(e => e.tagName + '.' + e.className),
    images: all('img').map(e => [e.complete, e.naturalWidth, e.naturalHeight, e.alt.trim()]),
    drawings: all('svg').map(e => [e.getAttribute('role'), e.getBoundingClientRect().width,
      named(e).map(id => d.getElementById(id).textContent.trim())]),
    headings: all('h1, h2, h3, h4, h5, h6').map(e => [Number(e.tagName[1]), e.innerText]),
    twice: ids.filter((id, i) => ids.indexOf(id) != i),
    nowhere: all('a').map(e => e.getAttribute('href')).filter(h =>
      !h.startsWith('#') || !d.getElementById(h.slice(1))),
    unnamed: all('[aria-labelledby]').filter(e => named(e).some(id => !d.getElementById(id)))
      .map(e => e.tagName),
    fetched: w.performance.getEntriesByType('resource').map(e => e.name),
    outer: all('[src], [href], image, use, link, script, iframe').map(e => e.getAttribute('src') ||
      e.getAttribute('href') || e.getAttribute('xlink:href') || e.tagName)
      .filter(x => !x.startsWith('#') && !x.startsWith('data:')),
    text: d.body.innerText + ' ' + all('svg text').map(e => e.textContent).join(' '),
    bare: all('table').filter(t => !t.caption || !t.caption.textContent.trim() ||
      [...t.querySelectorAll('th')].some(h => !h.scope)).length,
    still: all('.scroll').filter(e => e.tabIndex != 0 || !e.getAttribute('aria-label')).length,
    pale: texts.map(e => [contrast(e), e.tagName, e.innerText.slice(0, 40)])
      .filter(x => x[0] < 4.5),
    lang: root.lang, checked: texts.length,
  };
}
"""


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.fail("no Chromium to open the report in: apt-get install chromium")


def opened(path: Path, folder: Path, *, dark: bool) -> list[dict[str, Any]]:
    """What a browser finds on the page at widths of 360 and 1400 pixels.

    A window cannot be as narrow as a telephone; a frame can. The page itself has no script: the
    one that looks at it stands outside the frames.
    """
    whole = html.escape(path.read_text())
    frames = "".join(
        f'<iframe srcdoc="{whole}" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in (360, 1400)
    )
    looking = folder / "looking.html"
    looking.write_text(
        f"<!doctype html><body>{frames}<pre id=found></pre><script>{INSPECT}\n"
        "onload = () => { found.textContent = JSON.stringify([...document.querySelectorAll("
        "'iframe')].map(f => inspect(f.contentDocument))); };</script></body>"
    )
    done = subprocess.run(
        [
            browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions",
            "--no-first-run", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}",
            "--window-size=1500,2000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--enable-logging=stderr", "--dump-dom", looking.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(html.unescape(found[1]))


def in_order(levels: list[int]) -> bool:
    return levels[0] == 1 and levels.count(1) == 1 and all(
        after <= before + 1 for before, after in itertools.pairwise(levels)
    )  # fmt: skip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_report_opens_in_a_browser_with_nothing_broken_or_missing(
    report: Path, tmp_path: Path, dark: bool
) -> None:
    pages = opened(report, tmp_path, dark=dark)
    assert [found["wide"] for found in pages] == [360, 1400]
    for found in pages:
        assert found["scrolls"] <= 0, "the page is wider than the screen"
        assert found["outside"] == []
        # Maps of two channels; losses, normalised and two channels, activity, two spectra, time,
        # memory.
        assert len(found["images"]) == 2
        for complete, width, height, alt in found["images"]:
            assert complete
            assert min(width, height) > 100
            assert len(alt) > 20
        assert len(found["drawings"]) == 9
        for role, width, told in found["drawings"]:
            assert role == "img"
            assert width > 100
            assert len(told) == 2
            assert min(map(len, told)) > 3
        assert in_order([level for level, _ in found["headings"]])
        assert all(text.strip() for _, text in found["headings"])
        assert found["twice"] == []
        assert found["nowhere"] == []
        assert found["unnamed"] == []
        assert found["fetched"] == []
        assert found["outer"] == []
        lost = re.findall(r"\b(?:nan|NaN|None|undefined|Infinity|inf)\b", found["text"])
        assert lost == []
        assert found["bare"] == 0, "a table without a caption or scopes"
        assert found["still"] == 0, "a box that scrolls and that no key reaches"
        assert found["pale"] == [], "text that is too pale"
        assert found["checked"] > 100
        assert found["lang"] == "en"
        assert ODD in found["text"]


def test_the_checks_of_the_browser_find_what_is_broken(tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    # A data: URI that is no picture: nothing is fetched, so nothing is said on the console.
    broken.write_text(
        '<!doctype html><html lang="de"><body><h1>a</h1><h3>b</h3><a href="#none">c</a>'
        '<img src="data:image/png;base64,AAAA"><p style="color:#aaa;background:#fff">pale</p>'
        '<div style="width:2000px">wide</div><table><tr><th>x</th></tr></table>'
        '<a href="http://127.0.0.1/">out</a><p id=p>nan</p><p id=p></p><div class=scroll></div>'
    )
    narrow, _ = opened(broken, tmp_path, dark=False)
    assert narrow["scrolls"] > 0
    assert "DIV." in narrow["outside"]
    assert narrow["images"][0][1:] == [0, 0, ""]
    assert not in_order([level for level, _ in narrow["headings"]])
    assert narrow["nowhere"] == ["#none", "http://127.0.0.1/"]
    assert narrow["outer"] == ["http://127.0.0.1/"]
    assert narrow["twice"] == ["p"]
    assert narrow["bare"] == narrow["still"] == 1
    assert [name for _, name, _ in narrow["pale"]] == ["P"]
    assert "nan" in narrow["text"]


def test_a_missing_browser_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        browser()


# What is on the page


def test_a_report_tells_what_ran_and_how_good_it_is(report: Path, runs: Path) -> None:
    text = words_of(report)
    config = json.loads((runs / "tuned" / "run.json").read_text())["fingerprints"]
    for told in (
        "demo-finetune is a swin model of",
        "trained for 2 steps of 2 samples over 2 leads, from the weights of demo",
        "times that of persistence and",
        "that of pretrained <1>.",  # against the run to compare with
        "their activity is",
        "pretrain 4 s, finetune 1 min 1 s",
        config["config"], config["store"], config["statistics"],
        "weights (last) at step 2",
        "2003-02-21 to 2003-03-08",  # the store's train split
        "1e-3",  # units of salinity
        "8 × 16 points",
        "% of the cells",  # land
        "aten::mm<T>",
        "try <more> threads",
    ):  # fmt: skip
        assert told in text, told
    commands = commands_of(report)
    assert [line.split()[1] for line in commands] == [
        "train", "train", "forecast", "evaluate", "forecast", "evaluate", "report",
    ]  # fmt: skip
    assert commands[-1].endswith(f"--compare 'pretrained <1>={runs}/first-again'")
    assert f"{runs}/first/config.json --out {runs}/first-again" in commands[0]
    assert f"--set train.start_from={runs}/first-again" in commands[1]


def test_the_commands_of_a_report_are_ones_that_the_command_line_takes(
    report: Path,
) -> None:
    for line in commands_of(report):
        assert callable(build_parser().parse_args(shlex.split(line)[1:]).run)


def test_scores_that_are_missing_are_made_once_and_kept(report: Path, runs: Path) -> None:
    files = [
        runs / name / f"forecast.{kind}"
        for name in ("first", "tuned")
        for kind in ("scores.csv", "scores.json", "spectra.nc")
    ]
    before = [path.stat().st_mtime_ns for path in files]
    stages = (runs / "tuned" / "stages.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in stages] == ["train", "forecast", "evaluate"]
    scores, spectra = scores_of(runs / "tuned" / "forecast.zarr")
    assert scores["rows"]
    assert spectra.names == (ODD, "salinity")
    assert [path.stat().st_mtime_ns for path in files] == before


def test_scores_of_another_forecast_are_refused_until_they_are_made_anew(
    runs: Path, report: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "first"
    shutil.copytree(runs / "first", copy)
    for name in ("forecast.scores.json", "forecast.spectra.nc"):
        shutil.copy(runs / "tuned" / name, copy / name)
    with pytest.raises(ValueError, match="give --force to score it again"):
        scores_of(copy / "forecast.zarr")
    made, _ = scores_of(copy / "forecast.zarr", force=True)
    own = json.loads((runs / "first" / "forecast.scores.json").read_text())
    assert made["rows"] == own["rows"]


# What is missing


def bare(runs: Path, folder: Path) -> Path:
    """A copy of the pretraining without its forecast."""
    ignored = shutil.ignore_patterns("forecast*", "report.html")
    return Path(shutil.copytree(runs / "first", folder, ignore=ignored))


def test_a_run_without_a_forecast_says_how_to_make_one(runs: Path, tmp_path: Path) -> None:
    run = bare(runs, tmp_path / "run")
    result = report_run(run)
    text = words_of(run / "report.html")
    assert "There is no forecast of this run yet." in text
    assert f"make one with `graticule forecast {run}`" in text
    assert result["pictures"] == ["losses", "stages", "memory"]


def test_a_run_that_was_killed_is_reported_on(runs: Path, tmp_path: Path) -> None:
    run = bare(runs, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    for name in ("run.json", "stages.jsonl"):
        (run / name).unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lost = {**json.loads(lines[1]), "loss": None, "gradient_norm": None, "skipped": True}
    (run / "metrics.jsonl").write_text("\n".join([lines[0], json.dumps(lost), lines[2][:40]]))
    warnings = report_run(run)["warnings"]
    assert "Training stopped at step 2 of 4; --resume goes on from the last checkpoint." in warnings
    assert "The run has no complete checkpoint, so nothing can be forecast from it yet." in warnings
    assert "The loss was not a finite number in 1 of 2 steps, the first at step 2." in warnings
    assert any(
        told.startswith("1 of 2 steps were skipped, the last at step 2") for told in warnings
    )
    assert not re.search(r"\b(?:nan|None)\b", words_of(run / "report.html"))


def test_a_store_that_was_moved_leaves_the_rest_of_the_report(
    runs: Path, report: Path, store: Store, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "first", run)
    gone = str(tmp_path / "gone.zarr")
    config = json.loads((run / "config.json").read_text())
    config["data"]["store"] = gone
    (run / "config.json").write_text(json.dumps(config))
    attributes = json.loads((run / "forecast.zarr" / "zarr.json").read_text())
    inner = json.loads(attributes["attributes"]["config"])
    inner["data"]["store"] = gone
    attributes["attributes"]["config"] = json.dumps(inner)
    (run / "forecast.zarr" / "zarr.json").write_text(json.dumps(attributes))
    for name in ("forecast.scores.json", "forecast.scores.csv", "forecast.spectra.nc"):
        (run / name).unlink()
    result = report_run(run)
    text = words_of(run / "report.html")
    assert f"Not shown: the truth is not there ({gone}); name the store with --store PATH" in text
    assert "The forecast has no scores and spectra here" in result["warnings"][0]
    assert "losses" in result["pictures"]
    assert "8 × 16 points" in text, "the grid is in the checkpoint"
    assert "1e-3" in text, "so are the units"
    found = report_run(run, store=str(store.path), channels=("salinity",))
    assert {"maps-salinity", "spectra-salinity"} <= set(found["pictures"])
    assert found["warnings"] == []


def test_one_lead_on_a_regional_grid_with_one_initial_time(tmp_path: Path) -> None:
    region = Grid(np.linspace(40, 26, 8), np.linspace(10, 40, 16))
    store = write_store(tmp_path / "store", grid=region, forcing=())
    compute(store, np.arange(16)).save(store)
    out = tmp_path / "run"
    run("train", "demo", "--out", str(out), settings=(
        *SMALL, f"data.store={store.path}", "train.steps=1", "forecast.leads=1",
        "model.boundary=paper"))  # fmt: skip
    run("forecast", str(out), "--start", "2003-03-14")
    result = report_run(out, channels=("salinity",))
    text = words_of(out / "report.html")
    assert "40 to 26 north, 10 to 40 east, a region" in text
    assert "1 of 2 channels, as asked for: salinity." in text
    assert commands_of(out / "report.html")[1] == (
        f"graticule forecast {out}-again --start 2003-03-14T00:00:00"
    )
    assert [name for name in result["pictures"] if name.startswith("maps")] == ["maps-salinity"]
    assert "Not shown" not in text


# What is asked for


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "first"], "--compare first: write LABEL=RUN"),
        (["--compare", "pretrained <1>=x"], "there is another run of that label"),
        (["--compare", "a=none"], "none holds no run"),
        (["--channel", "salt"], "no channel salt; there are"),
        (["--init", "2003"], "--init 2003 stands for 2 initial times"),
        (["--init", "2004-01-01"], "--init 2004-01-01 stands for 0 initial times"),
        (["--forecast", "none.zarr"], "none.zarr: no forecast there"),
        (["--out", "none/report.html"], "no such folder"),
    ],
)
def test_what_cannot_be_is_one_line(
    runs: Path, report: Path, arguments: list[str], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = report.read_bytes()
    assert main(["report", str(runs), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert report.read_bytes() == before


def test_only_an_earlier_report_is_replaced(runs: Path, tmp_path: Path) -> None:
    run = bare(runs, tmp_path / "run")
    out = tmp_path / "page.html"
    out.write_text("<!doctype html><p>not ours</p>")
    with pytest.raises(ValueError, match="is no report of ours, so it is not replaced"):
        report_run(run, out)
    assert "not ours" in out.read_text()
    out.unlink()
    report_run(run, out)
    first = out.read_text()
    report_run(run, out)
    assert out.read_text() == first


def test_a_folder_without_a_run_and_a_damaged_plan_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run \(no config.json there\)"):
        report_run(tmp_path)
    (tmp_path / "report.json").write_text('{"run": 3}')
    with pytest.raises(ValueError, match=r"report.json is damaged"):
        plan_of(tmp_path)
    (tmp_path / "report.json").write_text('{"run"')
    with pytest.raises(ValueError, match=r"report.json is damaged: Expecting"):
        plan_of(tmp_path)


# Its parts


def test_text_is_escaped_and_markup_is_not() -> None:
    made = tag("p", "a < b & c", tag("b", "<i>"), title='"x"', class_="y", aria_label=None)
    assert made == ('<p title="&quot;x&quot;" class="y">a &lt; b &amp; c<b>&lt;i&gt;</b></p>')


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (float("nan"), "–"), (True, "yes"), (12345, "12,345"), (0.5, "0.5000"),
        (0.06041, "0.06041"), (9722.4, "9722"), (123456.0, "123,456"), (1e-5, "1.000e-05"),
        ("2003", "2003"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits_and_a_dash_where_there_is_none(value: Any, text: str) -> None:
    assert number(value) == text


def test_a_table_aligns_numbers_and_names_its_rows() -> None:
    made = table("Sizes", ["what", "n", "unit"], [["a", 1.5, "m"], ["b", None, "<s>"]])
    assert '<th scope="col" class="number">n</th>' in made
    assert '<th scope="row" class="short">a</th>' in made
    assert '<td class="number">–</td>' in made
    assert "&lt;s&gt;" in made


def test_a_picture_keeps_its_words_and_thins_its_numbers() -> None:
    rows = [{"step": step, "loss": 1 / step} for step in range(1, 101)]
    svg = '<svg viewBox="0 0 2 1" role="none"><path d="M0 0"/></svg>'
    made = figure(
        Picture(name="x", title="A < B", caption="c", alt="it falls & falls", svg=svg, table=rows)
    )
    assert '<svg role="img" aria-labelledby="x-title x-description" viewBox="0 0 2 1">' in made
    assert '<desc id="x-description">it falls &amp; falls</desc>' in made
    assert "40 of 100 rows, evenly taken" in made
    assert made.count("<tr>") == 41
    assert '<th scope="row" class="number">1</th>' in made
    assert '<th scope="row" class="number">100</th>' in made


def test_a_stage_is_recorded_in_a_run_and_nowhere_else(tmp_path: Path) -> None:
    record_stage(tmp_path, "train", 1.0)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.json").write_text(json.dumps(Config(name="x").to_dict()))
    for stage, seconds in (("train", 2.0), ("evaluate", 9.0), ("train", 3.5), ("evaluate", 1.0)):
        record_stage(tmp_path, stage, seconds)
    with (tmp_path / "stages.jsonl").open("a") as file:
        file.write('{"stage": "tr')
    run = RunFolder.read(tmp_path)
    # Training is the sum of its sessions; scoring is as it went the last time.
    assert run.stage_seconds() == {"train": 5.5, "evaluate": 1.0}


def test_channels_that_differ_are_shown_of_many() -> None:
    channels = [
        Channel(variable=name, units="1", role="prognostic", level=float(level), level_units="m")
        for name in ("thetao", "so")
        for level in range(1, 24)
    ]
    channels.append(Channel(variable="zos", units="m", role="prognostic"))
    opened_file = Opened(
        path=Path("f"), attributes={}, channels=Channels(channels), init_times=[], hours=[24.0],
        grid=(2, 4),
    )  # fmt: skip
    empty: dict[str, Any] = dict(description={}, metrics=[], stages=[], last=None, state={})
    run = RunFolder(path=Path("r"), config=Config(), profile=None, **empty)
    subject = Subject(run=run, forecast=opened_file)
    assert subject.shown_channels == ["thetao@1", "so@1", "so@23", "zos"]
    asked = Subject(run=run, forecast=opened_file, chosen=("zos", "so@2"))
    assert asked.shown_channels == ["zos", "so@2"]


def scores_like(**given: Any) -> dict[str, Any]:
    rows = [
        {"source": source, "channel": "normalised", "lead": lead, "lead_hours": 6.0 * lead,
         "rmse": rmse[lead - 1], "samples": 3, "units": "1"}
        for source, rmse in (("model", [0.5, 0.4]), ("persistence", [0.4, 0.9]),
                             ("climatology", [1.0, 1.0]))
        for lead in (1, 2)
    ]  # fmt: skip
    return {"rows": rows, "skipped": 2, "pairs": 6, "first_skipped": "2004-01-01", "region": None,
            "climatology": "all", "std": {}, "provenance": {"store_fingerprint": "a"},
            **given}  # fmt: skip


def test_warnings_name_what_a_reader_should_know() -> None:
    metrics = [
        {"step": 1, "loss": 1.0, "validation_loss": 0.5, "gradient_norm": 5.0,
         "data_wait_share": 0.6},
        {"step": 2, "loss": 1.0, "validation_loss": 0.8, "gradient_norm": 5.0,
         "data_wait_share": 0.2},
    ]  # fmt: skip
    config = from_dict({"train": {"steps": 2}})
    run = RunFolder(path=Path("r"), config=config, description={}, metrics=metrics, stages=[],
                    last=Path("c"), state={}, profile=None)  # fmt: skip
    other = scores_like(climatology="month", provenance={"store_fingerprint": "b"})
    told = warnings(Subject(run=run, scores=scores_like(), others_scores={"old": other}))
    for part in (
        "rose from 0.5 at step 1 to 0.8 at step 2",
        "100% of the steps had their gradient clipped to a norm of 1",
        "waited for its data 40% of the time",
        "2 of 8 forecast fields have no truth in the store and no score, the first at 2004-01-01",
        "not below that of persistence at 6 h",
        "falls from 0.5 at 6 h to 0.4 at 12 h",
        "old was scored over another climatology",
        "old was scored over another store",
    ):
        assert sum(part in text for text in told) == 1, (part, told)
    assert len(told) == 8


def test_noise_and_a_better_run_are_warned_of() -> None:
    run = RunFolder(path=Path("r"), config=Config(), description={},
                    metrics=[], stages=[], last=Path("c"), state={}, profile=None)  # fmt: skip
    spectra = {"leads": [1, 2], "channels": {"u": {"short_power_ratio": [3.0, 1.9]},
                                             "h": {"short_power_ratio": [1.0, 76.5]}}}  # fmt: skip
    ours, better = scores_like(spectra=spectra), scores_like()
    better["rows"][1]["rmse"] = 0.3
    told = warnings(Subject(run=run, scores=ours, others_scores={"other": better}))
    assert any("more than 2 times the truth's in 1 of 2 channels, most in h (76.5" in t
               for t in told)  # fmt: skip
    assert any("other is better at the last lead that both have: its normalised RMSE is 0.3, that"
               " of this run 0.4." in t for t in told)  # fmt: skip


def test_a_generated_store_is_made_again_by_a_command() -> None:
    class Generated:
        attributes: Any

    run = RunFolder(path=Path("r"), config=from_dict({"data": {"store": "data/p.zarr"}}),
                    description={}, metrics=[], stages=[], last=None, state={},
                    profile=None)  # fmt: skip
    common = {"num_lat": 16, "num_lon": 32, "seed": 3}
    planet = {**common, "num_runs": 4, "samples_per_run": 9, "dt_seconds": 90.0}
    ocean = {**common, "num_years": 3, "calendar": "julian", "max_speed": 0.5,
             "dt_seconds": 43200.0}  # fmt: skip
    for made, told in (
        ({"planet": planet, "coast": True}, ("demo", 4, 90.0, True)),
        ({"ocean": ocean}, ("ocean", 3, 43200.0, None)),
    ):
        store: Any = Generated()
        store.attributes = {"provenance": made}
        line = store_command(Subject(run=run, training_store=store))
        assert line
        read = build_parser().parse_args(shlex.split(line)[1:])
        count = read.runs if "planet" in made else read.years
        assert (read.kind, count, read.dt_seconds, getattr(read, "coast", None)) == told
        assert (read.out, read.lat, read.lon, read.seed) == ("data/p.zarr", 16, 32, 3)
    assert store_command(Subject(run=run)) is None


def test_durations_are_told_in_the_unit_that_fits() -> None:
    assert [duration(s) for s in (0.25, 59, 61, 3725)] == [
        "0.25 s", "59 s", "1 min 1 s", "1 h 2 min",
    ]  # fmt: skip
