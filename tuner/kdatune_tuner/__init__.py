"""The tuner, the store and the command line."""
