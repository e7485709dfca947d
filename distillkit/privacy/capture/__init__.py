"""Conversion of a user's function of one record to a fixed graph, so that no user code runs on private records."""
