"""Plans for several cards, and for cards that this machine does not have: rates, memory of ranks, times of steps.

All are predictions: arithmetic over shapes and a table of cards, in which every entry names its source.
"""
