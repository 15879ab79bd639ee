"""Models sharded over ranks: the part of each rank, how it is read from a checkpoint, and the collectives."""
