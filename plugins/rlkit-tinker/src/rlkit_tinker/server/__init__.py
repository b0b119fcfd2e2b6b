"""The HTTP server: the routes of the Tinker API, as its SDK 0.38 calls them.

What belongs here: messages, the log of requests and its journal, tenants, routes and the verb. What does not: how an
adapter is trained and sampled, which `rlkit_tinker.Service` does.
"""
