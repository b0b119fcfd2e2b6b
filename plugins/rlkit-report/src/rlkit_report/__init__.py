"""What looks at runs that have been made: the page of `rlkit report`, `diff`, `sweep` and `reward try`.

What belongs here: these verbs, and what they draw and compare. What does not: reading a run folder (`rlkit.records`),
and `rlkit replay`, which makes steps again.
"""
