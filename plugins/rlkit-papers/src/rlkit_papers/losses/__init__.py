"""Policy losses of papers, one per file."""
