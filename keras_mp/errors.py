"""What is raised beyond ValueError and TypeError, and said of a missing package.

`import keras_mp` starts here, where Keras or its backend may be missing. So this module
imports only the standard library.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from importlib.util import find_spec

BACKENDS = ("jax", "tensorflow", "torch")

# The package of a module, where the names differ.
_PACKAGES = {"sklearn": "scikit-learn"}


class TrainingDivergedError(RuntimeError):
    """Raised after `max_consecutive_skips` skipped steps in a row."""


class BreakpointError(ValueError):
    """Raised of a folder that holds no breakpoint, a damaged one, or none to open."""


class MissingPackageError(ModuleNotFoundError):
    """A package is not installed. The message names the pip line."""


def missing_package(purpose: str, module: str) -> MissingPackageError:
    """The error for a package that something needs, such as "Drawing" matplotlib."""
    if module in BACKENDS:
        message = _missing_backend(module)
    else:
        package = _PACKAGES.get(module, module)
        message = f"{purpose} needs {package}: pip install {package}"
    return MissingPackageError(message, name=module)


def _missing_backend(backend: str) -> str:
    other = next(filter(find_spec, BACKENDS), None)
    if other is None:
        return (
            f"Keras needs a backend, and none of {', '.join(BACKENDS)} is installed: "
            f"pip install {BACKENDS[0]}"
        )
    return (
        f"The backend {backend} is not installed: pip install {backend}, "
        f"or set KERAS_BACKEND={other}"
    )


@contextlib.contextmanager
def needed(purpose: str, *modules: str) -> Iterator[None]:
    """Round imports of packages: where one is missing, the error names the pip line.

    Example:
        >>> with needed("Drawing", "matplotlib"):
        ...     from matplotlib.figure import Figure
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        # Of an installed package a part is missing: the error itself says which.
        if package not in modules or find_spec(package) is not None:
            raise
        raise missing_package(purpose, package) from None


def version_of(package: str) -> str:
    """The version of a package, if pip knows it."""
    found = importlib.metadata.distributions(name=package)
    return next((each.version for each in found), "(version unknown)")
