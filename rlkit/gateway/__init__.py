"""The gateway: an OpenAI- and Anthropic-compatible address at which agents ask the policy.

What belongs here: the forest of a session's turns, sessions with their limits, the dialects of the two providers, and
the HTTP server. What does not: rendering and sampling, which a session gets as a `PolicyBackend` (`rlkit.rollout`), and
agents themselves (`rlkit.agents`).
"""
