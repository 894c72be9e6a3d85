"""Measurements that are too slow for the tests; README.md has the results."""
