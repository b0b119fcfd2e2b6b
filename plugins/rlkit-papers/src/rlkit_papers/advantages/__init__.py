"""Advantage estimators of papers, one per file."""
