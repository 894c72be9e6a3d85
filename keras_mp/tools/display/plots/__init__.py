"""Pictures of trainings and of ranges: the only folder that imports matplotlib.

Without matplotlib an import of this folder is an error that names the pip line.

Figures are built without `pyplot`, so that drawing one neither opens a window nor
changes what a notebook or a script has set up for itself.
"""

from keras_mp.errors import needed

with needed("Drawing", "matplotlib"):
    from keras_mp.tools.display.plots.comparison import plot_comparison
    from keras_mp.tools.display.plots.figures import save_png, svgs_and_caption
    from keras_mp.tools.display.plots.gradient_ranges import plot_gradients
    from keras_mp.tools.display.plots.training import plot_training

__all__ = [
    "plot_comparison",
    "plot_gradients",
    "plot_training",
    "save_png",
    "svgs_and_caption",
]
