"""Files and batches: how they are kept in a folder that all workers share, and how batches are computed."""
