"""Worked examples of plugins, as `rlkit plugins show EXAMPLE` prints them: modules of at most 40 lines."""
