"""The suite `compiled`: steps for devices that are not there, read and not run."""
