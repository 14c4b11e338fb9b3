"""TAEC: a training-free layer that decides which evidence enters a policy's context and how it is shown."""
