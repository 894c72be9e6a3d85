"""A script of the user's, imported for what it defines."""

import importlib.machinery
import importlib.util
import os
import sys
import types

from keras_mp_cli.messages import fail
from keras_mp_cli.tracebacks import file_of, traces


def import_script(
    script: str, ends: tuple[type[BaseException], ...] = ()
) -> types.ModuleType:
    """Imports the script without its main part; it finds the modules beside it.

    An exception in `ends` ends the script: the module has what it defined until then,
    and a line on stderr says where that was.
    """
    path = os.path.join(os.getcwd(), script)
    name = os.path.splitext(os.path.basename(path))[0].replace(".", "_")
    if not os.path.isfile(path):
        fail(f"cannot read the script {script!r}: there is no such file")
    sys.argv = [script]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    # Pickle looks here for what it defines.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except ends as end:
        lines = [t.tb_lineno for t in traces(end) if file_of(t) == path]
        why = "it exits" if isinstance(end, SystemExit) else end
        print(
            f"keras-mp: {script} is run up to line {lines[0]}, where {why}; what it "
            "defines after that is not known",
            file=sys.stderr,
        )
    return module
