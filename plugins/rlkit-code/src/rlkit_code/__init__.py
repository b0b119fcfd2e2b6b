"""Code of others, run in a sandbox: programs that are graded, commands that grade, and agents that are commands.

It imports nothing: a supervisor and a grader run in processes that see this package and the standard library alone.
"""
