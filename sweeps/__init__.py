"""Sweeps: what half precision does to every layer of Keras, measured."""
