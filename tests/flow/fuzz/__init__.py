"""Malformed recipes, overrides and data files by the thousand: each must be refused with a clear error, in time.

Every case begins with a legal recipe (`bases/*.yaml`, with the parts of `variants.yaml`) and spoils one thing. What is
legal nevertheless is stated in `legal.yaml`.

    python -m tests.flow.fuzz --cases 1500 --seed 0
"""
