"""Sharded weights where a segment of several units is recomputed.

FSDP2 gathers a layer's weights when it runs. In the backward pass it asks for those of the layer
before at the same time, so that they are underway, in a buffer, when that layer's turn comes (not
in all leads: a layer that had its backward pass asks for nothing). In the trace that keeps
everything, with W the whole weights and B the buffer of a layer,

    forward of l      + B(l), - B(l - 1), + W(l), ..., - W(l)
    backward of l     + W(l), - B(l), + B(l - 1), ..., - W(l)

Where a segment is recomputed its last unit's weights are whole, and those of the unit before are
underway if they were asked for. A layer that runs again makes its own whole, its buffer goes when
it ends, and its weights stay until its backward pass, which then asks for nothing but what comes
before the segment.
"""

import numpy as np


def asked_for(underway: np.ndarray) -> bool:
    """Whether a unit's weights are underway when its backward pass begins, of which this is the
    buffers' part."""
    return bool(underway.min() < 0)


def whole_already(whole: np.ndarray, underway: np.ndarray) -> None:
    """Make a unit's forward pass that of a recomputation with weights that are whole, in place.

    whole, underway: (event,) bytes of gathered weights and of buffers, as they came and went in a
    forward pass that the backward pass does not wait for.
    """
    whole[:] = underway[:] = 0


def gathered_again(whole: np.ndarray, underway: np.ndarray, *, asked: bool) -> None:
    """The same with weights that have to be gathered. asked: they are underway."""
    change, came = _changes(whole), np.maximum(_changes(underway), 0)
    whole[:] = np.maximum(change, 0).cumsum()
    so_far = came.cumsum()
    # A buffer goes where its layer ends, and its weights would be given back.
    underway[:] = so_far - np.maximum.accumulate(np.where(change < 0, so_far, 0))
    (rows,) = came.nonzero()
    if asked and len(rows):  # the last layer's
        underway[rows[-1] :] -= came[rows[-1]]


def after_recomputing(whole: np.ndarray, underway: np.ndarray, *, first: bool) -> None:
    """Make a unit's backward pass that of one whose weights are whole already, in place.

    first: of those of its segment that have such weights.
    """
    came = int(whole.argmax())
    whole[came:] -= whole[came]
    whole[:came] = 0
    (falls,) = (_changes(underway) < 0).nonzero()
    if first and len(falls):
        underway[falls[0] :] -= underway[falls[0]]
        underway[: falls[0]] = 0
    else:
        underway[:] = 0


def _changes(levels: np.ndarray) -> np.ndarray:
    """From each row to the next; the first is 0."""
    changes = np.zeros_like(levels)
    np.subtract(levels[1:], levels[:-1], out=changes[1:])
    return changes
