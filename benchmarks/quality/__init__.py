"""The results of trainings to the end under each policy."""
