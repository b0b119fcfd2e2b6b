"""What authors of plugins need: `rlkit plugins`, templates of packages, and the kit for their tests.

What belongs here: the contract of each kind of part (`contracts`, `conversations`), all checks of a plugin
(`conformance`), vectors computed by hand (`golden`), engines without a model (`engine`), tiny models (`models`), a
runtime (`runtime`), and the verb with its examples. What does not: tests of rlkit itself. Plugins import the kit as
`rlkit.testing`.
"""
