"""What loss scaling and the policies cost and gain: `python -m benchmarks`.

Each suite is a folder, `cost`, `seams`, `kernels`, `train`, `compiled` or `quality`,
and starts in its `suite.py`. The code imports the frameworks, because it times their
own ways to do the same. It is not in the wheel.
"""

SUITES = ("cost", "seams", "kernels", "train", "compiled", "quality")
BACKENDS = ("jax", "tensorflow", "torch")
