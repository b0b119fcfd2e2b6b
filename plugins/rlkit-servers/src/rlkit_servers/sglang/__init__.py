"""SGLang: the two engines, and what its servers take and return."""
