"""The `keras-mp` command, up to the moment when Keras is imported.

`import keras_mp` imports Keras, and Keras reads `KERAS_BACKEND` once, when it is
imported. So this package stands beside keras_mp and imports only the standard library:
it reads the arguments, chooses the backend, and then calls `keras_mp.cli`.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of `keras-mp` and of `python -m keras_mp_cli`."""
    # Here, not above: `import keras_mp` imports this package too, for `missing`.
    from keras_mp_cli import arguments, commands
    from keras_mp_cli.messages import fail
    from keras_mp_cli.missing import MissingPackageError
    from keras_mp_cli.run import run

    options = vars(arguments.parser().parse_args(argv))
    command = options.pop("command")
    if command == "run":
        run(**options)
        return
    try:
        commands.start(command, **options)
    except MissingPackageError as error:
        fail(str(error))
