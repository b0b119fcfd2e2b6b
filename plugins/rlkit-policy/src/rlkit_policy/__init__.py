"""What is done with a policy outside of training: `rlkit validate`, `generate` and `export`.

What belongs here: these verbs, lm-evaluation-harness, the model card, and the push to the hub. What does not: the
validation of a run (`rlkit.run.evaluate`), and how weights are written (`rlkit.models.save`).
"""
