"""A worked example for each seam, as `rlkit plugins show SEAM` prints it: a plugin's module of at most 40 lines."""
