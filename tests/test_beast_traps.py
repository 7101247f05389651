"""What goes wrong in a Bayesian ensemble without a word, and which tests hold it."""

from pathlib import Path

import pytest

import graticule

TRAPS = {
    1: "ranks of a member that draw different weights",
    2: "a KL that counts parts, copies or members more than once",
    3: "a gradient of members scaled by their ranks twice, or not at all",
    4: "the same of a likelihood that is a mean over members",
    5: "a variance of each rank's members; one member",
    6: "a variance from sums of raw squares",
    7: "draws that a recomputation, micro-batch or lead changes",
    8: "weight decay that pulls rho to 0",
    9: "a norm for clipping that counts copies, or leaves out rho",
    10: "noise by row or point",
    11: "rho or a drawn weight in bfloat16",
    12: "spread-skill without its factor, or of averaged deviations",
    13: "areas normalised by stripe",
    14: "means where there are sums; members that see different samples",
    15: "norm groups that follow the layout",
    16: "an average of rho; members that a checkpoint, mesh or restart changes",
    17: "a number of training items that counts batches or members",
    18: "land in loss or variance",
}
HELD: dict[int, list[str]] = {
    1: [
        "test_bayes::test_shards_put_together_are_the_whole_draw_bit_for_bit",
        "test_bayes::test_a_shards_weights_are_that_part_of_the_whole_weights_bit_for_bit",
        "test_members::test_ranks_that_share_a_member_draw_parts_of_one_set_of_weights",
    ],
    2: [
        "test_bayes::test_the_kl_counts_each_weight_once_whatever_is_drawn",
        "test_members::test_a_step_is_the_likelihood_of_all_members_and_the_prior_written_out",
        "test_members::test_every_mesh_gives_the_numbers_of_one_process",
    ],
    3: [
        "test_likelihoods::test_members_on_two_ranks_are_scored_as_on_one",
        "test_members::test_every_mesh_gives_the_numbers_of_one_process",
    ],
    4: [
        "test_likelihoods::test_members_on_two_ranks_are_scored_as_on_one",
        "test_members::test_every_mesh_gives_the_numbers_of_one_process",
    ],
    5: [
        "test_likelihoods::test_members_on_two_ranks_are_scored_as_on_one",
        "test_likelihoods::test_one_member_is_an_error_and_not_a_nan",
        "test_bayes::test_what_has_no_score_is_refused_with_the_way_out",
    ],
    6: [
        "test_likelihoods"
        "::test_a_spread_that_is_small_beside_the_field_keeps_its_digits",
        "test_ensemble_sums::test_small_spread_around_a_large_mean_keeps_its_digits",
    ],
    7: [
        "test_bayes"
        "::test_gradients_of_recomputed_units_are_those_of_kept_ones_bit_for_bit",
        "test_bayes::test_one_draw_of_weights_holds_for_all_items_and_leads",
        "test_beast::test_noise_is_a_samples_own_wherever_in_a_batch_it_is",
        "test_members::test_plans_change_no_bit_of_members",
        "test_members::test_micro_batches_add_up_to_the_batch",
    ],
    8: ["test_bayes::test_weight_decay_leaves_deviations_and_means_to_the_prior"],
    9: ["test_members::test_the_norm_that_clips_has_means_and_deviations_once_on_every_mesh"],
    10: [
        "test_bayes::test_points_with_equal_inputs_have_equal_outputs",
        "test_beast::test_noise_has_no_extent_in_space",
        "test_beast::test_drawn_weights_have_no_extent_in_space_either",
    ],
    11: [
        "test_bayes::test_weights_are_drawn_in_float32_and_rounded_once",
        "test_bayes::test_noise_below_half_a_bfloat16_spacing_is_told_as_lost",
    ],
    12: [
        "test_ensemble_scores"
        "::test_the_ratio_corrects_for_the_number_of_members_and_averages_variances",
        "test_ensemble_scores::test_areas_weigh_spread_and_error_alike",
        "test_ensemble_sums"
        "::test_members_like_the_truth_have_a_ratio_of_one_whatever_their_number",
    ],
    13: [
        "test_likelihoods::test_stripes_of_rows_count_by_their_share_of_the_whole_area",
        "test_task::test_areas_of_a_part_are_relative_to_the_whole_grid",
        "test_ensemble_sums::test_uneven_stripes_add_up_to_the_whole_field",
    ],
    14: [
        "test_beast_traps::test_nothing_is_averaged_over_ranks",
        "test_members::test_every_mesh_gives_the_numbers_of_one_process",
        "test_parallel_cases::test_ranks_of_a_member_draw_alike_and_members_and_items_differ",
    ],
    15: ["test_beast::test_groups_of_norms_are_the_configurations_on_every_mesh"],
    16: [
        "test_bayes::test_a_member_is_a_function_of_its_key_alone",
        "test_member_runs::test_a_run_that_was_stopped_goes_on_bit_for_bit",
        "test_member_runs::test_the_average_has_averaged_means_and_the_newest_deviations",
        "test_member_runs::test_a_checkpoint_of_one_mesh_gives_the_same_members_on_others",
    ],
    17: [
        "test_bayes::test_the_kl_is_divided_by_training_samples_and_output_values",
        "test_members::test_micro_batches_add_up_to_the_batch",
        "test_member_runs::test_the_prior_weighs_by_training_windows_and_values",
    ],
    18: [
        "test_likelihoods::test_land_counts_nothing_whatever_stands_there",
        "test_members::test_a_step_is_the_likelihood_of_all_members_and_the_prior_written_out",
    ],
}  # fmt: skip


def test_nothing_is_averaged_over_ranks() -> None:
    """Trap 14: gloo has no mean, and FSDP's own would divide by other numbers."""
    package = Path(graticule.__file__).parent
    for path in package.rglob("*.py"):
        source = path.read_text()
        assert "ReduceOp.AVG" not in source, path
        sharded = "fully_shard(" in source
        assert not sharded or "set_force_sum_reduction_for_comms(True)" in source, path
        assert not sharded or "set_gradient_divide_factor(1.0)" in source, path


@pytest.mark.parametrize("trap", TRAPS)
def test_each_trap_is_held_by_tests_that_exist(trap: int) -> None:
    assert HELD[trap], TRAPS[trap]
    for name in HELD[trap]:
        file, _, function = name.partition("::")
        source = (Path(__file__).parent / f"{file}.py").read_text()
        assert f"\ndef {function}(" in source, name
