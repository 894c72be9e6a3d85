"""Keras' own steps, traced once and replayed: `jit_compile=True` on torch.

The Python of Keras' layers takes longer than a GPU does. It runs once, and after that a
step is the calls of torch's operators that it made, on the tensors that the variables
hold. What has not been traced is taken eagerly: the first steps, which `fit` may take
again, a last, shorter batch, and each step that loss scaling skips.
"""
