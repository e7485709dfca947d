"""Capture of a user's function as a fixed graph for one record, so that no user code runs on private records."""
