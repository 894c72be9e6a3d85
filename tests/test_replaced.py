"""What is replaced for a while is put back, and stands in a list."""

import re
import threading
import types

import pytest

from keras_mp.replaced import REPLACED, _of_all_threads, instead, replaced

pytestmark = pytest.mark.once("It is plain Python.")


class Base:
    def call(self):
        return "own"


class Derived(Base):
    pass


def louder(original):
    return lambda *args: original(*args).upper()


OWNERS = {
    "a class": Base,
    "a class that inherits it": Derived,
    "an object": Derived(),
    "a module": types.SimpleNamespace,
}


def owner_of(name):
    if name != "a module":
        return OWNERS[name]
    module = types.ModuleType("module")
    module.call = lambda: "own"
    return module


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", OWNERS)
def test_it_is_put_back_however_the_block_ends(name, error):
    owner = owner_of(name)
    before = dict(vars(owner))
    args = [Derived()] if isinstance(owner, type) else []
    try:
        with replaced("calls", owner, {"call": louder}):
            with replaced("calls", owner, {"call": instead(lambda *args: "other")}):
                assert owner.call(*args) == "other"
            assert owner.call(*args) == "OWN"
            if error:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert dict(vars(owner)) == before and owner.call(*args) == "own"


def test_a_wrapper_that_fails_leaves_nothing_replaced():
    def fails(original):
        raise ValueError

    before = dict(vars(Base))
    with pytest.raises(ValueError), replaced("calls", Base, {"call": fails}):
        pass
    assert dict(vars(Base)) == before


def test_threads_take_turns_with_a_class():
    """Or the one that ends last would put back what the other had set."""
    free = []

    def other():
        free.append(_of_all_threads.acquire(blocking=False))

    with replaced("calls", Base, {"call": louder}):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert free == [False]


@pytest.mark.parametrize("first_out", [0, 1])
def test_threads_may_replace_what_one_object_has_at_once(first_out):
    """The one that begins last must not put back what the other had set."""
    owner = Derived()
    blocks = [replaced("own calls", owner, {"call": louder}) for _ in range(2)]
    for block in blocks:
        block.__enter__()
    blocks[first_out].__exit__(None, None, None)
    assert owner.call() == "OWN"
    blocks[1 - first_out].__exit__(None, None, None)
    assert vars(owner) == {} and owner.call() == "own"


def test_what_is_not_in_the_list_is_not_replaced():
    with pytest.raises(KeyError), replaced("another", Base, {"call": louder}):
        pass
    assert all(re.match(r"\S.*\S$", reason) for reason in REPLACED.values())
