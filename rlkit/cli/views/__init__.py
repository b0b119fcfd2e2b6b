"""What verbs show: tables, comparisons and pages.

What belongs here: the display of a run, the HTML report and its server, comparisons of runs and of rewards, statistics
of data. What does not: arguments of verbs (`rlkit.cli`), and files of a run (`rlkit.run`).
"""
