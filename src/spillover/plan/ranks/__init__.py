"""Plans for several cards, and for cards that are not here: a table of rates, what each rank holds, what a step takes.

Predictions: arithmetic over shapes and the table, of which every entry names its source.
"""
