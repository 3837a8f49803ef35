"""Before the first step: device, memory, compilation, warm-up."""
