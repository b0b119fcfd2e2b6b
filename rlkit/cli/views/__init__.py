"""What verbs show: tables, cards and samples.

What belongs here: the model card, samples of a run, statistics of data, installed plugins. What does not:
arguments of verbs (`rlkit.cli`), files of a run (`rlkit.records`), and pages and comparisons (`rlkit_report`).
"""
