"""Conversations: everything asynchronous that is no engine.

What belongs here: chat templates, conversations with tools, users and environments, the event loop they run on, worker
processes for plain code, scoring, and the boundary for foreign code (`guard`). What does not: sampling of tokens
(`rlkit.engines`), and what a step does with trajectories (`rlkit.train`).
"""
