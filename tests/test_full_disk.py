"""On a full disk trainings go on, and what was written before stays."""

import builtins
import contextlib
import errno
import io
import os
import pathlib
import stat
import types

import h5py
import pytest
from processes import run
from test_overflow_breakpoint import build, build_lambda, fit

from keras_mp.callbacks import OverflowBreakpoint
from keras_mp.messages import show_message
from keras_mp.tools.breakpoint import model_file
from keras_mp.tools.display import file, page
from keras_mp.tools.display.plots import plot_training, save_png

resource = pytest.importorskip("resource")  # Not on Windows.
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("limit", [1_000, 50_000])
@pytest.mark.slow("Two trainings in a process whose files are limited.")
def test_a_breakpoint_that_finds_no_room_is_one_warning_and_the_training_goes_on(limit):
    (trainings,) = run("full_disk.py", str(limit))
    assert len(trainings) == 3
    for name, found in trainings.items():
        (warning,) = found["warnings"]
        assert f"could not be saved in {found['folder']!r}: OSError: " in warning, name
        assert os.strerror(errno.EFBIG) in warning, name
        assert found["left"] == [], name
        assert (found["steps"], found["skipped"]) == (10, 2), name


def test_a_diagnosis_that_finds_no_room_is_one_warning_too(tmp_path, monkeypatch):
    def full(*args):
        raise FULL

    monkeypatch.setattr(file, "write", full)
    with pytest.warns(UserWarning) as found:
        fit(build(), OverflowBreakpoint(tmp_path / "overflow"))
    (warning,) = [w for w in found if w.category is UserWarning]
    assert f"could not be saved in {str(tmp_path / 'overflow')!r}" in str(
        warning.message
    )
    assert os.strerror(errno.ENOSPC) in str(warning.message)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("enough", [True, False])
def test_hdf5_writes_to_memory_alone(enough, tmp_path, monkeypatch):
    """Where it writes to a full disk it ends the process by SIGSEGV."""
    if not enough:  # Then Keras would write a temporary file.
        memory = types.SimpleNamespace(available=0)
        psutil = pytest.importorskip("psutil")
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    opened, file_of_h5py = [], h5py.File

    def opening(name, *args, **kwargs):
        opened.append(name)
        return file_of_h5py(name, *args, **kwargs)

    monkeypatch.setattr(h5py, "File", opening)
    for make, name in ((build, "model.keras"), (build_lambda, "model.weights.h5")):
        assert model_file.save(make(), tmp_path) == name
        assert (tmp_path / name).stat().st_size > 1_000
    assert opened and all(isinstance(each, io.BytesIO) for each in opened)


def test_a_message_that_cannot_be_printed_is_a_warning(monkeypatch):
    def full(*args, **kwargs):
        raise FULL

    monkeypatch.setattr(builtins, "print", full)
    with pytest.warns(UserWarning, match="No space left on device.* step 4 skipped"):
        show_message("keras_mp: step 4 skipped")


# Reports and pictures ----------------------------------------------------------------


def write_report(path):
    page.write(path, "a title", "long " * 1_000)


def write_picture(path):
    save_png(plot_training({"float32": [1.0, 0.5]}, [1.0, 2.0]), path)


@pytest.fixture(params=[write_report, write_picture])
def write(request, tmp_path):
    request.param(tmp_path / "before")  # Fonts are listed by now.
    (tmp_path / "before").unlink()
    return request.param


@contextlib.contextmanager
def full_disk():
    """No file can be longer than 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_what_was_there_stays(write, tmp_path):
    path = tmp_path / "report"
    for before in ([], [path]):
        for each in before:
            each.write_text("from the last run")
        with full_disk(), pytest.raises(OSError, match=f"too large: '{path}'$"):
            write(path)
        assert [*tmp_path.iterdir()] == before
    assert path.read_text() == "from the last run"


def test_a_file_is_written_anew_where_it_is_with_its_permissions(write, tmp_path):
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "report", tmp_path / "link"
    path.write_text("from the last run")
    path.chmod(0o640)
    link.symlink_to(path)
    write(link)
    assert link.is_symlink() and path.stat().st_size > 1_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [*path.parent.iterdir()] == [path]


def test_a_new_file_has_the_permissions_that_a_new_file_has(write, tmp_path):
    (tmp_path / "other").touch()
    write(tmp_path / "report")
    modes = {each.stat().st_mode for each in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_name_may_be_as_long_as_is_allowed(write, tmp_path):
    path = tmp_path / ("r" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    write(path)
    assert [*tmp_path.iterdir()] == [path]


def test_a_device_stays_one(write):
    write(os.devnull)
    assert pathlib.Path(os.devnull).is_char_device()
    if os.path.exists("/dev/full"):  # On Linux.
        with pytest.raises(OSError, match="No space left on device: '/dev/full'$"):
            write("/dev/full")


def test_an_error_names_the_path_that_was_given(write, tmp_path, monkeypatch):
    with pytest.raises(IsADirectoryError, match=f"'{tmp_path}'$"):
        write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="directory: 'missing/report'$"):
        write("missing/report")
