"""How checkpoints describe their number formats, a file for each format. Needs no torch: it is asked before a start."""
