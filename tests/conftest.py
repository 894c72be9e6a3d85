"""Every test starts as after the import: no seam, float32, and a fixed seed."""

import gc
import importlib.metadata
import os
import signal
import sys

# Most of the time goes into compiling, and none into running: LLVM need not try hard,
# and the simpler emitters of kernels take half as long. XLA's own passes, which decide
# what is computed, are as ever.
FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
try:
    version = importlib.metadata.version("jaxlib").split(".")
except importlib.metadata.PackageNotFoundError:
    version = ["0", "0"]
# XLA stops at a flag that it does not know, as jaxlib 0.11 does at the first of these.
# The other has a small program compiled in one piece: 0.9 of the time.
if [*map(int, version[:2])] < [0, 11]:
    FLAGS += [
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
# What a shell starts in the background ignores Ctrl-C, which some of the tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)
# torch's threads wait by spinning, and so keep those of the other workers waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import browser as chromium  # noqa: E402
import hypothesis  # noqa: E402
import keras  # noqa: E402
import pytest  # noqa: E402
import selection  # noqa: E402
import workplace  # noqa: E402
from backends import POLICIES  # noqa: E402

import keras_mp  # noqa: E402

# A busy machine is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

if keras.backend.backend() == "jax":
    # What two tests compile is compiled once, and a second run takes 0.55 to 0.8 of the
    # time. `make clean` removes the folder with its environment.
    import jax

    jax.config.update("jax_compilation_cache_dir", f"{sys.prefix}/jax-cache")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    # Four replicas for tf.distribute. TensorFlow wants to know before its first step.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 4,
    )


def pytest_report_header():
    return None if chromium.found() else chromium.WANTED


@pytest.hookimpl(tryfirst=True)  # Before `-m` reads the marks.
def pytest_collection_modifyitems(config, items):
    selection.mark_what_is_slow(items)
    elsewhere = [item for item in items if not selection.is_at_home(item)]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if selection.is_at_home(item)]


@pytest.fixture(scope="session")
def browser():
    """Chromium, for the tests that look at a page."""
    with chromium.opened() as opened:
        yield opened


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """Lets Python's garbage collector pass over what earlier files have left.

    Among a million objects of TensorFlow's each `clear_session` takes seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def work(tmp_path):
    """A folder for the command line, with a stand-in for Keras."""
    return workplace.Workplace(tmp_path)


@pytest.fixture
def installed():
    """What comes with half precision, for a test that asks for none by our names."""
    keras_mp.install()


@pytest.fixture
def mixed_float16():
    keras_mp.set_global_policy("mixed_float16")


@pytest.fixture(params=POLICIES)
def half(request):
    """Sets one of the policies, and says in which dtype it computes."""
    keras_mp.set_global_policy(request.param)
    return POLICIES[request.param]


@pytest.fixture(autouse=True)
def fresh_keras():
    keras.utils.set_random_seed(0)
    keras_mp.uninstall()  # A module of tests may have made a policy.
    yield
    keras_mp.uninstall()
    keras.config.set_dtype_policy("float32")
