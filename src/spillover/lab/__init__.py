"""The lab: any two ways to serve a model, measured side by side, and a verdict that is statistically sound.

Experiments, engine adapters, monitors, validity and reports. Knows `bench` and HTTP, and no engine from the inside:
spillover itself is one of the servers that it starts.
"""
