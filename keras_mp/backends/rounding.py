"""What the backends share in stochastic rounding to bfloat16: a hash and its keys.

A float32 number becomes one of its two neighbours in bfloat16, the upper one with a
probability that grows from 0 to 1 between them: the mean is the number itself. So a
small update of a weight, below half of its last bit, takes effect now and then;
rounding to nearest always drops it.

The random bits are a hash of the seed, the step, the number of the write within it and
the place in the tensor: any device computes its own part, and every run gets the same
bits. The backends' own generators take longer than the update itself.

Sources: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"; the hash
is "lowbias32", Wellons 2018, "Prospecting for Hash Functions".
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from keras_mp.types import Tensor

WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


class Words(NamedTuple):
    """Operations of a backend on 32-bit words, or on Python numbers in their place.

    Attributes:
        word: turns an integer, or an integer scalar tensor, into such a word.
        xor: (x, y) -> their exclusive or.
        shift: (x, bits) -> x, shifted right by `bits`.
        numbers: (shape, axis) -> the place along an axis of each element.
    """

    word: Callable[[Any], Any]
    xor: Callable[[Any, Any], Any]
    shift: Callable[[Any, int], Any]
    numbers: Callable[[Sequence[int], int], Any]


class RandomBits:
    """Words of random bits, different for each step and each write.

    Args:
        words: the operations of the backend.
        seed, step: integer scalars.
    """

    def __init__(self, words: Words, seed: Tensor, step: Any) -> None:
        self._words, word = words, words.word
        key = self._mixed(word(seed) + word(_GOLDEN), word(seed))
        self._key = self._mixed(key + word(step), word(step))
        self._writes = 0

    def next(self, shape: Sequence[int]) -> Any:
        """A word for each element of a tensor that is written now."""
        self._writes += 1
        words = self._words
        number = words.word(self._writes * _GOLDEN & WORD)
        first = self._mixed(self._key + number, self._key)
        second = self._mixed(first, words.xor(self._key, number))
        place = words.word(0)
        for axis in range(len(shape)):
            steps = words.word(math.prod(shape[axis + 1 :]) & WORD)
            place = place + words.numbers(shape, axis) * steps
        return self._mixed(words.xor(place, first), second)

    def _mixed(self, x: Tensor, key: Tensor) -> Any:
        xor, shift, word = self._words.xor, self._words.shift, self._words.word
        x = xor(x, shift(x, 16)) * word(0x7FEB352D)
        x = xor(x, key)
        x = xor(x, shift(x, 15)) * word(0x846CA68B)
        return xor(x, shift(x, 16))
