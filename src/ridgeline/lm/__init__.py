"""A decoder-only Transformer from Ridgeline's ops, and the lab that measures where a training step's time goes."""
