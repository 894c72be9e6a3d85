"""`keras-mp compare`."""

import types
from typing import Any

import keras

import keras_mp
from keras_mp_cli.messages import fail, one_line
from keras_mp_cli.tracebacks import traces


def compare(
    script: str,
    module: types.ModuleType,
    backend: str | None,
    out: str | None = None,
    **options: Any,
) -> None:
    """Trains what a script defines under several policies, and prints what differs.

    `module` is the script, imported, and `backend` what the user asked for; `out` is
    where to write the comparison as HTML. The options are those of `keras_mp.compare`.
    """
    chosen = keras.backend.backend()
    if backend not in (None, chosen):
        fail(f"the script {script!r} chooses {chosen} itself, and not {backend}")
    for name, rule in (
        ("build", "returns a compiled model"),
        ("data", "returns what to train with and what to validate with"),
    ):
        if not callable(getattr(module, name, None)):
            fail(f"the script {script!r} must define {name}(), which {rule}")
    data = module.data()
    if not isinstance(data, tuple) or len(data) != 2:
        fail(f"data() must return (train, validation). Received: {type(data).__name__}")
    try:
        comparison = keras_mp.compare(module.build, *data, **options)
    except (TypeError, ValueError) as error:
        # The message of keras_mp.compare is enough; an error of the script's own, or of
        # Keras, needs its traceback.
        name = traces(error)[-1].tb_frame.f_globals["__name__"]
        if not name.startswith("keras_mp.tools"):
            raise
        fail(one_line(error))
    print(comparison)
    if out is not None:
        comparison.to_html(out)
