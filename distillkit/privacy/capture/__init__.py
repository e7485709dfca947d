"""Capture of fixed functions of one record, so that no user code ever runs on private records."""
