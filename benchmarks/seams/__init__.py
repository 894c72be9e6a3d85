"""What keras_mp costs outside of the optimizer's update."""
