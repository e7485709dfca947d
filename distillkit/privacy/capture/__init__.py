"""Capture of user functions of one record as fixed graphs, so that no user code runs on private records."""
