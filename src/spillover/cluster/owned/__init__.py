"""Servers that a router owns, as processes of this machine or on a Ray cluster, with autoscaling."""
