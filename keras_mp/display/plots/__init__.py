"""Pictures of trainings and of ranges: the only folder that imports matplotlib.

Figures are made without `pyplot`, so that drawing one opens no window and leaves the
settings of a notebook or script alone.
"""

try:
    import matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pictures need matplotlib: pip install 'keras_mp[plots]'", name=error.name
    ) from error

from keras_mp.display.plots.comparison import plot_comparison
from keras_mp.display.plots.figures import save_png, svg_and_caption
from keras_mp.display.plots.gradients import plot_gradients
from keras_mp.display.plots.training import plot_training

__all__ = [
    "plot_comparison",
    "plot_gradients",
    "plot_training",
    "save_png",
    "svg_and_caption",
]
