"""Evaluators that try to break privacy."""
