"""Checks that refuse data, options and programs for which a privacy guarantee would not hold."""
