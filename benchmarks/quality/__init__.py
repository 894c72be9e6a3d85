"""What trainings to the end come to under each policy."""
