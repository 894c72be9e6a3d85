"""What loss scaling and the policies cost and gain, measured: `keras-mp bench`.

The only part beside `backend` that imports frameworks: it times their own ways of doing
it. `benchmarks/` of the repository holds what came of it.
"""
