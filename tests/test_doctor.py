"""`keras-mp doctor`: with a GPU, without one, and with a broken driver."""

import re

import keras
import pytest
from backends import BACKEND
from workplace import real

from keras_mp.backends import devices, engine
from keras_mp.tools import doctor


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(doctor, "SIDE_ON_CPUS", 32)
    monkeypatch.setattr(doctor, "SIDE", 48)


def here(monkeypatch, *found):
    def probe():
        if isinstance(found[0], Exception):
            raise found[0]
        return list(found)

    monkeypatch.setattr(engine, "list_devices", probe)


def driver(monkeypatch, tmp_path, text):
    file = tmp_path / "version"
    file.write_text(text)
    monkeypatch.setattr(doctor, "_DRIVER", file)


def test_products_are_timed_in_every_dtype():
    found = doctor.examine(seconds=0.05)
    assert [p.dtype for p in found.products] == ["float32", "float16", "bfloat16"]
    assert all(p.seconds > 0 and p.speedup > 0 for p in found.products)
    assert found.products[0].speedup == 1
    assert found.side == 32


def timed(monkeypatch, **milliseconds):
    """What is found where products take these times, one run after the other."""
    runs = {dtype: iter([1, *ms]) for dtype, ms in milliseconds.items()}

    def product(side, dtype):
        return lambda: next(runs[dtype]) / 1000

    monkeypatch.setattr(doctor, "_timed_product", product)
    return str(doctor.examine(seconds=0))


def test_a_speedup_is_the_ratio_of_the_times_beside_it(monkeypatch):
    text = timed(monkeypatch, float32=[4, 4, 5], float16=[2, 2, 2], bfloat16=[8, 8, 8])
    assert re.search("float32 +4 ms +1.00\n", text)
    assert re.search(r"float16 +2 ms +2.00 \(2.00 to 2.25\)", text)
    assert re.search(r"bfloat16 +8 ms +0.50 \(0.50 to 0.56\)", text)


def test_a_speedup_within_the_noise_is_unclear(monkeypatch):
    text = timed(monkeypatch, float32=[4, 2, 4], float16=[2, 2, 4], bfloat16=[4, 4, 4])
    assert re.search(r"float16 +2 ms +unclear \(1.00 to 2.00\)", text)


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path):
    here(monkeypatch, devices.Device("cpu", "a processor"))
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "nothing")
    text = str(doctor.examine(seconds=0))
    assert "device: a processor (cpu)" in text
    assert "NVIDIA driver: none" in text
    assert "auto: float32. There is no GPU" in text
    assert BACKEND in text and keras.__version__ in text


def test_a_gpu_is_named_with_its_driver_and_capability(monkeypatch, tmp_path):
    here(monkeypatch, devices.Device("cuda", "Tesla V100", (7, 0)))
    driver(monkeypatch, tmp_path, "NVRM version: NVIDIA UNIX  570.86.15  Thu Jan\n")
    found = doctor.examine(seconds=0)
    assert found.side == 48
    text = str(found)
    assert "device: Tesla V100 (cuda, compute capability 7.0)" in text
    assert "NVIDIA driver: 570.86.15" in text
    assert "auto: mixed_float16." in text


def test_a_driver_whose_gpu_the_backend_does_not_see_is_reported(monkeypatch, tmp_path):
    here(monkeypatch, devices.Device("cpu", "a processor"))
    driver(monkeypatch, tmp_path, "NVRM version: 570.86.15\n")
    (missing, *_) = doctor.examine(seconds=0).missing
    assert f"{BACKEND} sees no GPU" in missing


def test_a_broken_driver_ends_nothing(monkeypatch, tmp_path):
    here(monkeypatch, RuntimeError("CUDA driver initialization failed"))
    driver(monkeypatch, tmp_path, "damaged")
    text = str(doctor.examine(seconds=0))
    assert "device: none could be listed" in text
    assert "NVIDIA driver: of unknown version" in text
    assert "CUDA driver initialization failed" in " ".join(text.split())


def test_a_dtype_without_a_kernel_is_reported_and_the_others_are_timed(monkeypatch):
    original = doctor._timed_product

    def broken(side, dtype):
        if dtype == "float16":
            raise NotImplementedError("no kernel for Half")
        return original(side, dtype)

    monkeypatch.setattr(doctor, "_timed_product", broken)
    found = doctor.examine(seconds=0)
    wide, half, brain = found.products
    assert half.failure == "NotImplementedError: no kernel for Half"
    assert wide.seconds and brain.speedup
    assert "no kernel for Half" in str(found)


def test_the_command_prints_it(tmp_path):
    done = real("doctor", "--backend", BACKEND, home=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("device:", "float16", "bfloat16", "auto:"):
        assert word in done.stdout
