"""Measurements too slow for the tests; results in README.md."""
