"""The lab: compares any two ways to serve a model and gives a statistically sound verdict.

Has experiments, engine adapters, monitors, validity and reports. Depends on `bench` and HTTP, and on no engine's
internals: spillover itself is one of the servers that it starts.
"""
