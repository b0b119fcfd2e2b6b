"""A run's prompts: made from a task's rows, checked before any weights are loaded, and put in order.

What belongs here: prompts of training, validation, mixtures and teachers; their lengths under the chat template; which
rows a step trains on; the tokenizer and the participants of conversations. What does not: tasks and the files of rows
(`rlkit_tasks`), conversations in progress (`rlkit.rollout`), and batches (`rlkit.train`).
"""
