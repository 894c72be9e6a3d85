"""Which policy the hardware gets, and what the frameworks are asked for it."""

import dataclasses
import importlib
import warnings
from types import SimpleNamespace

import keras
import pytest
from backends import BACKEND

from keras_mp.backends import engine
from keras_mp.backends.devices import Device
from keras_mp.policies.hardware import recommend, recommended_policy

CPU = Device("cpu", "cpu")
PASCAL = Device("cuda", "Tesla P100", (6, 0))
PASCAL_CONSUMER = Device("cuda", "GeForce GTX 1080", (6, 1))
VOLTA = Device("cuda", "Tesla V100", (7, 0))
TURING = Device("cuda", "Tesla T4", (7, 5))
HOPPER = Device("cuda", "NVIDIA H100", (9, 0))
BLACKWELL = Device("cuda", "NVIDIA GB200", (10, 0))
UNKNOWN_GPU = Device("gpu", "GPU:0")
AMD = Device("rocm", "AMD Instinct MI300X")
APPLE = Device("metal", "Apple GPU (MPS)")
INTEL = Device("xpu", "Intel Data Center GPU Max 1550")
TPU = Device("tpu", "TPU v5e")


# The rule ----------


@pytest.mark.parametrize(
    ("devices", "policy", "named_in_the_reason"),
    [
        ([], "float32", "no GPU or TPU"),
        ([CPU], "float32", "no GPU or TPU"),
        ([CPU, CPU], "float32", "no GPU or TPU"),
        ([VOLTA], "mixed_float16", "Tesla V100"),
        ([CPU, TURING], "mixed_float16", "7.5"),
        ([HOPPER, HOPPER], "mixed_float16", "9.0"),
        ([BLACKWELL], "mixed_float16", "10.0"),
        ([PASCAL], "float32", "6.0"),
        ([CPU, PASCAL_CONSUMER], "float32", "6.1"),
        ([HOPPER, PASCAL], "float32", "Tesla P100"),
        ([HOPPER, TURING], "mixed_float16", "Tesla T4"),
        ([BLACKWELL, HOPPER], "mixed_float16", "NVIDIA H100"),
        ([AMD], "float32", "ROCm"),
        ([CPU, AMD], "float32", "ROCm"),
        ([HOPPER, AMD], "float32", "ROCm"),
        ([CPU, APPLE], "float32", "Metal"),
        ([Device("rocm", "MI300X", (9, 4))], "float32", "ROCm"),
        ([UNKNOWN_GPU], "float32", "unknown make"),
        ([INTEL], "float32", "xpu"),
        ([TPU], "mixed_bfloat16", "TPU v5e"),
        ([CPU, TPU, TPU], "mixed_bfloat16", "TPU v5e"),
    ],
)
def test_the_devices_in_any_order_decide_the_policy_for_a_reason_in_one_sentence(
    devices, policy, named_in_the_reason
):
    recommendation = recommend(devices)
    assert recommendation.name == recommend(devices[::-1]).name == policy
    assert keras.dtype_policies.get(policy).name == policy
    reason = recommendation.reason
    assert named_in_the_reason in reason
    assert reason.endswith(".")
    assert ". " not in reason
    assert "\n" not in reason
    assert recommendation.devices == tuple(devices)


def test_with_one_gpu_nothing_is_said_about_the_others():
    assert "lowest" not in recommend([CPU, HOPPER]).reason
    assert "lowest" in recommend([BLACKWELL, HOPPER]).reason


def test_a_recommendation_and_its_devices_cannot_be_changed():
    recommendation = recommend([HOPPER])
    with pytest.raises(dataclasses.FrozenInstanceError):
        recommendation.name = "float32"
    with pytest.raises(dataclasses.FrozenInstanceError):
        recommendation.devices[0].compute_capability = (1, 0)


# Asking this machine ----------


def test_this_machine_gets_a_recommendation_that_follows_from_its_devices():
    devices = engine.list_devices()
    assert len(devices) >= 1
    assert all(device.name for device in devices)
    recommendation = recommended_policy()
    assert recommendation == recommend(devices)
    if all(device.kind == "cpu" for device in recommendation.devices):
        assert recommendation.name == "float32"
        assert "CPU" in recommendation.reason


# Asking goes wrong ----------


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (RuntimeError("Unable to initialize backend 'cuda':\n  no driver."), "Unable"),
        (ImportError("No module named 'jax'"), "No"),
        (OSError("libcuda.so.1: cannot open shared object file"), "libcuda.so.1:"),
        (AttributeError("compute_capability"), "compute_capability"),
        (KeyError("device_name"), "'device_name'"),
        (TimeoutError(), "(TimeoutError)"),
    ],
)
def test_a_failed_probe_recommends_float32_and_says_what_failed(
    monkeypatch, failure, said
):
    def fails():
        raise failure

    monkeypatch.setattr(engine, "list_devices", fails)
    recommendation = recommended_policy()
    assert recommendation.name == "float32"
    assert recommendation.devices == ()
    assert type(failure).__name__ in recommendation.reason
    assert said in recommendation.reason
    assert "\n" not in recommendation.reason
    assert recommendation.reason.endswith(".")


def test_ctrl_c_while_asking_is_not_swallowed(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "list_devices", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recommended_policy()


# What the frameworks answer, played by stand-ins ----------


@pytest.fixture
def answer(monkeypatch):
    """Lets a stand-in for the framework in use answer for it."""

    def install(framework):
        module = importlib.import_module(f"keras_mp.backends.{BACKEND}.measures")
        name = {"tensorflow": "tf"}.get(BACKEND, BACKEND)
        monkeypatch.setattr(module, name, framework)
        if BACKEND == "torch":
            monkeypatch.setattr(module, "cuda", framework.cuda)
        return tuple(engine.list_devices())

    return install


def jax_with(*devices, platform_version="cuda 12090"):
    """`devices` are triples: platform, kind, compute capability or None."""
    client = SimpleNamespace(platform_version=platform_version)
    made = []
    for platform, kind, capability in devices:
        made.append(SimpleNamespace(platform=platform, device_kind=kind, client=client))
        if capability is not None:
            made[-1].compute_capability = capability
    return SimpleNamespace(devices=lambda: made)


def tensorflow_with(*devices, rocm=False):
    """`devices` are triples: device type, name, details."""
    physical = [
        SimpleNamespace(device_type=kind, name=name) for kind, name, _ in devices
    ]
    details = {name: detail for _, name, detail in devices}
    return SimpleNamespace(
        config=SimpleNamespace(
            list_physical_devices=lambda: physical,
            experimental=SimpleNamespace(
                get_device_details=lambda device: details[device.name]
            ),
        ),
        test=SimpleNamespace(is_built_with_rocm=lambda: rocm),
    )


def torch_with(*gpus, hip=None, metal=False, intel=False, warning=None):
    """`gpus` are pairs: name, capability."""

    def is_available():
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
        return bool(gpus)

    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=is_available,
            device_count=lambda: len(gpus),
            get_device_name=lambda index: gpus[index][0],
            get_device_capability=lambda index: gpus[index][1],
        ),
        version=SimpleNamespace(hip=hip),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: metal)),
        xpu=SimpleNamespace(
            is_available=lambda: intel, get_device_name=lambda _: INTEL.name
        ),
    )


DETAILS = {"device_name": "NVIDIA H100", "compute_capability": (9, 0)}
H100, P100 = ("NVIDIA H100", (9, 0)), ("Tesla P100", (6, 0))
REPORTED = {
    "jax": [
        (jax_with(("gpu", "NVIDIA H100", "9.0")), (HOPPER,)),
        (jax_with(("gpu", "NVIDIA GB200", "10.0")), (BLACKWELL,)),
        # An AMD GPU is known by its client, or by its architecture.
        (jax_with(("gpu", AMD.name, "9.4"), platform_version="rocm 60000"), (AMD,)),
        (jax_with(("gpu", AMD.name, "gfx942"), platform_version=""), (AMD,)),
        (jax_with(("tpu", "TPU v5e", None), ("cpu", "cpu", None)), (TPU, CPU)),
        # This one says nothing of itself.
        (jax_with(("gpu", "GPU:0", None)), (UNKNOWN_GPU,)),
    ],
    "tensorflow": [
        (tensorflow_with(("CPU", "cpu", {}), ("GPU", "0", DETAILS)), (CPU, HOPPER)),
        (tensorflow_with(("GPU", "0", {"device_name": AMD.name}), rocm=True), (AMD,)),
        (
            tensorflow_with(("GPU", "GPU:0", {"device_name": "METAL"})),
            (Device("metal", "METAL"),),
        ),
        (tensorflow_with(("GPU", "GPU:0", {})), (UNKNOWN_GPU,)),
        # The host of the TPU's cores is no device.
        (tensorflow_with(("TPU", "TPU v5e", {}), ("TPU_SYSTEM", "0", {})), (TPU,)),
    ],
    "torch": [
        (torch_with(H100, P100), (CPU, HOPPER, PASCAL)),
        # Not an NVIDIA GPU's capability.
        (torch_with((AMD.name, (9, 4)), hip="6.2.0"), (CPU, AMD)),
        (torch_with(metal=True), (CPU, APPLE)),
        (torch_with(intel=True), (CPU, INTEL)),
        (torch_with(), (CPU,)),
        # A warning beside a working GPU changes nothing.
        (torch_with(H100, warning="a newer torch exists"), (CPU, HOPPER)),
    ],
}


@pytest.mark.parametrize(("framework", "devices"), REPORTED[BACKEND])
def test_the_framework_in_use_reports_its_devices(answer, framework, devices):
    assert answer(framework) == devices


@pytest.mark.skipif(BACKEND != "torch", reason="what torch says of its devices")
def test_a_driver_that_torch_only_warns_about_is_given_as_the_reason(answer):
    with pytest.raises(RuntimeError, match="driver too old"):
        answer(torch_with(warning="CUDA initialization: driver too old"))
    assert "driver too old" in recommended_policy().reason
