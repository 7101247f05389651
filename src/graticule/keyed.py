"""Random draws by logical key: what is drawn depends on what it is for, never on where or when.

A key is (seed, purpose, numbers...): step, item, member, parameter. The same key gives the same
numbers on any process, in any order, however often it is asked. Philox is counter based, so a
key costs no state and there is nothing to save but the step.
"""

import hashlib
from operator import index

import numpy as np


def keyed(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A generator for one logical draw. `purpose` is a short word such as `order` or `roll`.

    `seed` and `numbers` are whole numbers: TypeError for 1.5, which would share the draws of 1.
    """
    if ":" in purpose:
        raise ValueError(f"purpose {purpose!r} holds a colon, which separates the parts of a key")
    text = ":".join([str(index(seed)), purpose, *(str(index(number)) for number in numbers)])
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def keyed_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed for a library's own generator, from the same key."""
    return int(keyed(seed, purpose, *numbers).integers(2**63 - 1))
