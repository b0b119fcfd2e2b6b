"""Losses of preferences: one a file."""
