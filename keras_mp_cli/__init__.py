"""The `keras-mp` command, up to the moment when Keras is imported.

`import keras_mp` imports Keras, and Keras reads `KERAS_BACKEND` once, when it is
imported. So this package stands beside keras_mp and imports only the standard library:
it reads the arguments, chooses the backend, and then calls `keras_mp.cli`.
"""

from collections.abc import Sequence

from keras_mp_cli import arguments, commands, run
from keras_mp_cli.messages import missing_package_is_one_line


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of `keras-mp` and of `python -m keras_mp_cli`."""
    options = vars(arguments.parser().parse_args(argv))
    command = options.pop("command")
    if command == "run":
        run.run(**options)
        return
    with missing_package_is_one_line():
        commands.start(command, **options)
