"""What the machine has, what a model needs, how the one is split over the other, and how fast it could go at best.

Knows shapes, bytes and rates; loads no weights and runs no model.
"""
