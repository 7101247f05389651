"""Whole tensors on disk, whatever part of them each rank holds.

    model-00001-of-00004.safetensors   whole tensors, those that one rank writes
    model.safetensors.index.json       which tensor is in which file

A rank writes a share of the tensors, equal in bytes, and receives their parts from the ranks that
hold them, 64 MiB at a time: no process ever needs memory for more than its share, and a file says
nothing of the layout it came from. Any reader of safetensors opens it, torch's distributed
checkpoint among them. To load, a rank reads just its parts.

torch's own way to such files (`HuggingFaceStorageWriter` with consolidation) writes the parts, and
then one process reads them all and writes them again: three times the traffic with the disk, and
the sums of the sealed files would be a fourth. See docs/log.md.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graticule.parallel.box import Box
from graticule.parallel.data import local
from graticule.parallel.exchange import Link
from graticule.parallel.talk import Talk
from graticule.train import seal
from graticule.train.parts import DTYPES, Entry, Key

INDEX = "model.safetensors.index.json"
_ROUND_BYTES = 2**26
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def file_names(entries: Sequence[Entry]) -> dict[Key, str]:
    """The file of each tensor, within the checkpoint."""
    owners: dict[str, list[int]] = {}
    for group in {entry.key[0] for entry in entries}:
        owners[group] = sorted({entry.owner for entry in entries if entry.key[0] == group})
    return {
        e.key: f"{e.key[0]}/model-{owners[e.key[0]].index(e.owner) + 1:05d}"
        f"-of-{len(owners[e.key[0]]):05d}.safetensors"
        for e in entries
    }


def write(
    folder: Path, entries: Sequence[Entry], parts: Mapping[Key, Tensor], talk: Talk
) -> tuple[dict[str, seal.Sealed], Exception | None]:
    """Write this rank's files into `folder`, to the disk; all ranks together.

    entries: of `parts.plan`. parts: of `parts.held`.
    Returns (the files, what this rank failed in): an error here stops no other rank.
    """
    names = file_names(entries)
    rounds = [list(_rounds([e for e in entries if e.owner == r])) for r in range(talk.size)]
    link = Link(talk.group)
    files: dict[str, _File] = {}
    error: Exception | None = None
    try:
        for number in range(max(map(len, rounds), default=0)):
            turn = [ours[number] if number < len(ours) else [] for ours in rounds]
            received = _delivered(turn, parts, link)
            if error is not None:  # the others still want what is here
                continue
            try:
                for entry in turn[talk.rank]:
                    name = names[entry.key]
                    if name not in files:
                        of_file = [e for e in entries if names[e.key] == name]
                        files[name] = _File(folder / name, of_file)
                    files[name].add(_assembled(entry, received, parts, talk.rank))
            except Exception as caught:
                error = caught
        try:
            return {name: file.finish() for name, file in files.items() if not error}, error
        except Exception as caught:
            return {}, caught
    finally:
        for file in files.values():
            file.close()


def write_index(folder: Path, group: str, entries: Sequence[Entry]) -> str:
    """Which tensor is in which file, as others' readers want it; the name of that file."""
    names = file_names(entries)
    ours = [entry for entry in entries if entry.key[0] == group]
    content = {
        "metadata": {"total_size": sum(entry.bytes for entry in ours)},
        "weight_map": {entry.key[1]: Path(names[entry.key]).name for entry in ours},
    }
    (folder / group / INDEX).write_text(json.dumps(content, indent=1) + "\n")
    return f"{group}/{INDEX}"


@dataclass(frozen=True)
class Saved:
    """A tensor in a file."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def saved(folder: Path) -> dict[str, Saved]:
    """The tensors in the files of a folder, by name, from their headers."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                entry = file.get_slice(name)
                found[name] = Saved(path.name, tuple(entry.get_shape()), DTYPES[entry.get_dtype()])
    return found


def read(
    folder: Path,
    files: Mapping[str, Saved],
    into: Mapping[str, Tensor],
    boxes: Mapping[str, Box | None],
) -> None:
    """Fill this rank's parts of `into`, in place; by this rank alone. boxes: which they are."""
    from safetensors import safe_open

    by_file: dict[str, list[str]] = {}
    for name in into:
        by_file.setdefault(files[name].file, []).append(name)
    for file_name, names in by_file.items():
        with safe_open(folder / file_name, framework="pt") as file:
            for name in names:
                box = boxes[name]
                if box is None or not box.count:
                    continue
                slices = box.slices
                part = file.get_slice(name)[slices] if slices else file.get_tensor(name)
                local(into[name]).detach().copy_(part)


class _File:
    """A safetensors file that is written tensor by tensor, in the order of its header."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in entries:
            begin, end = end, end + entry.bytes
            header[entry.key[1]] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.path = path
        self._sum, self._bytes = hashlib.sha256(), 0
        self._file = path.open("wb")
        self._put(struct.pack("<Q", len(text)) + text)

    def _put(self, content: Any) -> None:
        self._file.write(content)
        self._sum.update(content)
        self._bytes += len(content)

    def add(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._put(_as_bytes(tensor).numpy().data)

    def finish(self) -> seal.Sealed:
        self._file.close()
        seal.sync(self.path)
        return {"bytes": self._bytes, "sha256": self._sum.hexdigest()}

    def close(self) -> None:
        self._file.close()


def _rounds(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """As many at a time as `_ROUND_BYTES` hold, one at least."""
    turn: list[Entry] = []
    size = 0
    for entry in entries:
        if turn and size + entry.bytes > _ROUND_BYTES:
            yield turn
            turn, size = [], 0
        turn.append(entry)
        size += entry.bytes
    if turn:
        yield turn


def _delivered(
    turn: Sequence[Sequence[Entry]], parts: Mapping[Key, Tensor], link: Link
) -> dict[tuple[Key, Box], Tensor]:
    """What the others hold of our tensors of this turn. turn: by owner."""
    away = [(e, s, box) for ours in turn for e in ours for s, box in e.parts if s != e.owner]
    if not away:
        return {}
    send, receive = [0] * link.size, [0] * link.size
    sent = [torch.empty(0, dtype=torch.uint8)]
    awaited: list[list[tuple[Entry, Box]]] = [[] for _ in range(link.size)]
    for entry, sender, box in away:
        size = box.count * entry.dtype.itemsize
        if sender == link.rank:
            sent.append(_as_bytes(parts[entry.key].cpu()))
            send[entry.owner] += size
        elif entry.owner == link.rank:
            awaited[sender].append((entry, box))
            receive[sender] += size
    packed = link.exchange(torch.cat(sent), send, receive, "checkpoint")
    received = {}
    begin = 0
    for entry, box in (item for items in awaited for item in items):
        end = begin + box.count * entry.dtype.itemsize
        # A copy begins where its dtype may.
        received[entry.key, box] = packed[begin:end].clone().view(entry.dtype).view(box.sizes)
        begin = end
    return received


def _assembled(
    entry: Entry,
    received: Mapping[tuple[Key, Box], Tensor],
    parts: Mapping[Key, Tensor],
    rank: int,
) -> Tensor:
    """The whole tensor."""
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for sender, box in entry.parts:
        part = parts[entry.key] if sender == rank else received[entry.key, box]
        if box.sizes == entry.shape:
            return part.cpu()
        whole[box.slices] = part.cpu()
    return whole


def _as_bytes(tensor: Tensor) -> Tensor:
    # safetensors holds dense row-major numbers only.
    return tensor.contiguous().reshape(-1).view(torch.uint8)
