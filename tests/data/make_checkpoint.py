"""Writes a checkpoint as it is kept here; see README.md.

    python make_checkpoint.py FILE [keras_mp]

Three float16 steps of Adam, the second of them poisoned, by the wrapper of Keras or by
that of the keras_mp which is on the path.
"""

import sys
import zipfile

import keras
import numpy as np

path, *ours = sys.argv[1:]
if ours:
    import keras_mp

    keras_mp.set_global_policy("mixed_float16")
else:
    keras.config.set_dtype_policy("mixed_float16")
keras.utils.set_random_seed(0)
hidden, head = keras.layers.Dense(2, activation="tanh"), keras.layers.Dense(1)
model = keras.Sequential([keras.Input((2,)), hidden, head])
model.compile("adam", "mse")
x = np.array([[0.1, 0.2], [0.3, -0.1]], "float32")
for batch in (x, np.full_like(x, np.inf), x):
    model.train_on_batch(batch, x[:, :1])
model.save(path)

# Keras stores without compression, and HDF5 is mostly zeros.
with zipfile.ZipFile(path) as file:
    members = {name: file.read(name) for name in file.namelist()}
with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
    for name, content in members.items():
        file.writestr(name, content)
