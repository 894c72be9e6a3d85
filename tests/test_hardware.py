"""Which policy the hardware gets, and what the frameworks are asked for it."""

import dataclasses
import importlib
import warnings
from types import SimpleNamespace

import keras
import pytest

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
def test_the_devices_decide_the_policy(devices, policy, named_in_the_reason):
    recommendation = recommend(devices)
    assert recommendation.name == policy
    assert named_in_the_reason in recommendation.reason
    assert recommendation.devices == tuple(devices)


def test_the_order_of_the_gpus_does_not_matter():
    assert recommend([PASCAL, HOPPER]).name == recommend([HOPPER, PASCAL]).name
    assert recommend([TURING, HOPPER]).name == recommend([HOPPER, TURING]).name


def test_with_one_gpu_nothing_is_said_about_the_others():
    assert "lowest" not in recommend([CPU, HOPPER]).reason
    assert "lowest" in recommend([BLACKWELL, HOPPER]).reason


@pytest.mark.parametrize(
    "devices", [[], [CPU], [PASCAL], [VOLTA], [HOPPER, TURING], [AMD], [TPU]]
)
def test_the_reason_is_one_sentence(devices):
    reason = recommend(devices).reason
    assert reason.endswith(".")
    assert ". " not in reason
    assert "\n" not in reason


def test_the_recommended_name_is_a_policy_that_keras_knows():
    for devices in ([CPU], [HOPPER], [TPU]):
        name = recommend(devices).name
        assert keras.dtype_policies.get(name).name == name


def test_a_recommendation_and_its_devices_cannot_be_changed():
    recommendation = recommend([HOPPER])
    with pytest.raises(dataclasses.FrozenInstanceError):
        recommendation.name = "float32"
    with pytest.raises(dataclasses.FrozenInstanceError):
        recommendation.devices[0].compute_capability = (1, 0)


# Asking this machine ----------


def test_this_machine_gets_a_recommendation_that_follows_from_its_devices():
    recommendation = recommended_policy()
    assert recommendation == recommend(engine.list_devices())
    if all(device.kind == "cpu" for device in recommendation.devices):
        assert recommendation.name == "float32"
        assert "CPU" in recommendation.reason


def test_this_machine_has_at_least_one_device():
    assert len(engine.list_devices()) >= 1
    assert all(device.name for device in engine.list_devices())


# Asking goes wrong ----------


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("Unable to initialize backend 'cuda':\n  no driver."),
        ImportError("No module named 'jax'"),
        OSError("libcuda.so.1: cannot open shared object file"),
        AttributeError("compute_capability"),
        KeyError("device_name"),
    ],
)
def test_a_failed_probe_recommends_float32_and_says_what_failed(monkeypatch, failure):
    def fails():
        raise failure

    monkeypatch.setattr(engine, "list_devices", fails)
    recommendation = recommended_policy()
    assert recommendation.name == "float32"
    assert recommendation.devices == ()
    assert type(failure).__name__ in recommendation.reason
    assert str(failure).split()[0] in recommendation.reason
    assert "\n" not in recommendation.reason
    assert recommendation.reason.endswith(".")


def test_a_failure_without_a_message_is_named_by_its_type(monkeypatch):
    def fails():
        raise TimeoutError

    monkeypatch.setattr(engine, "list_devices", fails)
    assert "(TimeoutError)" in recommended_policy().reason


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

    def install(backend, framework):
        if backend != keras.backend.backend():
            pytest.skip(f"what {backend} says of its devices")
        module = importlib.import_module(f"keras_mp.backends.{backend}.measures")
        monkeypatch.setattr(
            module, {"tensorflow": "tf"}.get(backend, backend), framework
        )
        if backend == "torch":
            monkeypatch.setattr(module, "cuda", framework.cuda)
        return tuple(engine.list_devices())

    return install


def jax_with(*devices, platform_version="cuda 12090"):
    client = SimpleNamespace(platform_version=platform_version)
    for device in devices:
        device.client = client
    return SimpleNamespace(devices=lambda: list(devices))


def jax_device(platform, device_kind, **attributes):
    return SimpleNamespace(platform=platform, device_kind=device_kind, **attributes)


def test_jax_reports_the_compute_capability_of_an_nvidia_gpu(answer):
    gpu = jax_device("gpu", "NVIDIA H100", compute_capability="9.0")
    assert answer("jax", jax_with(gpu)) == (HOPPER,)


def test_jax_reports_a_compute_capability_of_two_digits(answer):
    gpu = jax_device("gpu", "NVIDIA GB200", compute_capability="10.0")
    assert answer("jax", jax_with(gpu)) == (BLACKWELL,)


def test_jax_calls_an_amd_gpu_gpu_and_its_client_rocm(answer):
    gpu = jax_device("gpu", "AMD Instinct MI300X", compute_capability="9.4")
    assert answer("jax", jax_with(gpu, platform_version="rocm 60000")) == (AMD,)


def test_jax_reports_an_amd_gpu_by_its_architecture(answer):
    gpu = jax_device("gpu", "AMD Instinct MI300X", compute_capability="gfx942")
    assert answer("jax", jax_with(gpu, platform_version="")) == (AMD,)


def test_jax_reports_tpus_and_cpus_without_a_capability(answer):
    tpu, cpu = jax_device("tpu", "TPU v5e"), jax_device("cpu", "cpu")
    assert answer("jax", jax_with(tpu, cpu)) == (TPU, CPU)


def test_jax_reports_a_gpu_that_says_nothing_of_itself(answer):
    gpu = jax_device("gpu", "GPU:0")
    assert answer("jax", jax_with(gpu)) == (UNKNOWN_GPU,)


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


def test_tensorflow_reports_the_compute_capability_of_an_nvidia_gpu(answer):
    details = {"device_name": "NVIDIA H100", "compute_capability": (9, 0)}
    framework = tensorflow_with(("CPU", "cpu", {}), ("GPU", "GPU:0", details))
    assert answer("tensorflow", framework) == (CPU, HOPPER)


def test_tensorflow_built_with_rocm_reports_an_amd_gpu(answer):
    details = {"device_name": "AMD Instinct MI300X"}
    framework = tensorflow_with(("GPU", "GPU:0", details), rocm=True)
    assert answer("tensorflow", framework) == (AMD,)


def test_tensorflow_reports_a_metal_gpu_by_its_name(answer):
    framework = tensorflow_with(("GPU", "GPU:0", {"device_name": "METAL"}))
    assert answer("tensorflow", framework) == (Device("metal", "METAL"),)


def test_tensorflow_reports_a_gpu_without_details(answer):
    framework = tensorflow_with(("GPU", "GPU:0", {}))
    assert answer("tensorflow", framework) == (UNKNOWN_GPU,)


def test_tensorflow_does_not_report_the_host_of_the_tpu_cores(answer):
    framework = tensorflow_with(("TPU", "TPU v5e", {}), ("TPU_SYSTEM", "TPU:0", {}))
    assert answer("tensorflow", framework) == (TPU,)


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


def test_torch_reports_every_nvidia_gpu(answer):
    framework = torch_with(("NVIDIA H100", (9, 0)), ("Tesla P100", (6, 0)))
    assert answer("torch", framework) == (CPU, HOPPER, PASCAL)


def test_torch_under_rocm_reports_no_nvidia_capability(answer):
    framework = torch_with((AMD.name, (9, 4)), hip="6.2.0")
    assert answer("torch", framework) == (CPU, AMD)


def test_torch_reports_an_apple_gpu(answer):
    assert answer("torch", torch_with(metal=True)) == (CPU, APPLE)


def test_torch_reports_an_intel_gpu(answer):
    assert answer("torch", torch_with(intel=True)) == (CPU, INTEL)


def test_torch_without_a_gpu_reports_the_cpu(answer):
    assert answer("torch", torch_with()) == (CPU,)


def test_a_driver_that_torch_only_warns_about_is_given_as_the_reason(answer):
    broken = torch_with(warning="CUDA initialization: driver too old")
    with pytest.raises(RuntimeError, match="driver too old"):
        answer("torch", broken)
    assert "driver too old" in recommended_policy().reason


def test_a_warning_of_torch_beside_a_working_gpu_changes_nothing(answer):
    noisy = torch_with(("NVIDIA H100", (9, 0)), warning="a newer torch exists")
    assert answer("torch", noisy) == (CPU, HOPPER)
