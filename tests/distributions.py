"""Ways to distribute a training over the four devices of JAX."""

import keras


def distribution(kind, variables, layout):
    """Data parallel, or model parallel with a layout for variables of such a path."""
    if kind == "data":
        return keras.distribution.DataParallel()
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[variables] = layout
    return keras.distribution.ModelParallel(layout_map=layout_map)
