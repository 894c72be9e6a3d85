"""Sets the policy in the processes that a script under `keras-mp run` starts.

Python imports a module of this name at its start. `keras_mp_cli/run.py` puts this
folder into PYTHONPATH, which processes inherit, however they are started.
"""

import contextlib
import os
import sys
from importlib import import_module
from importlib.util import find_spec

_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _folder]

# The one that Python would have found without this folder, as on Debian.
_this = sys.modules.pop("sitecustomize")
if find_spec("sitecustomize"):
    import_module("sitecustomize")
else:
    sys.modules["sitecustomize"] = _this

# It is missing where a script starts the Python of another environment.
with contextlib.suppress(ModuleNotFoundError):
    from keras_mp_cli.run import go_on

    go_on()
