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


def there(whole: np.ndarray, underway: np.ndarray) -> None:
    """Make a unit's forward pass that of a recomputation with weights that are whole, in place.

    whole, underway: (event,) bytes of gathered weights and of buffers, as they came and went in a
    forward pass that the backward pass does not wait for.
    """
    whole[:] = underway[:] = 0


def gathered_again(whole: np.ndarray, underway: np.ndarray, *, asked: bool) -> None:
    """The same with weights that have to be gathered. asked: they are underway."""
    if whole[-1] > 0:  # nobody gave them back after the forward pass
        there(whole, underway)
        return
    change, came = np.diff(whole, prepend=0), np.maximum(np.diff(underway, prepend=0), 0)
    whole[:] = np.cumsum(np.maximum(change, 0))
    buffer = 0
    for row in range(len(whole)):
        buffer += came[row]
        if change[row] < 0:  # its layer ends
            buffer = 0
        underway[row] = buffer
    if asked:  # the last layer's
        (rows,) = np.nonzero(came)
        if len(rows):
            underway[rows[-1] :] -= came[rows[-1]]


def after_recomputing(whole: np.ndarray, underway: np.ndarray, *, first: bool) -> None:
    """Make a unit's backward pass that of one whose weights are whole already, in place.

    first: of its segment.
    """
    came = int(whole.argmax())
    whole[came:] -= whole[came]
    whole[:came] = 0
    (falls,) = np.nonzero(np.diff(underway, prepend=0) < 0)
    if first and len(falls):
        underway[falls[0] :] -= underway[falls[0]]
        underway[: falls[0]] = 0
    else:
        underway[:] = 0
