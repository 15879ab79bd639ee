"""A fleet in simulated time: a trace, replicas that batch as the engine does on measured step costs, the real router.

No clock, no sockets, no threads: the same input gives the same output."""
