"""A fleet in simulated time: a trace, replicas that batch like the engine with measured step costs, the real router.

No clock, no sockets, no threads: the same input gives the same output."""
