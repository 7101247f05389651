"""From files to scores: faults that one module alone cannot show, each along the whole path.

`HELD` names, for each kind of fault that public reports tell of files, times, statistics,
loading and ranks, the tests that hold it, here and elsewhere.
"""

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from graticule.assemble import build_model, shapes_of
from graticule.config import Config, DataConfig, SwinConfig, TrainConfig
from graticule.data.check import check
from graticule.data.ingest import ingest
from graticule.data.loader import Loader, Order
from graticule.data.samples import SampleSource
from graticule.data.statistics import FILE_NAME, Statistics, compute
from graticule.data.store import Store
from graticule.evaluate import evaluate
from graticule.forecast.run import forecast
from graticule.train import load_weights, train
from graticule.train.progress import read_metrics
from tiny import tiny_dataset, write_netcdf

HELD = {
    "a flip applied to part of the variables": [
        "test_cases::test_the_way_coordinates_run_in_files_changes_neither_training_nor_scores",
        "test_ingest::test_latitude_either_way_per_variable_and_per_file_gives_equal_tensors",
    ],
    "an assumed origin of longitude": [
        "test_cases::test_each_value_of_a_forecast_lies_at_its_own_coordinates",
        "test_ingest::test_any_longitude_origin_gives_equal_tensors",
    ],
    "longitudes outside the two usual ranges": [
        "test_ingest::test_box_across_longitude_origins_has_the_same_columns",
        "test_grid::test_a_box_without_a_grid_point_is_an_error_with_its_numbers",
    ],
    "a box across the dateline": ["test_grid::test_a_box_over_the_dateline_has_21_columns"],
    "coordinates that differ by rounding": [
        "test_ingest::test_coordinates_that_differ_by_rounding_join",
        "test_ingest::test_shifted_coordinates_are_an_error_with_the_largest_difference",
    ],
    "two fill values": ["test_ingest::test_both_fills_of_a_packed_variable_are_missing"],
    "expver": ["test_ingest::test_expver_slices_merge_to_one_field"],
    "dates without a variable": [
        "test_cases::test_a_hole_is_listed_then_its_policy_is_told_before_the_first_step",
    ],
    "a lost chunk read as land": [
        "test_ingest::test_lost_zarr_chunk_is_an_error_with_variable_and_dates",
        "test_check::test_lost_shard_is_an_error_with_file_and_date",
    ],
    "duplicate and unsorted times": [
        "test_ingest::test_overlapping_files_merge_with_a_warning",
        "test_ingest::test_overlap_that_differs_is_an_error_with_date_and_variable",
    ],
    "a window across a gap": [
        "test_cases::test_windows_of_files_with_a_missing_day_or_years_apart",
        "test_samudra_cases"
        "::test_no_window_of_a_curriculum_crosses_a_missing_day_or_leads_into_another_year",
    ],
    "the last window lost": [
        "test_loader::test_every_window_comes_once_whatever_the_batch",
        "test_loader::test_ranks_share_the_batches_of_one_process",
        "test_loader::test_every_sample_comes_once_for_any_number_of_samples_batch_and_ranks",
        "test_samudra_cases"
        "::test_every_validation_window_is_scored_once_whatever_the_threads_batch_and_ranks",
    ],
    "29 February in a calendar without it": [
        "test_cases::test_a_noleap_forecast_steps_from_28_february_to_1_march",
        "test_samudra_cases::test_noleap_windows_and_rollouts_step_from_28_february_to_1_march",
    ],
    "a climatology that shifts after 29 February": [
        "test_climatology::test_no_day_shifts_after_29_february",
        "test_samudra_cases"
        "::test_a_rollout_over_29_february_is_scored_by_the_climatology_of_its_dates",
    ],
    "units converted twice or never": [
        "test_cases::test_kelvin_files_give_celsius_forecasts_where_asked",
        "test_check::test_celsius_called_kelvin_is_out_of_bounds_and_extreme",
    ],
    "statics with a time, surfaces with a depth": [
        "test_cases::test_a_mask_with_a_time_of_its_own_is_the_same_input",
    ],
    "channels taken by position": [
        "test_cases::test_statistics_in_another_order_are_the_same_training",
        "test_trainer::test_fine_tuning_refuses_another_order_of_channels",
    ],
    "a forecast beyond its forcing": [
        "test_forecast::test_a_forecast_beyond_the_forcing_is_refused_before_its_first_step",
        "test_forecast::test_forcing_alone_is_enough_for_times_without_any_state",
        "test_samudra_cases"
        "::test_a_forecast_of_more_days_than_its_forcing_is_refused_with_the_first_date_it_lacks",
    ],
    "a channel without spread": [
        "test_cases::test_a_constant_channel_trains_and_is_forecast_as_its_constant",
        "test_samudra_values"
        "::test_a_constant_channel_trains_finite_and_is_forecast_as_its_constant",
    ],
    "a variance lost to cancellation": [
        "test_statistics::test_large_means_do_not_cancel_whatever_the_chunking",
        "test_samudra_values"
        "::test_a_pressure_of_101325_to_101327_has_its_spread_in_what_the_network_is_given_and_taught",
    ],
    "statistics that saw the test years": [
        "test_statistics::test_statistics_of_training_days_do_not_see_the_others",
        "test_samudra_values::test_losses_and_forecasts_know_the_training_days_alone",
    ],
    "NaN times zero": [
        "test_loss::test_a_missing_label_on_land_reaches_neither_loss_nor_gradient",
        "test_samudra_values"
        "::test_a_label_that_is_missing_on_land_gives_the_loss_and_gradient_of_the_sea",
        "test_samudra_values::test_no_gradient_of_a_rollout_depends_on_what_labels_hold_on_land",
    ],
    "a mean of unequal means": [
        "test_loss::test_two_halves_over_the_global_weight_are_the_whole",
        "test_samudra_values"
        "::test_ranks_with_one_wet_cell_and_seven_have_the_loss_and_gradients_of_one_rank",
    ],
    "weights of poles": [
        "test_cases::test_an_error_of_two_everywhere_scores_two_with_poles_either_way_up",
        "test_samudra_values"
        "::test_an_error_of_two_everywhere_is_two_with_poles_either_way_up_on_any_ranks",
    ],
    "memory that grows": [
        "test_loader::test_memory_has_a_bound_however_many_steps_are_taken",
        "test_loader::test_buffers_of_200_batches_are_those_of_the_first_few",
    ],
    "processes started after reading": [
        "test_resume::test_workers_write_the_same_store_and_end_at_an_error",
        "test_cases::test_after_reading_in_this_process_others_read_and_write_the_same",
        "test_forked::test_ranks_forked_after_reading_read_other_chunks_and_the_parent_goes_on",
        "test_forked::test_a_child_does_not_inherit_a_lock_that_a_reading_thread_holds",
    ],
    "writers that share a chunk": [
        "test_resume::test_two_parts_at_once_are_the_whole_twenty_times",
        "test_parallel_forecast"
        "::test_ten_starts_written_by_several_at_once_lose_nothing_in_twenty_repeats",
    ],
    # Over ranks
    "a mean of ranks' unequal means": [
        "test_task::test_one_cell_here_and_seven_there_weigh_as_eight",
    ],
    "a domain of one rank": [
        "test_parallel_cases"
        "::test_a_domain_of_one_rank_named_outright_gives_the_bits_of_one_process",
        "test_space::test_a_domain_of_one_rank_is_the_model_itself",
        "test_space::test_one_rank_pads_as_without_stripes_bit_for_bit",
        "test_routes::test_one_rank_computes_what_the_serial_model_does",
    ],
    "a halo wider than what a neighbour holds": [
        "parity/test_layers::test_eight_rows_on_eight_ranks_take_a_kernel_of_five",
    ],
    "a grid that ranks do not divide": [
        "test_parallel_cases::test_17_x_24_points_over_three_ranks_come_back_as_17_x_24",
    ],
    "a norm of each part": [
        "test_space::test_rows_0_to_3_on_two_ranks_are_normed_as_one_field",
    ],
    "a gradient norm that counts twice": [
        "test_shared_weights::test_the_norm_counts_each_parameter_once",
        "test_parallel_training::test_two_ranks_train_as_one_process",
    ],
    "replicated parameters that drift": [
        "test_parallel_cases"
        "::test_after_ten_steps_on_stripes_sequences_and_tensors_no_rank_has_drifted",
        "test_shared_weights::test_after_ten_steps_the_ranks_hold_the_same_bits",
    ],
    "training that depends on the layout": [
        "test_parallel_training::test_two_ranks_train_as_one_process",
        "parity/test_models::test_five_steps_in_float32_agree_to_rounding",
    ],
    "first values that depend on the layout": [
        "test_shared_weights::test_first_values_have_the_same_bits_in_every_layout",
    ],
    "random numbers drawn in the wrong scope": [
        "test_space::test_what_might_be_wrong_under_a_split_is_refused_with_a_way_out",
        "test_parallel_cases::test_ranks_of_a_member_draw_alike_and_members_and_items_differ",
        "test_parallel_cases::test_a_model_draws_nothing_while_it_computes",
        "test_parallel_cases"
        "::test_ranks_of_a_sample_draw_the_same_turn_and_groups_take_other_samples",
        "test_task::test_stripes_of_rows_turn_together",
    ],
    "members wired wrongly": [
        "test_parallel_cases::test_ranks_of_a_member_draw_alike_and_members_and_items_differ",
        "test_ensemble_forecast::test_on_several_ranks_each_member_is_what_it_is_on_one",
    ],
    "an ensemble of few members": [
        "test_likelihoods::test_the_crps_that_is_trained_is_the_one_that_forecasts_are_scored_by",
        "test_likelihoods::test_one_member_is_an_error_and_not_a_nan",
        "test_ensemble_sums::test_crps_of_few_members_is_as_by_hand",
        "test_ensemble_sums::test_one_member_has_the_absolute_error_and_nothing_fair",
        "test_ensemble_evaluate::test_one_member_is_scored_and_what_it_cannot_have_is_said",
    ],
    "no spread and no error": [
        "test_likelihoods"
        "::test_members_that_are_all_the_target_have_a_finite_score_and_no_gradient",
        "test_ensemble_sums::test_members_that_all_equal_the_target_score_zero_and_have_no_ratio",
        "test_ensemble_sums::test_prescribed_cells_leave_the_ratio_as_it_is",
        "test_ensemble_scores::test_prescribed_cells_are_excluded_and_change_nothing",
    ],
    "strided memory in collectives": [
        "test_parallel_cases::test_fields_in_any_order_of_memory_travel_as_contiguous_ones",
        "test_routes::test_a_route_brings_each_token_to_its_slot_and_back_in_every_type",
        "parity/test_layers::test_a_layer_over_stripes_is_the_layer_over_the_field",
    ],
    "samples that ranks of a group do not share": [
        "test_parallel_cases"
        "::test_ranks_of_a_sample_draw_the_same_turn_and_groups_take_other_samples",
        "test_loader::test_ranks_share_the_batches_of_one_process",
    ],
    "a sharded module that is used several times": [
        "test_shared_weights::test_three_leads_with_recomputed_blocks_are_as_one_process",
    ],
    "a rollout gradient that is cut without a word": [
        "test_forecast::test_a_rollout_is_differentiable_through_all_leads",
        "test_step::test_the_rollouts_gradient_is_not_handed_on_after_every_so_many_leads",
    ],
    "a boundary that is used before it is back": [
        "test_offload::test_losses_and_gradients_are_bitwise_the_same_from_the_first_step_on",
        "test_offload::test_copies_as_late_as_the_waits_allow_give_the_same_bits",
        "test_offload::test_any_tensor_comes_back_as_it_was",
        "test_memory_apply::test_gradients_are_the_same_bits_under_every_plan",
        "test_memory_layouts::test_plans_change_nothing_on_stripes",
    ],
    "a run that dies when its rollout grows": [
        "test_cli::test_a_training_that_cannot_keep_to_its_budget_never_starts",
        "test_memory_choose"
        "::test_a_budget_that_cannot_be_met_is_refused_with_the_least_its_price_and_ways_out",
    ],
    "validation that ranks share unevenly": [
        "test_task::test_seven_samples_with_errors_1_to_7_are_4_on_two_ranks",
        "test_task::test_a_rank_that_never_had_a_sample_ends_with_the_others",
    ],
    "a rank that fails while the others wait": [
        "test_parallel_training::test_a_file_that_one_rank_cannot_read_ends_all_and_is_named",
    ],
    "a checkpoint of another number of ranks": [
        "test_checkpoint_layouts"
        "::test_weights_and_optimizer_are_the_same_when_resumed_on_one_and_on_four_ranks",
        "test_parallel_training::test_a_run_goes_on_on_another_layout_and_on_one_process",
    ],
}
SEA = ["thetao", "so", "zos"]
WIND: dict[str, Any] = {"u10": "forcing", "v10": "forcing"}
SPLITS = {
    "train": ["2003-02-20/2003-03-05"],
    "validation": ["2003-03-06/2003-03-08"],
    "test": ["2003-03-09/2003-03-11"],
}


def config_of(store: Store, *, data: dict[str, Any] | None = None, **settings: Any) -> Config:
    given = {"steps": 3, "batch": 2, "warmup_steps": 1, "learning_rate": 1e-3, **settings}
    return Config(
        name="case",
        data=DataConfig(store=str(store.path), **(data or {})),
        # 17 rows and 24 columns: 9 x 12 tokens, so that a row of windows holds padding.
        model=SwinConfig(patch=1, window=(4, 4), width=8, depth=2, heads=2, norm_groups=2),
        train=TrainConfig(**given),
    )


def with_statistics(store: Store) -> Store:
    compute(store, SampleSource(store, DataConfig()).times("train")).save(store)
    return store


def ingested(sources: Sequence[Path], out: Path, **given: Any) -> Store:
    options = {"variables": [*SEA, *WIND], "roles": WIND, "splits": SPLITS, **given}
    return with_statistics(ingest(sources, out, **options))


def losses(run: Path) -> list[float]:
    lines = read_metrics(run)
    return [line[key] for line in lines for key in ("loss", "gradient_norm")]


def forecast_to(
    out: Path,
    store: Store,
    *,
    run: Path | None = None,
    starts: Sequence[int] = (17,),
    leads: int = 2,
) -> xr.Dataset:
    """With a run's weights, or, without a run, of persistence; as any program reads it."""
    source = SampleSource(store, DataConfig())
    model = build_model(config_of(store), shapes_of(source))
    for parameter in model.recover.parameters():
        parameter.detach().zero_()
    if run is not None:
        load_weights(run, model, source.channel_names)
    statistics = Statistics.load(store)
    forecast(model, source, statistics, out, starts=list(starts), leads=leads, attributes={})
    with xr.open_dataset(out) as dataset:
        return dataset.load()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("plain")
    return ingested([write_netcdf(tiny_dataset(), folder / "all.nc")], folder / "store")


@pytest.fixture(scope="module")
def plain_run(plain: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "run"
    train(config_of(plain), run)
    return run


# Places


def at_home(dataset: xr.Dataset) -> xr.Dataset:
    """zos is its own latitude and u10 its own longitude, land and all."""
    for name, own in (("zos", dataset.lat), ("u10", np.mod(dataset.lon, 360))):
        values = (xr.zeros_like(dataset[name].fillna(0)) + own).transpose(*dataset[name].dims)
        dataset[name] = (values.dims, values.values.astype(np.float32), dataset[name].attrs)
    return dataset


def two_directions(folder: Path, change: Any = lambda dataset: dataset) -> list[Path]:
    """One variable from south to north, the others in another file from north to south."""
    up = change(tiny_dataset())
    down = up.isel(lat=slice(None, None, -1))
    return [
        write_netcdf(up[["thetao", "u10"]], folder / "up.nc"),
        write_netcdf(down.drop_vars(["thetao", "u10"]), folder / "down.nc"),
    ]


def origin(west: float) -> Any:
    def write(folder: Path, change: Any = lambda dataset: dataset) -> list[Path]:
        return [write_netcdf(change(tiny_dataset(lon_origin=west)), folder / "all.nc")]

    return write


WAYS = pytest.mark.parametrize("write", [two_directions, origin(-180.0), origin(-300.0)])


@WAYS
def test_the_way_coordinates_run_in_files_changes_neither_training_nor_scores(
    write: Any, plain: Store, plain_run: Path, tmp_path: Path
) -> None:
    store = ingested(write(tmp_path), tmp_path / "store")
    train(config_of(store), tmp_path / "run")
    assert losses(tmp_path / "run") == losses(plain_run)
    ours = forecast_to(tmp_path / "ours.nc", store, run=tmp_path / "run")
    theirs = forecast_to(tmp_path / "theirs.nc", plain, run=plain_run)
    for name in (*SEA, "lat", "lon"):
        np.testing.assert_array_equal(ours[name], theirs[name])
    given: Any = {
        "train_ranges": SPLITS["train"], "climatology": "all", "region": (100, 140, -60, 60),
    }  # fmt: skip
    scores = [
        evaluate(tmp_path / path, truth, **given)
        for path, truth in (("ours.nc", store), ("theirs.nc", plain))
    ]
    np.testing.assert_array_equal(scores[0].rmse(), scores[1].rmse())
    # Three columns, 105, 120 and 135.
    wet = plain.wet[:5, :, 7:10].sum((1, 2))
    np.testing.assert_array_equal(scores[0].sums.cells, [wet, wet])


@WAYS
def test_each_value_of_a_forecast_lies_at_its_own_coordinates(write: Any, tmp_path: Path) -> None:
    roles: Any = {"v10": "forcing"}
    store = ingested(write(tmp_path, at_home), tmp_path / "store", roles=roles)
    written = forecast_to(tmp_path / "f.nc", store)
    assert (abs(written.zos.sel(lat=60.0) - 60.0) < 1e-4).all()
    assert (abs(written.zos - written.lat) < 1e-4).all()
    assert (abs(written.u10 - written.lon) < 1e-4).all()
    assert written.sizes["lat"] == 17
    assert written.lon.values.tolist() == (15.0 * np.arange(24)).tolist()


@pytest.mark.parametrize("descending", [False, True])
def test_an_error_of_two_everywhere_scores_two_with_poles_either_way_up(
    descending: bool, tmp_path: Path
) -> None:
    lat = np.linspace(-90, 90, 17)
    dataset = tiny_dataset().assign_coords(lat=("lat", lat, {"units": "degrees_north"}))
    dataset = dataset[["u10", "v10"]]
    rows = np.arange(17.0, dtype=np.float32)[:, None]
    for name in ("u10", "v10"):
        dataset[name] = dataset[name].copy(data=np.broadcast_to(rows, dataset[name].shape))
    way = dataset.isel(lat=slice(None, None, -1)) if descending else dataset
    ours = ingested([write_netcdf(way, tmp_path / "ours.nc")], tmp_path / "ours",
                    variables=["u10", "v10"], roles={})  # fmt: skip
    truth = dataset.copy()
    for name in ("u10", "v10"):
        truth[name] = dataset[name].copy(data=dataset[name].values - 2)
    store = ingested([write_netcdf(truth, tmp_path / "truth.nc")], tmp_path / "truth",
                     variables=["u10", "v10"], roles={})  # fmt: skip
    forecast_to(tmp_path / "f.nc", ours)
    scores = evaluate(tmp_path / "f.nc", store, train_ranges=SPLITS["train"], climatology="all")
    np.testing.assert_allclose(scores.rmse(), 2.0, rtol=1e-6)
    np.testing.assert_allclose(scores.bias(), 2.0, rtol=1e-6)


def test_a_region_is_not_closed_to_a_globe(tmp_path: Path) -> None:
    part = write_netcdf(tiny_dataset().isel(lon=slice(4, 20)), tmp_path / "part.nc")
    store = ingested([part], tmp_path / "store")
    config = config_of(store)
    with pytest.raises(ValueError, match=r"lon 60 to 285\), and model\.boundary=globe .*=paper"):
        train(config, tmp_path / "run")
    walls = replace(config, model=replace(config.model, boundary="paper"))
    train(walls, tmp_path / "run")
    assert np.isfinite(losses(tmp_path / "run")).all()


# Times


def test_a_hole_is_listed_then_its_policy_is_told_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = tiny_dataset()
    dataset.so[8] = np.nan
    store = ingested([write_netcdf(dataset, tmp_path / "all.nc")], tmp_path / "store")
    found = [f for f in check(store).findings if f.kind == "hole"]
    assert {f.channel for f in found} == {"so@0.5", "so@9.5"}
    assert all(len(f.dates) == 1 and f.dates[0].startswith("2003-02-28") for f in found)
    with pytest.raises(ValueError, match=r"miss values at sea.* so@0\.5 at 2003-02-28"):
        train(config_of(store), tmp_path / "run")
    told: list[str] = []
    with caplog.at_level(logging.INFO):
        train(
            config_of(store, data={"holes": "drop-window"}, steps=12), tmp_path / "run",
            progress=lambda step, steps, line: told.append(caplog.text) if step == 1 else None,
        )  # fmt: skip
    assert "1 of 14 training times, the first is 2003-02-28" in told[0]
    assert "(so@0.5, so@9.5); data.holes=drop-window" in told[0]
    assert "11 are left" in told[0]
    assert np.isfinite(losses(tmp_path / "run")).all()


def test_a_store_without_holes_says_so(
    plain: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        train(config_of(plain, steps=1), tmp_path / "run")
    assert "holes at sea: none in 14 training times (data.holes=error)" in caplog.text


def test_windows_of_files_with_a_missing_day_or_years_apart(tmp_path: Path) -> None:
    whole = tiny_dataset()
    for name, kept, expected in (
        ("gap", [d for d in range(20) if d != 8], 13),
        ("apart", range(20), 14),
    ):
        parts = []
        for half in (slice(None, 8), slice(8, None)) if name == "gap" else (slice(None),):
            days = np.array(kept)[half]
            # The second ten days come years later.
            values = np.where((days >= 10) & (name == "apart"), days + 1500, days)
            part = whole.isel(time=days)
            part["time"] = ("time", values, whole.time.attrs)
            parts.append(write_netcdf(part, tmp_path / f"{name}{half.start}.nc"))
        store = ingest(parts, tmp_path / name, variables=[*SEA, *WIND], roles=WIND)
        source = SampleSource(store, DataConfig(train=("2003/2008",)))
        starts = source.starts("train", leads=3)
        assert len(starts) == expected
        for batch, epoch in ((2, range(expected)), (5, range(expected, 2 * expected))):
            loader = Loader(source, Order(starts, seed=0), epoch, batch=batch, leads=0)
            assert sorted(s for b in loader for s in b.starts) == starts.tolist()


def test_a_noleap_forecast_steps_from_28_february_to_1_march(tmp_path: Path) -> None:
    dataset = tiny_dataset(days=9, start=(2004, 2, 25), calendar="noleap")
    store = ingested(
        [write_netcdf(dataset, tmp_path / "all.nc")], tmp_path / "store",
        splits={"train": ["2004-02-25/2004-03-05"]},
    )  # fmt: skip
    assert len(store.times) == 9
    assert len(SampleSource(store, DataConfig()).starts("train", leads=3)) == 6
    written = forecast_to(tmp_path / "f.nc", store, starts=[store.times.find("2004-02-27")])
    dates = [f"{date:%Y-%m-%d}" for date in written.valid_time.values.ravel()]
    assert dates == ["2004-02-28", "2004-03-01"]
    with pytest.raises(ValueError, match="2004-02-29 is not in the noleap calendar"):
        store.times.find("2004-02-29")


# Values


def test_kelvin_files_give_celsius_forecasts_where_asked(tmp_path: Path, plain: Store) -> None:
    dataset = tiny_dataset()
    kelvin = dataset.thetao.astype(np.float64) + 273.15
    dataset["thetao"] = kelvin.assign_attrs(dataset.thetao.attrs, units="K")
    path = write_netcdf(dataset, tmp_path / "all.nc")
    store = ingested([path], tmp_path / "store", units={"thetao": "degC"})
    written = forecast_to(tmp_path / "f.nc", store)
    same = forecast_to(tmp_path / "g.nc", plain)
    assert written.thetao.attrs["units"] == "degC"
    np.testing.assert_allclose(written.thetao, same.thetao, atol=1e-5)


def test_a_mask_with_a_time_of_its_own_is_the_same_input(tmp_path: Path) -> None:
    results = []
    for name in ("flat", "timed"):
        dataset = tiny_dataset()
        # Without a spread it would be normalised to nothing.
        dataset["mask"] = dataset.mask.fillna(0).assign_attrs(dataset.mask.attrs)
        parts = [write_netcdf(dataset.drop_vars("mask"), tmp_path / f"{name}.nc")]
        mask = dataset[["mask"]]
        mask = mask.expand_dims(time=dataset.time[:1]) if name == "timed" else mask
        parts.append(write_netcdf(mask, tmp_path / f"{name}-mask.nc"))
        store = ingested(
            parts, tmp_path / name, variables=[*SEA, *WIND, "mask"],
            roles={**WIND, "mask": "static"},
        )  # fmt: skip
        assert store.channels.names[:5] == (
            "thetao@0.5", "thetao@9.5", "so@0.5", "so@9.5", "zos",
        )  # fmt: skip
        train(config_of(store), tmp_path / f"{name}-run")
        results.append(losses(tmp_path / f"{name}-run"))
    assert results[0] == results[1]


def test_statistics_in_another_order_are_the_same_training(
    plain: Store, plain_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(plain.path, tmp_path / "store")
    path = tmp_path / "store" / FILE_NAME
    values = json.loads(path.read_text())
    for key in ("names", "mean", "std", "tendency_std", "count"):
        values[key] = values[key][::-1]
    path.write_text(json.dumps(values))
    train(config_of(Store(tmp_path / "store")), tmp_path / "run")
    assert losses(tmp_path / "run") == losses(plain_run)


@pytest.mark.parametrize("packing", ["float32", "int16"])
def test_a_constant_channel_trains_and_is_forecast_as_its_constant(
    packing: Any, tmp_path: Path
) -> None:
    dataset = tiny_dataset()
    dataset["zos"] = (dataset.zos * 0 + 5).assign_attrs(dataset.zos.attrs)
    path = write_netcdf(dataset, tmp_path / "all.nc")
    store = ingested([path], tmp_path / "store", packing=packing)
    train(config_of(store), tmp_path / "run")
    assert np.isfinite(losses(tmp_path / "run")).all()
    written = forecast_to(tmp_path / "f.nc", store)
    sea = written.zos.values[np.isfinite(written.zos.values)]
    assert sea.size
    assert (sea == 5.0).all()


def test_levels_with_land_of_their_own_train_and_keep_it(tmp_path: Path) -> None:
    dataset = tiny_dataset()
    dataset.thetao[:, 1, :9] = np.nan
    dataset.so[:, 1] = np.nan
    dataset.so[:, 1, 8, 10] = np.arange(20)  # one wet cell alone
    store = ingested([write_netcdf(dataset, tmp_path / "all.nc")], tmp_path / "store")
    train(config_of(store, leads=2), tmp_path / "run")
    assert np.isfinite(losses(tmp_path / "run")).all()
    written = forecast_to(tmp_path / "f.nc", store, run=tmp_path / "run")
    for name, level in (("thetao", 1), ("so", 1), ("so", 0)):
        kept = np.isfinite(written[name].values[0, :, level])
        index = store.channels.index(f"{name}@{(0.5, 9.5)[level]:g}")
        np.testing.assert_array_equal(kept, np.broadcast_to(store.wet[index], kept.shape))
    assert store.wet[3].sum() == 1


def test_int16_trains_as_float32_to_the_precision_of_packing(
    plain: Store, plain_run: Path, tmp_path: Path
) -> None:
    path = write_netcdf(tiny_dataset(), tmp_path / "all.nc")
    store = ingested([path], tmp_path / "store", packing="int16")
    train(config_of(store), tmp_path / "run")
    # Half a code is 1e-5 of a channel's range.
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(plain_run), rtol=1e-3)
    packed, whole = (
        read_metrics(run)[-1]["validation_loss"] for run in (tmp_path / "run", plain_run)
    )
    assert packed == pytest.approx(whole, rel=2e-4)


# The list above


@pytest.mark.parametrize("kind", HELD)
def test_each_kind_of_fault_is_held_by_tests_that_exist(kind: str) -> None:
    for name in HELD[kind]:
        file, _, function = name.partition("::")
        source = (Path(__file__).parent / f"{file}.py").read_text()
        assert f"\ndef {function}(" in source, name


# Processes


def test_after_reading_in_this_process_others_read_and_write_the_same(
    plain: Store, tmp_path: Path
) -> None:
    # Zarr and its threads are in use here; forked children would hang or read garbage.
    with_statistics(plain)
    dataset = tiny_dataset(days=6)
    source = tmp_path / "tiny.zarr"
    dataset.to_zarr(source, zarr_format=3, consolidated=False)
    options: dict[str, Any] = {"variables": [*SEA, *WIND], "roles": WIND}
    alone = ingest([source], tmp_path / "alone", **options)
    shared = ingest([source], tmp_path / "shared", workers=2, **options)
    assert alone is not None
    assert shared is not None
    assert shared.fingerprint == alone.fingerprint
    np.testing.assert_array_equal(shared.read(5), plain.read(5))
