"""Members that are trained: against a step written out by hand, over ranks, plans and restarts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graticule.assemble import Shapes, assemble, build_model
from graticule.cluster.devices import device
from graticule.config import (
    BayesConfig,
    BeastConfig,
    Config,
    DataConfig,
    MeshConfig,
    TrainConfig,
)
from graticule.forecast.rollout import at_sea, model_input, next_states
from graticule.keyed import keyed
from graticule.memory.apply import Memory
from graticule.memory.offload import Host
from graticule.memory.plan import Plan, Segment
from graticule.memory.trace import trace_memory
from graticule.mesh import Mesh
from graticule.model.draws import Draw
from graticule.model.family import Model
from graticule.parallel.launch import laid_out, mesh_of, ranks_of
from graticule.train.budget import chooser_of
from graticule.train.foresee import foresee
from graticule.train.loss import LossWeights
from graticule.train.members import Ensemble, ensemble_of
from graticule.train.objective import Objective, as_stored
from graticule.train.rehearsal import Rehearsal
from graticule.train.step import StepResult, training_step
from graticule.verify.measure import Fields, Results, measure
from pools import Pools

SHAPES = Shapes(
    grid=(13, 24), num_prognostic=2, num_predicted=3, num_forcing=1, num_static=1, num_inputs=2,
    num_outputs=2, num_forcings=1,
)  # fmt: skip
LEADS, SAMPLES = 2, 2
LIKELIHOODS = ("moments", "gaussian", "crps")


def config_of(likelihood: Any, layout: str = "", **train: Any) -> Config:
    config = Config(
        model=BeastConfig(
            width=8, depth=2, inner_depth=1, heads=2, inner_heads=2, window=(4, 6),
            inner_window=(4, 3), norm_groups=2, nice_noise=4, nice_hidden=4,
        ),
        train=TrainConfig(leads=LEADS, batch=SAMPLES, **train),
        bayes=BayesConfig(
            weights=True, members=4, likelihood=likelihood, initial_sigma=0.5, floor=0.3
        ),
    )  # fmt: skip
    return laid_out(config, layout) if layout else config


def fields(keys: Sequence[int] = (3, 8)) -> Fields:
    """Of samples that are what their keys say, whatever batch they are in."""

    def field(what: str, *shape: int) -> Tensor:
        drawn = [keyed(0, what, key).standard_normal((*shape, *SHAPES.grid)) for key in keys]
        return torch.stack([torch.from_numpy(x) for x in drawn])

    return Fields(
        list(keys),
        field("inputs", 2, 2),
        [(field(f"forcing {n}", 1, 1), field(f"labels {n}", 2, 3)) for n in range(LEADS)],
    )


@cache
def weights() -> LossWeights:
    wet = keyed(0, "wet", 0).random((3, *SHAPES.grid)) > 0.3
    area = torch.linspace(0.5, 2, 13)[:, None].expand(13, 24).numpy()
    return LossWeights.of(wet, area)


def objective(detach_every: int = 0) -> Objective:
    return Objective(
        inputs=as_stored, forcing=as_stored, labels=as_stored,
        statics=torch.ones(1, *SHAPES.grid, dtype=torch.float64), weights=weights(), kind="mse",
        leads=LEADS, num_prognostic=2, num_outputs=2, detach_every=detach_every,
    )  # fmt: skip


def built(config: Config) -> Model:
    """In float64, with something in all places that start at 0."""
    model = build_model(config, SHAPES, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith(("second.weight", "second.bias")):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).double()
    return model


def stepped(
    config: Config,
    batches: Sequence[Fields],
    *,
    plan: Plan | None = None,
    detach_every: int = 0,
    samples: int = 40,
    ensemble: Ensemble | None = None,
) -> tuple[StepResult, dict[str, Tensor]]:
    """A step's result and gradients. samples: of the whole training."""
    model, aim = built(config), objective(detach_every)
    ensemble = ensemble or ensemble_of(config, Mesh(), model, aim, samples)
    with Host("cpu") as host:
        result = training_step(
            model, aim, batches, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), step=5,
            samples=sum(len(batch.keys) for batch in batches), learning_rate=0.0,
            memory=Memory(plan, host), ensemble=ensemble,
        )  # fmt: skip
    return result, {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore


def score_by_hand(likelihood: str, x: Tensor, y: Tensor, bayes: BayesConfig) -> Tensor:
    """x: (member, ...)."""
    m = len(x)
    if likelihood == "moments":
        v = x.var(0, correction=1) + bayes.floor**2
        return (v.log() + (y - x.mean(0)) ** 2 / v) / 2
    if likelihood == "gaussian":
        return (((x - y) / bayes.floor) ** 2 / 2).mean(0) + math.log(bayes.floor)
    pairs = (x[:, None] - x[None]).abs().sum((0, 1))
    spread = (m - 1 + bayes.alpha) / (2 * m**2 * (m - 1))
    return (x - y).abs().mean(0) - spread * pairs


@pytest.mark.parametrize("detach_every", [0, 1])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_step_is_the_likelihood_of_all_members_and_the_prior_written_out(
    likelihood: str, detach_every: int
) -> None:
    """Traps 2, 3, 4, 5, 7, 17 and 18: all members alive, one backward pass through everything."""
    config = config_of(likelihood)
    result, ours = stepped(config, [fields()], detach_every=detach_every, samples=2)
    model, batch, of = built(config), fields(), weights()
    statics = torch.ones(1, *SHAPES.grid, dtype=torch.float64)
    losses = []
    states = [batch.inputs] * 4
    for lead, (forcing, labels) in enumerate(batch.leads, start=1):
        said = []
        for member in range(4):
            given = states[member].detach() if detach_every else states[member]
            draw = Draw(step=5, member=member, items=(3, 8), lead=lead)
            x = at_sea(model(model_input(given, forcing, statics), draw=draw), of.wet)
            states[member] = next_states(given, x, 2)
            said.append(x)
        score = score_by_hand(likelihood, torch.stack(said), labels, config.bayes)
        weighed = (torch.where(of.wet, score, 0.0) * of.cell.double()).sum()
        losses.append(weighed / (of.total * 2 * SAMPLES))
    named = dict(model.named_parameters())
    kl = torch.zeros((), dtype=torch.float64)
    for name, rho in named.items():
        if name.endswith("_rho"):
            q = torch.distributions.Normal(named[name[:-4]], nn.functional.softplus(rho))
            p = torch.distributions.Normal(torch.zeros_like(rho), torch.ones_like(rho))
            kl = kl + torch.distributions.kl_divergence(q, p).sum()
    loss = torch.stack(losses).sum() + kl / (2 * of.total * 2)
    loss.backward()
    assert result.posterior is not None
    assert result.posterior["kl"] == pytest.approx(float(kl.detach()), rel=1e-12)
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-11)
    assert result.lead_losses == pytest.approx([float(x.detach()) for x in losses], rel=1e-10)
    most = max(float(p.grad.abs().max()) for p in named.values())  # type: ignore[union-attr]
    for name, parameter in named.items():
        assert parameter.grad is not None
        assert (ours[name] - parameter.grad).abs().max() < 1e-10 * most, name
    assert min(float(ours[name].abs().max()) for name in named) > 0


def plans() -> list[Plan]:
    """Of 10 units: recomputed, simple, offloaded and mixed; lead-wise."""
    count = len(built(config_of("crps")).units())

    def whole(*segments: Segment, lead_wise: bool = False) -> Plan:
        return Plan((segments,) * LEADS, lead_wise=lead_wise)

    return [
        whole(Segment(0, count, "recompute")),
        whole(Segment(0, 2, "offload"), Segment(2, count, "simple")),
        whole(Segment(0, 3, "keep"), Segment(3, count, "recompute"), lead_wise=True),
    ]


@pytest.mark.parametrize(
    "likelihood",
    ["moments", *(pytest.param(name, marks=pytest.mark.slow) for name in LIKELIHOODS[1:])],
)
def test_plans_change_no_bit_of_members(likelihood: str) -> None:
    """Trap 7: what runs again after other members ran draws what it drew."""
    config = config_of(likelihood)
    kept, wanted = stepped(config, [fields()])
    for plan in plans():
        result, found = stepped(config, [fields()], plan=plan)
        assert result.loss == kept.loss
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_micro_batches_add_up_to_the_batch(likelihood: str) -> None:
    """Traps 7 and 17: one draw of the weights for both, and the prior once."""
    config = config_of(likelihood)
    whole, wanted = stepped(config, [fields((3, 8))])
    parts, found = stepped(config, [fields((3,)), fields((8,))])
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert parts.posterior == whole.posterior
    most = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() < 1e-11 * most, name


# Ranks


def measured(layout: str) -> list[Any]:
    """On each rank: a likelihood after the other."""
    out = []
    for likelihood in LIKELIHOODS:
        config = config_of(likelihood, layout)
        out.append(measure(config, SHAPES, torch.float64, 1, SAMPLES))
    return out


@cache
def serial() -> list[Results]:
    return [Results.joined([part], SHAPES) for part in measured("")]


@pytest.mark.parametrize(
    "layout",
    [
        "data=2,member=2",
        pytest.param("member=2,weights=sharded", marks=pytest.mark.slow),
        "member=2,window=2,stripe_dim=lon",
        pytest.param("member=2,tensor=2", marks=pytest.mark.slow),
        pytest.param("member=2", marks=pytest.mark.slow),
        pytest.param("member=4", marks=pytest.mark.slow),
        pytest.param("window=3", marks=pytest.mark.slow),
        pytest.param("window=4", marks=pytest.mark.slow),
        pytest.param("data=2,weights=sharded,shard_unit=model", marks=pytest.mark.slow),
        pytest.param("member=2,window=2,weights=sharded", marks=pytest.mark.slow),
        pytest.param("window=2,tensor=2,weights=sharded", marks=pytest.mark.slow),
        pytest.param("sequence=2,member=2", marks=pytest.mark.slow),
    ],
)
def test_every_mesh_gives_the_numbers_of_one_process(pools: Pools, layout: str) -> None:
    """Traps 1 to 5 and 14: members' fields, the gradients of means and deviations, steps."""
    ranks = ranks_of(config_of("crps", layout))
    parts = pools[ranks].run(measured, layout)
    for number, (likelihood, one) in enumerate(zip(LIKELIHOODS, serial(), strict=True)):
        several = Results.joined([rank[number] for rank in parts], SHAPES)
        worst = several.differences(one)
        assert max(worst.values()) < 1e-10, (likelihood, worst)
        if "member" in layout and likelihood != "gaussian":
            assert several.sent["members"] > 0


def _with_prior(prior: Any, layout: str) -> Any:
    config = config_of("gaussian", layout)
    # So that its pull is no small part of a gradient.
    bayes = replace(config.bayes, prior=prior, narrow_sigma=0.05, cold=10.0)
    return measure(replace(config, bayes=bayes), SHAPES, torch.float64, 0, SAMPLES)


@pytest.mark.parametrize(
    ("prior", "layout"),
    [
        ("mixture", "tensor=2"),
        ("start", "member=2,weights=sharded"),
        pytest.param("mixture", "member=2,weights=sharded", marks=pytest.mark.slow),
        pytest.param("start", "tensor=2", marks=pytest.mark.slow),
    ],
)
def test_priors_that_need_draws_or_a_start_are_the_same_on_every_mesh(
    prior: str, layout: str, pools: Pools
) -> None:
    one = Results.joined([_with_prior(prior, "")], SHAPES)
    several = Results.joined(pools[2].run(_with_prior, prior, layout), SHAPES)
    worst = several.differences(one)
    assert max(worst.values()) < 1e-10, worst


def _weights_drawn(layout: str) -> dict[str, tuple[tuple[slice, ...], Tensor]]:
    """A member's own weights, as the ranks of a layout hold them."""
    from graticule.model.bayes import weights_of
    from graticule.model.draws import drawing

    config = config_of("crps", layout)
    running = assemble(
        config, SHAPES, Mesh(mesh_of(config.mesh, ranks_of(config))), dtype=torch.float64
    )
    drawn = {}
    with drawing(Draw(step=2, member=1)), torch.no_grad():
        for weight in weights_of(running.model):
            leaf = weight.name.rpartition(".")[2]
            box = weight.posterior.boxes.get(leaf, (slice(None),) * weight.mean.dim())
            drawn[weight.name] = box, weight.layer.value(leaf, torch.float64)
    return drawn


def test_ranks_that_share_a_member_draw_parts_of_one_set_of_weights(pools: Pools) -> None:
    """Trap 1: bit for bit."""
    whole = {name: value for name, (_, value) in _weights_drawn("").items()}
    for layout in ("tensor=2", "window=2"):
        for rank in pools[2].run(_weights_drawn, layout):
            assert rank.keys() == whole.keys()
            for name, (box, value) in rank.items():
                assert torch.equal(value, whole[name][box]), (layout, name)


def _clipped(layout: str) -> tuple[float, dict[str, tuple[tuple[slice, ...], Tensor]]]:
    """(norm before clipping, each parameter's change) of a step of size 1 clipped to 1e-3."""
    from graticule.parallel.box import box_of
    from graticule.parallel.data import local

    config = config_of("gaussian", layout)
    mesh = Mesh(mesh_of(config.mesh, ranks_of(config)))
    running = assemble(config, SHAPES, mesh, dtype=torch.float64)
    planes, shapes = running.planes, running.shapes
    ours, fixed = planes.predicted(planes.index), planes.static.of(planes.index)
    aim, of = objective(), weights()
    aim = replace(
        aim, statics=aim.statics[fixed],
        weights=LossWeights(of.cell[ours].contiguous(), of.wet[ours].contiguous(), of.total),
        num_prognostic=shapes.num_prognostic, planes=planes,
    )  # fmt: skip
    batch, forced = fields(), planes.forcing.of(planes.index)
    batch.inputs = batch.inputs[:, :, planes.known(planes.index)]
    batch.leads = [(given[:, :, forced], labels[:, :, ours]) for given, labels in batch.leads]
    named = dict(running.model.named_parameters())
    before = {name: local(p).detach().clone() for name, p in named.items()}
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in named.values():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.SGD([{"params": group} for group in groups.values()], lr=1.0)
    result = training_step(
        running.model, aim, [batch], optimizer=optimizer, step=5, samples=SAMPLES,
        learning_rate=1.0, clip_norm=1e-3, shared=running.shared,
        ensemble=ensemble_of(config, mesh, running.model, aim, 40),
    )  # fmt: skip
    changes = {}
    for name, parameter in named.items():
        box = box_of(parameter)
        assert box is not None
        changes[name] = box.slices, before[name] - local(parameter).detach()
    return result.gradient_norm, changes


def test_the_norm_that_clips_has_means_and_deviations_once_on_every_mesh(pools: Pools) -> None:
    """Trap 9: parts are added up, copies are not, and rho is in it."""
    norm, changes = _clipped("")
    squares = {name: float(change.square().sum()) for name, (_, change) in changes.items()}
    assert sum(squares.values()) ** 0.5 == pytest.approx(1e-3, rel=1e-5)
    assert norm > 1e-2
    of_rho = sum(value for name, value in squares.items() if name.endswith("_rho"))
    assert of_rho > 0.01 * sum(squares.values())
    for layout in ("tensor=2", "member=2,weights=sharded"):
        for there, parts in pools[2].run(_clipped, layout):
            assert there == pytest.approx(norm, rel=1e-11)
            for name, (box, change) in parts.items():
                wanted = changes[name][1]
                assert (change - wanted[box]).abs().max() < 1e-12, (layout, name)


# Turned samples


def test_each_member_sees_a_sample_turned_by_a_key_of_its_own() -> None:
    config = config_of("crps", roll_longitude=True)
    model, aim = built(config), objective()
    ensemble = ensemble_of(config, Mesh(), model, aim, 40)
    assert ensemble is not None
    assert ensemble.roll_seed == config.train.seed
    members = ensemble.members(5, [3, 8], [], model, aim)
    x = torch.cat([field.flatten(1, 2) for field in (fields().inputs, fields().leads[0][0])], 1)
    x = torch.cat([x, torch.ones(2, 1, *SHAPES.grid).double()], 1)
    seen = set()
    with torch.no_grad():
        for number, member in enumerate(members):
            by = [int(keyed(0, "roll", item, number).integers(24)) for item in (3, 8)]
            seen |= set(by)
            turned = torch.stack([x[i].roll(shift, -1) for i, shift in enumerate(by)])
            draw = Draw(step=5, member=number, items=(3, 8), lead=2)
            wanted = model(turned, draw=draw, added=False)
            wanted = torch.stack([wanted[i].roll(-shift, -1) for i, shift in enumerate(by)])
            assert torch.equal(member._compute(2, x, ()), wanted)
    assert len(seen) > 3


# Validation


def test_a_validation_score_is_the_same_whenever_it_is_asked() -> None:
    config = config_of("crps")
    model, aim = built(config), objective()
    ensemble = ensemble_of(config, Mesh(), model, aim, 40)
    assert ensemble is not None
    told = list(ensemble.forecast(model, aim, fields()))
    first = torch.stack([errors for *_, errors in told])
    assert first.shape == (LEADS, 3)
    again = list(ensemble.forecast(model, aim, fields()))
    assert torch.equal(torch.stack([errors for *_, errors in again]), first)
    members = ensemble.members(0, [3, 8], [], model, aim)
    each = [[field for field, _ in member.forecast(fields())] for member in members]
    for lead, (mean, labels, _) in enumerate(told):
        assert torch.equal(labels, fields().leads[lead][1])
        wanted = torch.stack([fields_of[lead] for fields_of in each]).mean(0)
        assert (mean - wanted).abs().max() < 1e-14
    training, _ = stepped(config, [fields()])
    found = (first.sum(1) / aim.weight(SAMPLES)).tolist()
    # Other draws of the same weights: another number, of the same kind.
    assert found == pytest.approx(training.lead_losses, rel=0.2)
    assert found != list(training.lead_losses)


# Refusals


def test_members_are_shared_evenly() -> None:
    with pytest.raises(ValueError, match=r"bayes\.members=4 .* mesh\.member=3 .*=1, 2, 4, or"):
        replace(config_of("crps"), mesh=MeshConfig(member=3))


@pytest.mark.parametrize("setting", [{"gradient_loss": 0.1}, {"dynamic_scale": "inverse"}])
def test_what_is_of_one_forecast_is_refused_for_members(setting: dict[str, Any]) -> None:
    key = next(iter(setting))
    with pytest.raises(ValueError, match=rf"train\.{key}=.* set train\.{key}=(0\.0|none)"):
        config_of("crps", **setting)


def test_noise_without_a_score_of_members_is_refused() -> None:
    config = replace(config_of("crps"), bayes=BayesConfig())
    with pytest.raises(ValueError, match=r"model\.nice_noise=4 .* choose bayes\.likelihood="):
        assemble(config, SHAPES, Mesh())


# Memory


@pytest.mark.parametrize("detach_every", [0, 1])
def test_plans_of_members_are_not_lead_wise_and_of_a_group_of_leads(detach_every: int) -> None:
    config = replace(
        config_of("moments", detach_every=detach_every),
        data=DataConfig(grid=SHAPES.grid, prognostic=("a", "b")),
    )
    chooser = chooser_of(config, SHAPES, device("cpu"), ranks=1)
    least = chooser.at(None).least.plan
    assert len(least.leads) == (1 if detach_every else LEADS)
    assert not least.lead_wise


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["moments", "crps"])
def test_a_step_of_several_members_is_foreseen(likelihood: str) -> None:
    """On fake tensors; of the CRPS an upper bound."""
    config = replace(
        config_of(likelihood), data=DataConfig(grid=SHAPES.grid, prognostic=("a", "b"))
    )
    profile = foresee(config, SHAPES)
    running = assemble(config, SHAPES, Mesh())
    job = Rehearsal(config, running, "cpu", "stored", torch.int16)
    job.ensemble = ensemble_of(config, Mesh(), running.model, job.objective, 1)
    job.step(LEADS, Memory())()
    for plan in plans()[:1]:
        _, trace = trace_memory(job.step(LEADS, Memory(plan)), job.owned)
        foreseen = profile.timeline(plan).peak_bytes / trace.peak_bytes
        assert 0.99 < foreseen < (1.01 if likelihood == "moments" else 1.6), plan
