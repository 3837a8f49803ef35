"""The proof of the engine on a trained model; docs/correctness.md explains it."""
