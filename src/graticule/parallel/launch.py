"""The processes of one run: how this one was started, and how they meet.

The same command runs alone, under torchrun and in a Slurm step; the environment says which.
How many there are is the launcher's to say, and ours to check (`mesh_of`); `watch` ends them
together.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from graticule.parallel.watch import Agreed, Processes, Watch

if TYPE_CHECKING:  # a second to import, which `graticule --help` need not spend
    import torch

    from graticule.config import Config, MeshConfig

MEETING = timedelta(minutes=5)
"""For all processes to start: they read Python's modules from one file system."""
EXCHANGE = timedelta(minutes=20)
"""For any exchange: another process may be reading a whole checkpoint."""
_PORTS = range(10000, 30000)  # below those that systems lend to programs that ask for any


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How this process was started.

    by: what started it with others; empty: it is alone. local_rank: its number on its machine.
    address, port: where rank 0 waits for the others.
    """

    by: Literal["", "torchrun", "Slurm"] = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """What the environment says. ValueError where it contradicts itself."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        found = _by_torchrun(environment)
    # A batch script has a rank, and the tasks of the whole job, but runs alone: it is no step.
    elif "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        found = _by_slurm(environment)
    else:
        return Launch()
    if not 0 <= found.rank < found.size:
        raise ValueError(
            f"{found.by} says that this is process {found.rank} of {found.size}: ranks count from 0"
        )
    return found


def _by_torchrun(environment: Mapping[str, str]) -> Launch:
    size, rank = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if size > 1 and missing:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but {' and '.join(missing)} not: start"
            " with torchrun, which sets all of them, or set where rank 0 waits for the others"
        )
    local = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else 0
    return Launch(
        by="torchrun", rank=rank, size=size, local_rank=local,
        address=environment.get("MASTER_ADDR", ""), port=port,
    )  # fmt: skip


def _by_slurm(environment: Mapping[str, str]) -> Launch:
    # SLURM_NTASKS is the job's, in a shell that srun opens with one task too.
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    size, rank = _number(environment, tasks), _number(environment, "SLURM_PROCID")
    if size == 1:
        return Launch(by="Slurm", rank=rank)
    # A step may run on some of the job's machines only, and two of its steps at once on one.
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT")
    else:
        job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
        port = _PORTS[(17 * job + step) % len(_PORTS)]
    local = _number(environment, "SLURM_LOCALID")
    return Launch(
        by="Slurm", rank=rank, size=size, local_rank=local, address=address, port=port
    )  # fmt: skip


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not re.fullmatch(r"\d+", text):
        raise ValueError(
            f"{name}={text!r} in the environment is no number, and says who of how many processes"
            " this is; start with torchrun or srun, or unset it"
        )
    return int(text)


def first_host(nodes: str) -> str:
    """The first of Slurm's list of machines, such as `a[003-007,9],b2` or `rack[1-2]n[0-7]`.

    ValueError where it is no such list.
    """
    first = re.match(r"(?:[^\[\],\s]|\[[0-9,-]+\])+", nodes)
    host = re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0]) if first else ""
    if not host or "[" in host or (first and nodes[first.end() : first.end() + 1] not in ("", ",")):
        raise ValueError(
            f"SLURM_JOB_NODELIST={nodes!r} does not say where rank 0 runs; set MASTER_ADDR to that"
            " machine's name"
        )
    return host


def mesh_of(config: "MeshConfig", size: int) -> dict[str, int]:
    """The sizes of a mesh of `size` processes, by axis, with `data` filled in where it is 0.

    ValueError gives the numbers where these processes do not make the configured mesh.
    """
    axes = ("data", "member", "window", "sequence", "tensor")
    sizes = {axis: int(getattr(config, axis)) for axis in axes}
    if sizes["sequence"] == 0:
        raise ValueError(
            "mesh.sequence=0 leaves the split of mesh.window open, and this command needs it:"
            " name mesh.window and mesh.sequence"
        )
    rest = math.prod(sizes[axis] for axis in axes[1:])
    told = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes[1:] if sizes[axis] > 1)
    if sizes["data"] == 0 and size % rest == 0:
        return sizes | {"data": size // rest}
    if (needed := rest * (sizes["data"] or 1)) == size:
        return sizes
    if sizes["data"]:
        told = " x ".join(filter(None, [f"mesh.data={sizes['data']}", told]))
    if sizes["data"] == 0 and size > rest:
        raise ValueError(
            f"{size} processes were started, and {told}: {rest} share each sample, which leaves"
            f" {size % rest} over; start {size - size % rest} or {size - size % rest + rest}, or"
            " change mesh.*"
        )
    raise ValueError(
        f"{told} is {needed} process{'' if needed == 1 else 'es'}, and"
        f" {size} {'was' if size == 1 else 'were'} started: torchrun --nproc-per-node {needed}"
        f" -m graticule ..., or srun --ntasks {needed} graticule ...; or change mesh.*"
    )


def laid_out(config: "Config", layout: str) -> "Config":
    """`config` with the mesh keys that a layout names; `2x2` stands for a pair."""
    from graticule.config import override

    settings = []
    for part in re.split(r",(?=\w+=)", layout):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"layout {layout!r}: write KEY=VALUE,KEY=VALUE with keys of mesh")
        pair = re.fullmatch(r"(\d+)x(\d+)", value)
        settings.append(f"mesh.{key}={','.join(pair.groups()) if pair else value}")
    return override(config, settings)


def ranks_of(config: "Config") -> int:
    """The processes that a mesh needs at least."""
    mesh = config.mesh
    return (mesh.data or 1) * mesh.member * mesh.window * (mesh.sequence or 1) * mesh.tensor


@contextmanager
def processes(device: str | None = None) -> Iterator[Processes]:
    """The processes that were started together: they meet here, and end together.

    device: of torch; None: a GPU if there is one. With several, each takes the GPU of its number
    on its machine.
    A group that torch.distributed has already is used and left as it is. Else an error in this
    block ends all processes: it is raised where it came from, the others raise `RankFailed`, and
    whoever cannot is ended within `watch.GRACE` seconds.
    """
    import torch
    import torch.distributed as dist

    from graticule.mesh import forget_meshes

    launch = launched()
    if dist.is_available() and dist.is_initialized():
        here = Processes(dist.get_rank(), dist.get_world_size())
        here.device = device_of(device, launch.local_rank, here.size)
        yield here
        return
    here = Processes(launch.rank, launch.size)
    if here.size == 1:
        here.device = device_of(device)
        yield here
        return
    watch = Watch(store := _meet(launch), here)
    try:
        here.device = device_of(device, launch.local_rank, here.size)
        backend = "gloo"
        if here.device.type == "cuda":
            # Unnamed tensors, too, live on this GPU. Objects and checkpoints travel by gloo.
            torch.cuda.set_device(here.device)
            backend = "cpu:gloo,cuda:nccl"
        forget_meshes()
        dist.init_process_group(
            backend, store=store, rank=here.rank, world_size=here.size, timeout=EXCHANGE
        )
        try:
            yield here
        except Agreed:
            watch.end()
            raise
        watch.end()
    except BaseException as error:
        if not watch.over:
            watch.fail(error)
        raise


def device_of(name: str | None = None, local_rank: int = 0, size: int = 1) -> "torch.device":
    """The device that a process computes on. ValueError where PyTorch cannot.

    name: of torch; None: a GPU if there is one. local_rank: its number on its machine, size: how
    many processes there are in all.
    """
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cuda" and size > 1:
            device = torch.device("cuda", _gpu(device, local_rank, torch.cuda.device_count()))
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} cannot be used here: {reason}") from None
    return device


def _gpu(device: "torch.device", local_rank: int, visible: int) -> int:
    """Which of the `visible` GPUs is that of this process among several."""
    if device.index is not None:
        raise ValueError(
            f"--device {device} names one GPU for several processes; say --device cuda, and each"
            " takes the one of its number"
        )
    if visible == 1:  # a launcher may show each process its own alone
        return 0
    if visible and local_rank >= visible:
        raise ValueError(
            f"process {local_rank} of this machine finds {visible} GPUs: start {visible} processes"
            " a machine at most"
        )
    return local_rank


def _meet(launch: Launch) -> Any:
    """A store of torch.distributed that all processes share, empty at each meeting."""
    import torch.distributed as dist

    if not _meetings:
        # torchrun may keep the store itself: then torch finds it by the environment.
        where = "env://" if launch.by == "torchrun" else f"tcp://{launch.address}:{launch.port}"
        try:
            met = dist.rendezvous(where, launch.rank, launch.size, timeout=MEETING)
            _meetings.append(next(iter(met))[0])
        except RuntimeError as error:
            raise ValueError(
                f"process {launch.rank} of {launch.size}, started by {launch.by}, did not meet the"
                f" others at {launch.address}:{launch.port}: {str(error).splitlines()[0]}; start"
                " all of them at once, and set MASTER_PORT to a free port where another run has"
                " taken it"
            ) from error
    # A script may train several times, and what is left of one run must not reach the next.
    _meetings.append(dist.PrefixStore(f"meeting {len(_meetings)}", _meetings[0]))
    return _meetings[-1]


_meetings: list[Any] = []
"""The store that this process found, and of each meeting its part of it."""
