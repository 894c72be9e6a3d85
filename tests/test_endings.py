"""Models train in half precision as in float32, however they end: `sweeps/endings.py`.

Of its table, cases that hold every pair of two entries: each kind of model with each
of the losses below, each loss with each last activation that it fits, and so on.
"""

import keras
import pytest
from allpairspy import AllPairs

from sweeps.endings import ENDINGS, KINDS, LOSSES, POLICIES, Case, disagreement

every_loss = [loss for losses in LOSSES.values() for loss in losses]
# Those that read logits, and one of each other kind; the sweep has all.
KINDS_OF_LOSS = ("Crossentropy", "CrossEntropy", "CTC", "SquaredError", "Dice", "Hinge")
chosen = [loss for loss in every_loss if loss.name.endswith(KINDS_OF_LOSS)]


def fits(entries):
    """Can these entries, the first of a case or all of them, be one case?"""
    return len(entries) < 2 or entries[0] in LOSSES[entries[1].activation]


pairs = AllPairs([chosen, ENDINGS, KINDS, [True, False], POLICIES], fits)
CASES = [
    Case(kind, compiled, ending, loss, policy)
    for loss, ending, kind, compiled, policy in pairs
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled
def test_a_model_trains_as_in_float32(case):
    assert disagreement(case) < 1


@pytest.mark.once("It reads a table.")
def test_every_loss_of_keras_is_in_the_table():
    exported = {
        name
        for name, value in vars(keras.losses).items()
        if isinstance(value, type) and issubclass(value, keras.losses.Loss)
    }
    # Circle is for embeddings on a sphere, which none of these models returns.
    assert {loss.name for loss in every_loss} == exported - {"Loss", "Circle"}
