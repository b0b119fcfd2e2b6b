"""The gateway: an OpenAI- and Anthropic-compatible address at which agents ask the policy.

What belongs here: the forest of a session's turns, sessions with their limits, the dialects of the two providers, the
HTTP server, `PythonAgent`, and the agents of shipped recipes. What does not: rendering and sampling, which a session
gets as a `PolicyBackend`, and the life of a rollout, which rlkit runs.
"""
