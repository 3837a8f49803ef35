"""From the tensors of a checkpoint to parameters: which part of which tensor goes where, and how it is read."""
