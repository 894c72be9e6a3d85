"""One sentence for a package that is not installed, with the pip line that installs it.

It stands here because `import keras_mp` needs it where Keras cannot be imported, and so
does the command line before Keras is.
"""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator

BACKENDS = ("jax", "tensorflow", "torch")

# Of each module: the name of its package, and what pip installs to get it.
_PACKAGES = {
    "matplotlib": ("matplotlib", '"keras_mp[plots]"'),
    "rich": ("rich", "rich"),
    "sklearn": ("scikit-learn", '"keras_mp[demo]"'),
}


class MissingPackageError(ModuleNotFoundError):
    """A package is not installed. The message names the pip line."""


def is_installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def version_of(package: str, otherwise: str = "(not installed)") -> str:
    """The version of a package, or what to show if pip does not know it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return otherwise


def missing_package(purpose: str, module: str) -> MissingPackageError:
    """The error for a package that something needs, such as "Drawing" matplotlib."""
    if module in BACKENDS:
        return missing_backend(module)
    package, installed_by = _PACKAGES[module]
    return MissingPackageError(
        f"{purpose} needs {package}: pip install {installed_by}", name=module
    )


def missing_backend(backend: str) -> MissingPackageError:
    """The error for a backend that is chosen and not installed."""
    others = [other for other in BACKENDS if is_installed(other)]
    return MissingPackageError(
        f'The backend {backend} is not installed: pip install "keras_mp[{backend}]", '
        f"or set KERAS_BACKEND={others[0]}"
        if others
        else f"Keras needs a backend, and none of {', '.join(BACKENDS)} is installed: "
        f'pip install "keras_mp[{BACKENDS[0]}]"',
        name=backend,
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
        module = package_of(error)
        if module not in modules:
            raise
        raise missing_package(purpose, module) from None


def package_of(error: BaseException) -> str:
    """The package that an import did not find; empty for any other error."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    return (name or "").partition(".")[0]
