"""Capture of user functions as fixed graphs for one record, so that no user code runs on private records."""
